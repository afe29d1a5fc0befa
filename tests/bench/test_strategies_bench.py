"""Benchmarks of strategies: simulated network, counted time, judgement; the lineage that a run must have."""

import argparse
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.strategies import averaging, clients, contest
from bench.strategies.contest import Contender, Goal, best, interval, ratio
from bench.strategies.motion_sync import lineage_of
from bench.strategies.ranks import Ranks, RunSpec
from bench.strategies.slow_network import SlowLink
from fastvid.format.dataset import Dataset
from fastvid.load.clips.crops import CenterCrop
from fastvid.load.clips.sampling import Segments
from fastvid.train.parts.replica import Lineage
from tests import datasets
from tests.load.loaders import clip_loader

SLOW = SlowLink(0.2)


def test_an_all_reduce_takes_delay_plus_bytes_over_bandwidth() -> None:
    assert SlowLink(0.1).seconds(10**9, 2) == 0.1
    # Each of two ranks sends the whole message once, each of four one and a half times.
    assert SlowLink(0.1, 1e6).seconds(10**6, 2) == pytest.approx(1.1)
    assert SlowLink(0.1, 1e6).seconds(10**6, 4) == pytest.approx(1.6)


@pytest.fixture(scope="module")
def runs() -> dict[str, list[dict[str, Any]]]:
    with Ranks(2) as ranks:
        kavg = RunSpec("kavg", {"period": 4}, clips=512, look_clips=128)
        links = [SlowLink(), SLOW, SlowLink(0.0, 1e6)]
        counted = {"counted": True, "clip_s": 0.01, "links": links}
        return {
            "fast": ranks.run(kavg),
            "slow": ranks.run(RunSpec("kavg", {"period": 4}, clips=512, look_clips=128, links=[SLOW])),
            "counted": ranks.run(RunSpec("kavg", {"period": 4}, clips=512, look_clips=128, **counted)),
            "int4": ranks.run(RunSpec("kavg", {"period": 4, "compress": "int4"}, clips=512, **counted)),
            "ddp": ranks.run(RunSpec("ddp", clips=512, **counted)),
        }


@pytest.mark.soak
def test_a_slow_network_delays_messages_and_changes_no_result(runs: dict[str, list[dict[str, Any]]]) -> None:
    for fast, slow, counted in zip(runs["fast"], runs["slow"], runs["counted"], strict=True):
        assert fast["steps"] == slow["steps"] == counted["steps"] == 16
        # Clips, loss and accuracy; only the time differs.
        seen = [[(row[0], *row[2:]) for row in run["curve"]] for run in (fast, slow, counted)]
        assert seen[0] == seen[1] == seen[2]
        assert fast["messages"] == slow["messages"] == counted["messages"]
        assert slow["seconds"][0] > 4 * SLOW.delay_s  # a sleep is never shorter than requested
    assert len(runs["fast"][0]["curve"]) == 4


@pytest.mark.soak
def test_counted_time_is_that_of_computation_and_messages(runs: dict[str, list[dict[str, Any]]]) -> None:
    kavg, ddp = runs["counted"][0], runs["ddp"][0]
    none, slow, narrow = kavg["seconds"]
    assert none == pytest.approx(512 / 2 * 0.01)
    assert slow == pytest.approx(none + kavg["messages"] * SLOW.delay_s)
    assert narrow == pytest.approx(none + kavg["wire_bytes"] / 1e6)
    # Gradients travel in the backward pass, so part of them costs no time.
    assert none < ddp["seconds"][2] < none + ddp["wire_bytes"] / 1e6
    # The end of the epoch is sent in full precision.
    assert ddp["wire_bytes"] > 3 * kavg["wire_bytes"] > 3 * 1.8 * runs["int4"][0]["wire_bytes"]


def test_a_goal_is_reached_when_the_mean_of_its_window_is() -> None:
    curve = [[clips, [0.0], loss, 1 - loss] for clips, loss in enumerate((0.9, 0.4, 0.9, 0.5, 0.5, 0.3))]
    assert Goal(0.5, window=1).reached(curve) == 1
    assert Goal(0.5, window=3).reached(curve) == 5
    assert Goal(0.6, accuracy=True, window=1).reached(curve) == 1
    assert Goal(0.1, window=1).reached(curve) is None
    assert Goal(0.5, window=2).final(curve) == pytest.approx(0.4)


