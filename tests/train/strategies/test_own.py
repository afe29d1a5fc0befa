"""User-defined strategies can do everything that the built-in ones can; tests those of the documentation."""

import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fastvid.runtime.processes import World
from fastvid.train.loop.strategy import Strategy, build_strategy, find_strategy, strategy_of
from fastvid.train.ranks import Member
from fastvid.train.records import records as metrics
from fastvid.train.run import launch
from tests.train import toy
from tests.train.strategies import lab, own

CHECKOUT = Path(__file__).parents[3]
FILE = re.compile(r'Path\("(\w+\.py)"\)\.write_text\(\'\'\'\n(.*?)\'\'\'\)', re.DOTALL)
STEPS = toy.EPOCHS * (toy.NUM_SAMPLES // toy.BATCH)
RANKS = 2


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Return a folder with the strategies of the documentation and of the examples."""
    folder = tmp_path_factory.mktemp("own")
    written = dict(FILE.findall((CHECKOUT / "docs" / "extending.md").read_text()))
    (folder / "epochly.py").write_text(written["epochly.py"])
    shutil.copy(CHECKOUT / "examples" / "gossip.py", folder)
    return folder


@pytest.fixture(autouse=True)
def importable(files, monkeypatch):
    monkeypatch.syspath_prepend(str(files))


@pytest.fixture(scope="module")
def runs(files, tmp_path_factory):
    """Return the folder with the results of two ranks."""
    folder = tmp_path_factory.mktemp("runs")
    path = os.pathsep.join([str(files), os.environ.get("PYTHONPATH", "")])
    assert toy.spawn(RANKS, folder, *own.SCENARIOS, module=own.__name__, PYTHONPATH=path) == [0] * RANKS
    return folder


def test_ranks_of_a_user_defined_asynchronous_strategy_do_not_wait(runs, tmp_path):
    both = lab.results(runs, "whole", RANKS)
    steps = [len(found["trace"]["weights"]) for found in both]
    # The second rank blocked in a step until the first had done many: ranks do not wait for each other.
    assert steps[0] >= own.AHEAD
    assert own.BEHIND <= steps[1] < STEPS
    assert all(done == 0 for found in both for done, *_ in found["trace"]["reduced"])
    # Together the ranks trained on every position once, as one rank would.
    alone = lab.run(lab.Case(sync="ddp"), tmp_path, toy.ALONE)
    for epoch, entry in enumerate(alone["lineage"]):
        given = [row for found in both for row in found["lineage"] if row["epoch"] == epoch]
        assert sum(row["samples"] for row in given) == entry["samples"]
        assert sum(int(row["digest"], 16) for row in given) % 2**64 == int(entry["digest"], 16)
    # Rank 0 evaluates and saves; the other does neither.
    assert both[0]["score"]["loss"] < 0.9 * toy.score(toy.ALONE, bad=()).loss
    assert both[1]["score"] is None


def test_a_user_defined_asynchronous_run_resumes(runs):
    both = lab.results(runs, "stopped", RANKS)
    assert not any(found["first"]["over"] for found in both)
    assert all(found["over"] for found in both)
    rows = metrics.read(runs / "stopped" / metrics.METRICS_FILE)
    begun, resumed = (row["samples"] // toy.BATCH for row in rows if row["kind"] == "start")
    before = [len(found["first"]["trace"]["weights"]) for found in both]
    assert begun == 0 < resumed <= sum(before)
    # Work done before rank 0 wrote its checkpoint is not repeated; all other work is.
    after = sum(len(found["trace"]["weights"]) for found in both)
    assert before[0] <= STEPS - after <= sum(before)


def test_wrong_options_of_any_strategy_are_named():
    noise, four = "batch=noise does not support", Member(World(1, 4), torch.device("cpu"))
    for name, options, message, hint in (
        ("gossip", {}, "unknown sync 'gossip'", "use one of asgd, ddp, kavg, relay; or module:class"),
        ("gossip:Whisper", {}, "sync is 'gossip:Whisper', but module 'gossip' has no 'Whisper'", ""),
        ("gossips:Gossip", {}, "sync is 'gossips:Gossip', but there is no module 'gossips'", ""),
        ("gossip:Round", {}, "is not a strategy", "Strategy"),
        (own.SYNC, {"mux": 1}, "'gossip:Gossip' has no option 'mux'", "use one of mix"),
        # A batch policy needs ranks that share batches, also for a user-defined strategy.
        (own.SYNC, {"batch": "schedule"}, "no option 'batch'", "use one of mix"),
        ("epochly:Epochly", {"batch_size": 1}, "no option 'batch_size'", "batch_growth"),
        ("relay", {"period": 3}, "no option 'period'", "use one of order, partitions"),
        ("asgd", {"shards": 2, "bound": 1}, "no option 'bound', 'shards'", "use one of push"),
        ("asgd", {"push": "deltas"}, "push is 'deltas'", "use one of gradients"),
        ("asgd", {"lease_batches": 0}, "lease_batches is 0", ""),
        ("asgd", {"timeout_s": 0.0}, "timeout_s is 0.0, expected at least 1", ""),
        ("asgd", {"server": "nowhere"}, "expected host:port", ""),
        ("asgd", {"port": 70_000}, "port is 70000, expected 0 to 65535", ""),
        ("asgd", {"batch": "schedule"}, "no option 'batch'", ""),
        ("ddp", {"gradients": "fp8"}, "gradients is 'fp8'", "use one of fp32, fp16, bf16"),
        ("kavg", {"period": 0}, "period is 0", ""),
        ("kavg", {"period": "4@0,8@2"}, "period is '4@0,8@2', expected a whole number", ""),
        ("kavg", {"outer": "nesterov", "outer_lr": "fast"}, "outer_lr is 'fast', expected a number or none", ""),
        ("asgd", {"lease_batches": 1.5}, "lease_batches is 1.5, expected a whole number", ""),
        ("relay", {"host": 7}, "host is 7, expected a text or none", ""),
        ("ddp", {"batch": "noise", "batch_max": "big"}, "batch_max is 'big', expected a whole number or none", ""),
        ("kavg", {"compress": "fp16"}, "compress is 'fp16'", "use one of none, int8, int4"),
        ("kavg", {"outer": "adam"}, "outer is 'adam'", ""),
        ("kavg", {"fragments": 2}, "no option 'fragments'", "use one of period"),
        ("kavg", {"batch": "noise", "compress": "int8"}, noise, "use batch=schedule"),
        ("kavg", {"outer": "nesterov", "outer_momentum": 1.0}, "outer_momentum is 1.0", ""),
        ("kavg", {"outer_momentum": 0.5}, "no effect with outer=none", ""),
        ("kavg", {"outer": "nesterov", "outer_lr": 0}, "outer_lr is 0", ""),
        ("kavg", {"local_after": -1}, "local_after is -1", ""),
        ("kavg", {"batch": "magic"}, "batch is 'magic'", "use one of schedule"),
        ("ddp", {"batch": "schedule", "batch_growth": 1}, "batch_growth is 1", ""),
        ("ddp", {"batch": "schedule", "batch_growth": 1.5}, "batch_growth is 1.5", ""),
        ("ddp", {"batch": "schedule", "batch_at": "2,1"}, "batch_at is '2,1'", ""),
        ("ddp", {"batch": "noise", "batch_at": "2"}, "no option batch_at", ""),
        ("kavg", {"batch": "noise", "batch_threshold": 0}, "batch_threshold is 0", ""),
        ("ddp", {"batch": "noise", "batch_window": 0}, "batch_window is 0", ""),
        ("ddp", {"batch": "schedule", "batch_lr": "sqrt"}, "batch_lr is 'sqrt'", ""),
        ("kavg", {"batch_max": 64}, "need a batch policy", ""),
        ("ddp", {"batch": "noise", "batch_size": 64}, "no option 'batch_size'", "batch_growth"),
    ):
        with toy.refused(message, hint):
            build_strategy(name, four, options)


def test_the_batch_grows_with_a_user_defined_strategy(tmp_path):
    optim = {"decay": "step", "milestones": (1.0, 2.5), "gamma": 0.5}
    case = lab.Case({"batch": "schedule"}, sync="epochly:Epochly", optim=optim)
    grown = lab.run(case, tmp_path / "own", toy.ALONE)
    assert len(grown["trace"]["weights"]) < STEPS
    # One rank equals ddp, up to the rounding of its loss factor.
    plain = lab.run(replace(case, sync="ddp"), tmp_path / "ddp", toy.ALONE)
    assert all(torch.allclose(value, plain["weights"][name], atol=1e-9) for name, value in grown["weights"].items())


def config(sync, **optim):
    base = toy.toy_config(Path())
    return replace(base, sync=sync, optim=replace(base.optim, **optim))


def test_ema_needs_ranks_that_share_batches():
    with toy.refused(f"sync={own.SYNC} does not support optim.ema_decay"):
        strategy_of(config(own.SYNC, ema_decay=0.9))
    assert strategy_of(config("epochly:Epochly", ema_decay=0.9)) is find_strategy("epochly:Epochly")


class Several(Strategy):
    """Trains all models of a recipe itself."""

    @classmethod
    def start(cls, configs, train):
        return 100 + len(configs)


def test_a_strategy_can_train_several_models():
    assert launch.start([config(f"{__name__}:Several")] * 3) == 103
    with toy.refused("2 models, but sync=gossip:Gossip trains one", "set sync=relay to train all of them"):
        launch.start([config(own.SYNC)] * 2)
