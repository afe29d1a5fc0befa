"""Runs with local steps that are stopped or killed and resumed, in the same world and in others."""

import pytest

from fastvid.train.records import records as metrics
from fastvid.train.records.checkpoint import Checkpoints, decode
from tests.train import toy
from tests.train.strategies import lab, scenarios
from tests.train.strategies.conftest import Outcomes
from tests.train.strategies.kavg.test_kavg_exact import difference


@pytest.mark.parametrize("name", scenarios.STATEFUL)
def test_a_resumed_run_equals_an_uninterrupted_run(outcomes: Outcomes, name: str) -> None:
    whole, again = outcomes(2, f"whole-{name}"), outcomes(2, f"again-{name}")
    for mine, undisturbed in zip(again, whole, strict=True):
        # It stopped inside an epoch.
        assert mine["stopped_at"] % 88
        assert difference(mine, undisturbed) == 0
        assert mine["lineage"] == undisturbed["lineage"]
        assert mine["samples"] == undisturbed["samples"]
        assert mine["score"] == undisturbed["score"]
        # The steps after the stop, one by one.
        steps = len(mine["trace"]["samples"])
        assert steps < len(undisturbed["trace"]["samples"])
        assert mine["trace"]["samples"] == undisturbed["trace"]["samples"][-steps:]
        assert mine["trace"]["lr"] == undisturbed["trace"]["lr"][-steps:]


def test_a_stop_takes_effect_at_the_next_average(outcomes: Outcomes) -> None:
    # Requested after 12 steps; K is 4 and an epoch has 11 steps, so the next average is after 11 + 4.
    for rank in outcomes(2, "again-k4"):
        assert rank["stopped_at"] == 15 * toy.BATCH


def test_checkpoints_are_written_only_at_averages(outcomes: Outcomes) -> None:
    rank = outcomes(2, "whole-k4")[0]
    # Local momentum is averaged right before each.
    saved = [
        done for done, size, _ in rank["trace"]["reduced"] if size == sum(p.numel() for p in toy.net().parameters())
    ]
    assert saved == [epoch * lab.STEPS + step for epoch in range(toy.EPOCHS) for step in (4, 8, 11)]


@pytest.mark.parametrize("world", [1, 3])
def test_another_world_resumes_with_the_same_samples_after_a_kill(outcomes: Outcomes, world: int) -> None:
    undisturbed, ranks = outcomes(2, "batch-kavg")[0], outcomes(world, "resumed")
    fixed = outcomes(2, "k4")[0]
    for rank in ranks:
        assert rank["lineage"] == undisturbed["lineage"] == fixed["lineage"]
        assert rank["samples"] == undisturbed["samples"] == toy.EPOCHS * 88
        assert difference(rank, ranks[0]) == 0
        # Batches and learning rates of the remaining steps equal those of the uninterrupted run.
        steps = len(rank["trace"]["samples"])
        assert rank["trace"]["samples"] == undisturbed["trace"]["samples"][-steps:]
        assert rank["trace"]["lr"] == undisturbed["trace"]["lr"][-steps:]
    # The last average before the kill, in the second epoch.
    assert 88 < ranks[0]["trace"]["samples"][0] < 2 * 88


def test_the_checkpoint_after_a_kill_is_an_average(outcomes: Outcomes) -> None:
    folder = outcomes.killed()
    found = Checkpoints(str(folder / "checkpoints")).newest()
    assert found is not None
    state = decode(found.data, found.name)
    rows = metrics.read(folder / metrics.METRICS_FILE)
    assert state["replica"]["samples"] == rows[-1]["samples"]
    assert state["world_size"] == 2
