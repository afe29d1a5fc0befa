"""Runs of the toy with a callback on every rank: ``python -m tests.train.plugins.ranks FOLDER SCENARIO...``."""

import contextlib
import sys
from pathlib import Path

import torch

from fastvid.errors import FastvidError
from fastvid.train.config.config import to_json
from fastvid.train.ranks import join
from fastvid.train.records.records import Observers, RunInfo
from tests.train import toy
from tests.train.plugins.test_observers import Seen


def main():
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    try:
        with join(60.0) as member:
            run(folder, member)
    except FastvidError as error:
        (folder / f"error-{member.world.rank}").write_text(str(error))
        raise


def run(folder, member):
    # A separate function, so that all references to the process group are gone before it is destroyed.
    config = toy.toy_config(folder / sys.argv[2], eval_every_epochs=2)
    (folder / sys.argv[2]).mkdir(exist_ok=True)
    made = toy.trainer(config, member)
    made.callbacks = Observers("run.callbacks", {"seen": Seen()})
    world = member.world
    info = RunInfo(Path(config.run.out), to_json(config), world.rank, world.size, 0, made.replica.model)
    made.callbacks.call("on_start", info)
    with contextlib.closing(made.recorder):
        made.fit()
    made.callbacks.call("on_end", {"samples": made.replica.samples})


if __name__ == "__main__":
    main()
