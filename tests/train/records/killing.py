"""Writers of checkpoints, killed at random moments: ``python -m tests.train.records.killing FOLDER KILLS SEED``.

Prints one JSON object: how often the kill fell inside a write, and what could be loaded after each.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from fastvid.train.records.checkpoint import Checkpoints, decode

SIZE = 500_000  # numbers of a state: 2 MB, some milliseconds of writing


def write(folder, first, told):
    """Write checkpoints in a loop, and report each one."""
    checkpoints = Checkpoints(str(folder), keep=1)
    for samples in range(first, first + 1000):
        checkpoints.begin({"samples": samples, "weight": torch.full((SIZE,), float(samples))}, samples)
        checkpoints.wait()
        os.write(told, samples.to_bytes(8, "little"))


def main():
    folder, kills, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    draws = random.Random(seed)
    inside, newest, lost, unreadable = 0, 0, 0, 0
    for _ in range(kills):
        ours, theirs = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                write(folder, newest + 1, theirs)
            finally:
                os._exit(1)
        os.close(theirs)
        # Kill it at a random time after its first checkpoint, within about two more.
        first = os.read(ours, 8)
        time.sleep(draws.uniform(0, 0.05))
        os.kill(child, signal.SIGKILL)
        assert os.WIFSIGNALED(os.waitpid(child, 0)[1]), "a writer failed by itself"
        said = first + b"".join(iter(lambda pipe=ours: os.read(pipe, 4096), b""))
        os.close(ours)
        confirmed = int.from_bytes(said[-8:], "little")
        inside += any(path.suffix == ".tmp" for path in folder.iterdir())
        checkpoints = Checkpoints(str(folder), keep=1)
        found = checkpoints.newest()
        assert found is not None
        state = decode(found.data, found.name)
        newest = int(state["samples"])
        lost += newest < confirmed
        unreadable += not bool((state["weight"] == newest).all())
        checkpoints.prepare()
        assert sorted(path.name for path in folder.iterdir()) == checkpoints.names(), "temporary files are left"
    print(json.dumps({"kills": kills, "inside_a_write": inside, "lost": lost, "unreadable": unreadable}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
