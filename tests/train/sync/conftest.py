"""Runs all scenarios once, grouped by world, because a process takes seconds to start."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fastvid.load.world import World
from fastvid.train.elastic import Member
from tests.train import toy
from tests.train.sync import lab, scenarios

ALONE = Member(World(), torch.device("cpu"))
BY_WORLD = {
    2: (
        "k1-sgd", "k1-momentum", "k1-average", "k1-adam", "k4", "k4-norm", "k4-average", "k4-reset", "k4-block0",
        "k4-block", "k4-slowmo", "count-k11", "count-k5", "count-average", "count-fp16", "count-bf16", "still-block",
        "post-local", "ddp-plain", "scheduled", "adaptive", "batch-ddp", "batch-kavg", "batch-capped", "batch-plateau",
        "meter-ddp", "meter-k1", "meter-k5",
        *(f"{when}-{name}" for name in scenarios.STATEFUL if name != "groups" for when in ("whole", "again")),
    ),
    3: ("k1-momentum", "k1-masked", "batch-ddp", "resumed"),
    4: (
        "noise-k3", "noise-k7", "noise-k11", "still-k11", "k2", "k4", "groups-equal", "groups-of-1", "groups-of-2",
        "groups-of-4", "whole-groups", "again-groups",
    ),
}  # fmt: skip

Outcome = dict[str, Any]
Outcomes = Callable[[int, str], list[Outcome]]


@pytest.fixture(scope="session")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """The outcomes of a scenario, by world and name: one a rank. Worlds are run when they are first asked for."""
    folder = tmp_path_factory.mktemp("sync")
    started: set[int] = set()

    def start(world: int) -> None:
        here = folder / str(world)
        here.mkdir()
        if "resumed" in BY_WORLD[world]:
            shutil.copytree(killed(folder), here / "resumed")
        assert toy.spawn(world, here, *BY_WORLD[world], module=scenarios.__name__) == [0] * world

    def get(world: int, name: str) -> list[Outcome]:
        if world == 1:
            return [alone(folder, name)]
        if world not in started:
            started.add(world)
            start(world)
        return lab.results(folder / str(world), name, world)

    return get


def alone(folder: Path, name: str) -> Outcome:
    """The outcome of a scenario in this process, run once."""
    here = folder / "1"
    path = here / f"{name}.pt"
    if not path.exists():
        if name == "resumed":
            shutil.copytree(killed(folder), here / name)
        torch.save(scenarios.SCENARIOS[name](here / name, ALONE), path)
    found: Outcome = torch.load(path)
    return found


def killed(folder: Path) -> Path:
    """The folder of a run of two ranks, one of which was killed."""
    here = folder / "killed"
    if not here.exists():
        here.mkdir()
        codes = toy.spawn(2, here, "killed", module=scenarios.__name__)
        # The other rank finds that its peer is gone.
        assert codes[1] == -signal.SIGKILL
        assert codes[0] not in (0, -signal.SIGKILL)
    return here / "killed"
