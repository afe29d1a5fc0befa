"""``sync=asgd`` under the real trainer: ranks of one job, and jobs of their own.

``python -m tests.train.asgd.jobs FOLDER SCENARIO...`` on every rank, as `tests.train.sync.lab` does; or
``python -m tests.train.asgd.jobs FOLDER job NAME PORT`` for a job of one process: the server where NAME begins with
"server", else a client of it. It begins when the file "go" is there, and takes its first step when all that the file
names are about to.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # torch does it with the first optimizer, for seconds in which others would train on

from fastvid.load.world import World
from fastvid.train.elastic import Member
from fastvid.train.loop import Trainer
from tests.train.sync import lab

ALONE = Member(World(), torch.device("cpu"))
LEASE_BATCHES = 4
STEP_S = 0.02  # so that nobody is done before all have come
PAUSE_S = 0.005


def slow(made: Trainer) -> None:
    made.replica.model.register_forward_pre_hook(lambda *_: time.sleep(STEP_S))


def meet(own: Path, others: list[Path]) -> None:
    if not own.exists():
        own.touch()
        while not all(other.exists() for other in others):
            time.sleep(PAUSE_S)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "overlap": {"overlap": True, "n_push": 2, "shards": 2},
    "bound": {"bound": 2, "staleness_aware": True},
    "elastic": {"elasticity": 0.3, "n_push": 2},
}
SCENARIOS = {
    name: lambda folder, member, options=options: lab.run(
        lab.Case(
            sync="asgd", norm=True, options={"lease_batches": LEASE_BATCHES, **options}, setup=slow,
            optim={"momentum": 0.5},
        ),
        folder, member,
    )
    for name, options in OPTIONS.items()
}  # fmt: skip


def job(folder: Path, name: str, port: str) -> None:
    torch.set_num_threads(1)
    (folder / f"{name}.ready").touch()
    while not (folder / "go").exists():
        time.sleep(PAUSE_S)
    others = [folder / f"{other}.steps" for other in (folder / "go").read_text().split()]
    server = name.startswith("server")
    place = {"port": int(port)} if server else {"server": f"127.0.0.1:{port}"}

    def setup(made: Trainer) -> None:
        slow(made)
        made.replica.model.register_forward_pre_hook(lambda *_: meet(folder / f"{name}.steps", others))

    case = lab.Case(
        sync="asgd", setup=setup, run={"checkpoint_every_s": 0.0},
        options={"lease_batches": LEASE_BATCHES, "shards": 2, **place},
    )  # fmt: skip
    torch.save(lab.run(case, folder / ("server" if server else name), ALONE), folder / f"{name}.pt")


if __name__ == "__main__":
    if sys.argv[2] == "job":
        job(Path(sys.argv[1]), *sys.argv[3:])
    else:
        lab.main(SCENARIOS)
