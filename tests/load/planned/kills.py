"""Ranks that read planned batches and are killed at random moments: ``python -m tests.load.planned.kills KILLS SEED``.

Each rank is a forked process that records every row it gets. Rank 0 saves the loader's state now and then. After a kill
a world of another size resumes from the last saved state, as a training run would. Prints one JSON object.
"""

import itertools
import json
import mmap
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

import torch

from tests.load.planned.tools import BUCKETS, PACKED, FakeVideos, loaders, rows

SAMPLES = 400
WORLDS = (1, 2, 3, 5, 7)
PLANS = {"buckets": BUCKETS, "packed": PACKED}
SAVED_EVERY = 3
DATASET = FakeVideos(SAMPLES)


def read(folder, batches, rank, world, life, state, counters, ahead):
    """Read one rank's rest of the epoch, from a state on."""
    torch.set_num_threads(1)
    loader = loaders(DATASET, batches, world, last="mask", num_threads=1, seed=4)[rank]
    if state:
        loader.load_state_dict(json.loads(state))
    with (folder / f"rows-{life}-{rank}").open("w") as notes:
        notes.write(json.dumps(loader.position) + "\n")
        for step, batch in enumerate(loader):
            notes.write(json.dumps([batch.start, rows(batch)]) + "\n")
            notes.flush()
            counters[rank] += 1
            # As in training, where a step ends only when all ranks have its batch.
            while min(counters) < counters[rank]:
                time.sleep(0.0005)
            if rank == 0 and step % SAVED_EVERY == SAVED_EVERY - 1:
                saved = loader.state_dict()
                if ahead:  # the control: a loader that counts batches that it has only prefetched
                    coming = itertools.islice(loader.plans.epoch(4, 0).shares(batch.stop), 15)
                    saved["position"] = max((share.stop for share in coming), default=batch.stop)
                (folder / "new").write_text(json.dumps(saved))
                os.replace(folder / "new", folder / "state.json")


def live(folder, batches, world, life, moment, *, ahead=False):
    """Run a world to its end, or until its ranks are killed after `moment` batches; return whether it was killed."""
    counter = memoryview(mmap.mmap(-1, 8 * world)).cast("q")
    # Read once, as the ranks of a training run agree on a checkpoint: this world saves others.
    state = (folder / "state.json").read_text() if (folder / "state.json").exists() else ""
    ranks = []
    for rank in range(world):
        child = os.fork()
        if not child:
            code = 1
            try:
                read(folder, batches, rank, world, life, state, counter, ahead)
                code = 0
            except BaseException:  # noqa: BLE001 - told by the exit code
                traceback.print_exc()
            finally:
                os._exit(code)
        ranks.append(child)
    codes = {}
    while len(codes) < world:
        for rank in [rank for rank in ranks if rank not in codes]:
            ended, status = os.waitpid(rank, os.WNOHANG)
            if ended:
                codes[rank] = os.waitstatus_to_exitcode(status)
        if moment is not None and max(counter) >= moment:
            for rank in ranks:
                if rank not in codes:
                    os.kill(rank, signal.SIGKILL)
            moment = None
        time.sleep(0.001)
    assert set(codes.values()) <= {0, -signal.SIGKILL}, codes
    return -signal.SIGKILL in codes.values()


def delivered(folder, worlds):
    """Return the rows that a training run would have seen: of each world those before the state of the next."""
    lives = []
    for life, world in enumerate(worlds):
        files = [folder / f"rows-{life}-{rank}" for rank in range(world)]
        # A rank killed early has no file or an empty one; the last line may be cut off.
        texts = [file.read_text().split("\n")[:-1] for file in files if file.exists()]
        texts = [text for text in texts if text]
        starts = {int(text[0]) for text in texts}
        assert len(starts) <= 1, starts
        if starts:
            lives.append((starts.pop(), [json.loads(line) for text in texts for line in text[1:]]))
    found = []
    for number, (_, records) in enumerate(lives):
        stop = lives[number + 1][0] if number + 1 < len(lives) else SAMPLES
        found += [row for start, own in records if start < stop for row in own]
    return sorted(found)


def run(batches, moments, worlds, *, ahead=False):
    """Run an epoch that is killed at some moments; return its rows and the number of kills."""
    with tempfile.TemporaryDirectory() as scratch:
        folder, kills = Path(scratch), 0
        for life, (world, moment) in enumerate(zip(worlds, [*moments, None], strict=True)):
            killed = live(folder, batches, world, life, moment, ahead=ahead)
            kills += killed
            if not killed:
                return delivered(folder, worlds[: life + 1]), kills
        raise AssertionError("the last world is never killed")


def main():
    kills, draws = int(sys.argv[1]), random.Random(int(sys.argv[2]))
    record = {}
    for name, batches in PLANS.items():
        truth, _ = run(batches, [], [1])
        done, same, all_worlds = 0, [], []
        while done < kills:
            worlds = [draws.choice(WORLDS)]
            while len(worlds) < 4:
                worlds.append(draws.choice([world for world in WORLDS if world != worlds[-1]]))
            found, killed = run(batches, [draws.randint(0, 12) for _ in worlds[1:]], worlds)
            done += killed
            same.append(found == truth)
            all_worlds.append(worlds)
        harmed, killed = run(batches, [SAVED_EVERY + 2], [2, 3], ahead=True)
        samples = [row[1] for row in truth]
        record[name] = {
            "rows": len(truth),
            "each_once": sorted(samples) == list(range(SAMPLES)),
            "kills": done,
            "worlds": all_worlds,
            "same": same,
            "control_differs": bool(killed) and harmed != truth,
        }
    sys.stdout.write(json.dumps(record))


if __name__ == "__main__":
    main()
