"""A strategy of a user's own can do what those of the package can; the tutorial's are the ones tested."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fastvid.errors import UsageError
from fastvid.runtime.world import World
from fastvid.train.config.config import Config
from fastvid.train.loop.strategy import Strategy, build_strategy, find_strategy, strategy_of
from fastvid.train.ranks.elastic import Member
from fastvid.train.records import metrics
from fastvid.train.run import launch
from tests.train import toy
from tests.train.strategies import lab, own

TUTORIAL = Path(__file__).parents[3] / "docs" / "tutorials" / "strategy.md"
FILE = re.compile(r'Path\("(\w+\.py)"\)\.write_text\(\'\'\'\n(.*?)\'\'\'\)', re.DOTALL)
ALONE = Member(World(), torch.device("cpu"))
STEPS = toy.EPOCHS * (toy.NUM_SAMPLES // toy.BATCH)
RANKS = 2


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the strategies of the tutorial."""
    folder = tmp_path_factory.mktemp("own")
    for name, text in FILE.findall(TUTORIAL.read_text()):
        (folder / name).write_text(text)
    assert sorted(path.name for path in folder.iterdir()) == ["epochly.py", "gossip.py"]
    return folder


@pytest.fixture(autouse=True)
def importable(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(files))


@pytest.fixture(scope="module")
def runs(files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where two ranks left what they found."""
    folder = tmp_path_factory.mktemp("runs")
    path = os.pathsep.join([str(files), os.environ.get("PYTHONPATH", "")])
    assert toy.spawn(RANKS, folder, *own.WHOLE, *own.STOPPED, module=own.__name__, PYTHONPATH=path) == [0] * RANKS
    return folder


@pytest.mark.parametrize("scenario", own.WHOLE)
def test_asynchronous_ranks_of_a_users_own_go_at_their_own_pace(runs: Path, tmp_path: Path, scenario: str) -> None:
    both = lab.results(runs, scenario, RANKS)
    steps = [len(found["trace"]["weights"]) for found in both]
    # The second rank stood still in a step until the first had done many: nobody waits for anybody.
    assert steps[0] >= own.AHEAD
    assert own.BEHIND <= steps[1] < STEPS
    assert all(done == 0 for found in both for done, *_ in found["trace"]["reduced"])
    # Together they trained on every position once, as one rank would.
    alone = lab.run(lab.Case(sync="ddp"), tmp_path, ALONE)
    for epoch, entry in enumerate(alone["lineage"]):
        given = [row for found in both for row in found["lineage"] if row["epoch"] == epoch]
        assert sum(row["samples"] for row in given) == entry["samples"]
        assert sum(int(row["digest"], 16) for row in given) % 2**64 == int(entry["digest"], 16)
    # Rank 0 evaluates and saves; the other does neither.
    assert both[0]["score"]["loss"] < 0.9 * toy.score(ALONE, bad=()).loss
    assert both[1]["score"] is None


@pytest.mark.parametrize("scenario", own.STOPPED)
def test_an_asynchronous_run_of_a_users_own_resumes(runs: Path, scenario: str) -> None:
    both = lab.results(runs, scenario, RANKS)
    assert not any(found["first"]["over"] for found in both)
    assert all(found["over"] for found in both)
    rows = metrics.read(runs / scenario / metrics.METRICS_FILE)
    begun, resumed = (row["samples"] // toy.BATCH for row in rows if row["kind"] == "start")
    before = [len(found["first"]["trace"]["weights"]) for found in both]
    assert begun == 0 < resumed <= sum(before)
    # What was done when rank 0 wrote its checkpoint is not done again, and all else is.
    after = sum(len(found["trace"]["weights"]) for found in both)
    assert before[0] <= STEPS - after <= sum(before)


def test_errors_name_what_a_users_own_strategy_knows() -> None:
    for name, options, message, hint in (
        ("gossip", {}, "sync is 'gossip'", "known are asgd, ddp, kavg, relay; or module:class of your own"),
        ("gossip:Whisper", {}, "does not load: module 'gossip' has no attribute 'Whisper'", ""),
        ("gossips:Gossip", {}, "does not load: No module named 'gossips'", ""),
        ("gossip:Round", {}, "is no strategy", "Strategy"),
        (own.SYNC, {"mux": 1}, "'gossip:Gossip' has no option 'mux'", "its options are mix"),
        # A batch policy needs ranks that share batches, whoever wrote the strategy.
        (own.SYNC, {"batch": "schedule"}, "no option 'batch'", "its options are mix"),
        ("epochly:Epochly", {"batch_size": 1}, "no option 'batch_size'", "batch_growth"),
    ):
        with pytest.raises(UsageError, match=re.escape(message)) as error:
            build_strategy(name, ALONE, options)
        assert hint in (error.value.hint or "")


def test_the_batch_grows_with_a_users_own_strategy(tmp_path: Path) -> None:
    optim = {"decay": "step", "milestones": (1.0, 2.5), "gamma": 0.5}
    case = lab.Case({"batch": "schedule"}, sync="epochly:Epochly", optim=optim)
    grown = lab.run(case, tmp_path / "own", ALONE)
    assert len(grown["trace"]["weights"]) < STEPS
    # One rank that steps alone does what ddp does, up to the rounding of its own factor of the loss.
    plain = lab.run(replace(case, sync="ddp"), tmp_path / "ddp", ALONE)
    assert all(torch.allclose(value, plain["weights"][name], atol=1e-9) for name, value in grown["weights"].items())


def config(sync: str, **optim: Any) -> Config:
    base = toy.toy_config(Path())
    return replace(base, sync=sync, optim=replace(base.optim, **optim))


def test_an_average_of_the_weights_needs_ranks_that_step_alike() -> None:
    for sync in ("kavg", "asgd", "relay", own.SYNC):
        with pytest.raises(UsageError, match=f"ema_decay does not go with sync={sync}"):
            strategy_of(config(sync, ema_decay=0.9))
    assert strategy_of(config("ddp", ema_decay=0.9)) is find_strategy("ddp")


class Several(Strategy):
    """Trains all models of a recipe itself."""

    @classmethod
    def start(cls, configs: Sequence[Config], train: Callable[[Config], int]) -> int:
        return 100 + len(configs)


def test_a_strategy_may_train_several_models() -> None:
    assert launch.start([config(f"{__name__}:Several")] * 3) == 103
    with pytest.raises(UsageError, match="2 models, sync=gossip:Gossip trains one") as error:
        launch.start([config(own.SYNC)] * 2)
    assert error.value.hint == "train all of them with sync=relay"
