"""The moving average of the weights with strategies that average models in rounds, and per model of a sweep."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fastvid.errors import UsageError
from fastvid.runtime.processes import World
from fastvid.train.loop.strategy import strategy_of
from fastvid.train.parts.optim import Schedule, make_optimizer
from fastvid.train.parts.replica import Replica
from fastvid.train.records.checkpoint import decode
from fastvid.train.strategies.relay.scheduler import Unit
from fastvid.train.strategies.relay.stage import Clips
from tests.train import toy
from tests.train.plugins import averages
from tests.train.strategies import lab

STEPS = toy.NUM_SAMPLES // toy.BATCH


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("averages")
    assert toy.spawn(2, folder, *averages.KINDS, module=averages.__name__) == [0, 0]
    return {name: lab.results(folder, name, 2) for name in averages.KINDS}


def by_hand(run, period):
    """Return the average over the models after each round, which also ends with the epoch."""
    average, done = run["start"], 0
    for step, weights in enumerate(run["trace"]["weights"], 1):
        within = step % STEPS or STEPS
        if within % period == 0 or within == STEPS:
            keep = averages.DECAY ** (step - done)
            average, done = keep * average + (1 - keep) * run["settled"].get(step, weights), step
    return average


@pytest.mark.parametrize(("name", "period"), [("ddp", 1), ("kavg", averages.PERIOD)])
def test_the_average_takes_in_each_common_model_by_its_samples(runs, name, period):
    first, second = runs[name]
    assert torch.equal(first["average"], second["average"])
    torch.testing.assert_close(first["average"], by_hand(first, period), rtol=0, atol=1e-12)
    assert float((first["average"] - first["trace"]["weights"][-1]).abs().max()) > 1e-3


def test_checkpoints_do_not_change_the_average(runs):
    assert torch.equal(runs["kavg"][0]["average"], runs["saving"][0]["average"])


def test_each_model_of_a_sweep_carries_its_average():
    config = toy.toy_config(Path())

    def replica():
        model = toy.net()
        schedule = Schedule(config.optim, epochs=5, samples_per_epoch=toy.NUM_SAMPLES, global_batch_size=toy.BATCH)
        return Replica(model, make_optimizer(model, config.optim), schedule, ema_decay=0.9, ema_clips=toy.BATCH)

    sweep = Clips.__new__(Clips)  # without a dataset
    sweep.configs, sweep.member = [config], toy.ALONE
    sweep.replica = lambda model, fresh: replica()
    sweep.loader = lambda unit: toy.ToyLoader(World())
    token, states = None, []
    for partition in range(2):
        token, report = sweep.visit(Unit(0, 0, partition, ends_epoch=False), token)
        assert report["samples"]
        states.append(decode(token, "token")["replica"])
    first, second = (state["average"]["0.weight"] for state in states)
    weights = [state["model"]["0.weight"] for state in states]
    # An average lags behind its weights, and goes on in the next visit from where it was.
    assert float((first - weights[0]).abs().max()) > 0
    assert float((second - first).abs().max()) < float((weights[1] - first).abs().max())


def test_strategies_without_a_common_model_refuse_an_average_with_the_reason():
    base = toy.toy_config(Path())
    config = replace(base, optim=replace(base.optim, ema_decay=0.9))
    with pytest.raises(UsageError, match=r"sync=asgd does not support optim\.ema_decay: its ranks step independently"):
        strategy_of(replace(config, sync="asgd"))
    for sync in ("ddp", "kavg", "relay"):
        strategy_of(replace(config, sync=sync))
