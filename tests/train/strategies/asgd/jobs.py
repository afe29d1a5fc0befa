"""``sync=asgd`` under the real trainer: ranks of one job, and jobs of their own.

``python -m tests.train.strategies.asgd.jobs FOLDER SCENARIO...`` on every rank, as `tests.train.strategies.lab` does;
or ``python -m tests.train.strategies.asgd.jobs FOLDER job NAME PORT ALL...`` for a job of one process: the server where
NAME is "server", else a client of it. It takes its first step when all that are named are about to.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from fastvid.runtime.world import World
from fastvid.train.loop.loop import Trainer
from fastvid.train.ranks.elastic import Member
from tests.train.strategies import lab

ALONE = Member(World(), torch.device("cpu"))
LEASE_BATCHES = 4
PERIOD = 3
STEP_S = 0.02  # so that clients take turns
PAUSE_S = 0.005


def begin_together(folder: Path, name: str, names: Sequence[str]) -> Callable[[Trainer], None]:
    """Make a trainer wait before its first step until all named jobs are about to take theirs."""
    own, all_of_them = folder / f"{name}.steps", [folder / f"{other}.steps" for other in names]

    def step(*_: object) -> None:
        if not own.exists():
            own.touch()
            while not all(other.exists() for other in all_of_them):
                time.sleep(PAUSE_S)
        time.sleep(STEP_S)

    def setup(made: Trainer) -> None:
        made.replica.model.register_forward_pre_hook(step)

    return setup


GRADIENTS: dict[str, Any] = {"push": "gradients", "lease_batches": LEASE_BATCHES}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": GRADIENTS,
    "overlap": {**GRADIENTS, "overlap": True, "shards": 2},
    "bound": {**GRADIENTS, "bound": 2, "staleness_aware": True},
    "deltas": {"period": PERIOD},
    "all": {"period": PERIOD, "quorum": "all", "outer": "none"},
}
SCENARIOS = {
    name: lambda folder, member, options=options: lab.run(
        lab.Case(
            sync="asgd", norm=True, options=options, optim={"momentum": 0.5},
            setup=begin_together(folder, str(member.world.rank), [str(rank) for rank in range(member.world.size)]),
        ),
        folder, member,
    )
    for name, options in OPTIONS.items()
}  # fmt: skip


def job(folder: Path, name: str, port: str, *names: str) -> None:
    torch.set_num_threads(1)
    place = {"port": int(port)} if name == "server" else {"server": f"127.0.0.1:{port}"}
    case = lab.Case(
        sync="asgd", setup=begin_together(folder, name, names), run={"checkpoint_every_s": 0.0},
        options={"lease_batches": LEASE_BATCHES, "shards": 2, **place},
    )  # fmt: skip
    torch.save(lab.run(case, folder / name, ALONE), folder / f"{name}.pt")


if __name__ == "__main__":
    if sys.argv[2] == "job":
        job(Path(sys.argv[1]), *sys.argv[3:])
    else:
        lab.main(SCENARIOS)