class ScriptedRuns:
    """Stands in for processes: which look reaches the goal depends on the cell, and every run is noted."""

    def __init__(self) -> None:
        self.runs: list[tuple[Contender, RunSpec]] = []

    def __enter__(self) -> "ScriptedRuns":
        return self

    def __exit__(self, *_: object) -> None: ...

    def run(self, one: Contender, spec: RunSpec) -> dict[str, Any]:
        self.runs.append((one, spec))
        fast = spec.optim.get("decay") == "cosine" and spec.optim["base_lr"] == averaging.GRID[-1]["base_lr"]
        curve = [[512 * look, [0.0] * 4, 1.0 if look > (3 if fast else 6) else 2.0, 0.0] for look in range(10)]
        counted = dict.fromkeys(("steps", "messages", "message_bytes", "wire_bytes", "cpu_s", "largest_batch"), 1)
        facts = {"seconds": [0.0] * 4, "staleness": {}, "parameters": 1, "counts": [counted] * 10}
        return {"curve": curve, **counted, **facts}


def test_all_contenders_choose_from_one_grid_on_a_seed_that_is_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = ScriptedRuns()
    monkeypatch.setattr(contest, "Places", lambda: runs)
    args = argparse.Namespace(seeds=2, clips=5120, json=None, wire=False, at_once=1)
    assert averaging.run(args) == 0
    reported = [(one, spec) for one, spec in runs.runs if spec.seed in range(args.seeds)]
    tried = [(one, spec) for one, spec in runs.runs if spec.seed == contest.TUNING_SEED]
    assert len(reported) == 2 * len(averaging.WAYS)
    assert len(reported) + len(tried) == len(runs.runs)
    cell = {"name": "adamw", **averaging.GRID[-1]}
    assert all(spec.optim == cell for _, spec in reported)
    # One rank and ddp take the same steps, so one search serves both.
    assert len(tried) == (len(averaging.WAYS) - 1) * len(averaging.GRID)
    for number in range(0, len(tried), len(averaging.GRID)):
        cells = [spec.optim for _, spec in tried[number : number + len(averaging.GRID)]]
        assert cells == [{"name": "adamw", **one} for one in averaging.GRID]


@pytest.mark.parametrize("contenders", [averaging.contenders(5120), clients.contenders(5120)])
def test_contenders_differ_in_their_strategy_and_not_in_what_they_train_on(contenders: list[Contender]) -> None:
    same = {(one.spec.clips, one.spec.look_clips, one.spec.hidden, one.spec.clip_s) for one in contenders}
    assert len(same) == 1
    # What is tuned trains as what is reported, but for the time that it takes.
    for one in contenders:
        ours, short = one.spec, one.cheapest().spec
        assert replace(short, clip_s=ours.clip_s, straggler=ours.straggler, counted=ours.counted) == ours


def test_the_best_cell_reaches_the_goal_first_and_then_ends_best() -> None:
    tried = [
        {"base_lr": 1, "clips": None, "final": 0.1}, {"base_lr": 2, "clips": 512, "final": 0.4},
        {"base_lr": 3, "clips": 512, "final": 0.3}, {"base_lr": 4, "clips": 1024, "final": 0.2},
    ]  # fmt: skip
    assert best(tried, Goal(0.5)) == {"base_lr": 3}
    assert best(tried, Goal(0.5, accuracy=True)) == {"base_lr": 2}
    missed = [{"base_lr": 1, "clips": None, "final": None}, {"base_lr": 2, "clips": None, "final": 9.0}]
    assert best(missed, Goal(0.5)) == {"base_lr": 2}


def test_intervals_are_those_of_student() -> None:
    found = interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert found is not None
    assert found == pytest.approx((3.0, 3 - 2.776 * math.sqrt(2.5 / 5), 3 + 2.776 * math.sqrt(2.5 / 5)))
    assert interval([1.0, None]) is None
    assert ratio([1.0, 2.0], [3.0, 6.0]) == pytest.approx((3.0, 3.0, 3.0))
    assert ratio([1.0, None], [3.0, 6.0]) is None


def test_the_lineage_computed_from_keys_equals_that_of_a_loader(tmp_path: Path) -> None:
    clip = datasets.make_clip(tmp_path / "clip.mp4", frames=4, size="32x32")
    datasets.pack(tmp_path / "shards", [[(f"clip{n}", clip, 0) for n in range(7)]])
    data = SimpleNamespace(path=str(tmp_path / "shards"), split=None, global_batch_size=3)
    config = SimpleNamespace(data=data, run=SimpleNamespace(epochs=2, seed=5))
    loader = clip_loader(
        Dataset(data.path), frames=Segments(1), spatial=CenterCrop(32), global_batch_size=3, num_threads=1, seed=5,
        rank=0, world_size=1,
    )  # fmt: skip
    seen = Lineage()
    for epoch in range(2):
        loader.set_epoch(epoch)
        for batch in loader:
            seen.add(epoch, *Lineage.of(batch))
    loader.close()
    assert lineage_of(config) == seen.state_dict()
    config.run.seed = 6
    assert [entry["samples"] for entry in lineage_of(config)] == [6, 6]
    assert lineage_of(config) != seen.state_dict()
