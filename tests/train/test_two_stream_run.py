"""Runs of two streams: from raw videos through the trainer to fused scores."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench import two_stream as bench
from fastvid.errors import UsageError
from fastvid.shard.job import run_job
from fastvid.shard.profiles import get_profile
from fastvid.train import launch, scoring

pytest.importorskip("cv2", reason="optical flow needs OpenCV")

SMALL = {"train": 8, "test": 4}


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two-stream")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench, "VIDEOS", SMALL)
        made = bench.make_toys(folder / "videos", seed=0)
    profile = get_profile("compact").changed(short_side=bench.SIDE)
    run_job(str(made.parent), folder / "shards", annotations=f"csv:{made}", profile=profile, streams="rgb,flow")
    return folder / "shards"


def made(shards: Path, out: Path, model: str, **options: object):
    one = bench.config(out, shards, model, epochs=1, crop=32, **options)
    return replace(one, data=replace(one.data, global_batch_size=4), optim=replace(one.optim, base_lr=0.01))


def test_nets_are_trained_apart_fused_by_their_scores_and_trained_on(shards: Path, tmp_path: Path, capfd) -> None:
    files = []
    for net in ("tsn-r18", "temporal-r18"):
        one = made(shards, tmp_path / net, net)
        assert launch.train(one) == 0
        files.append(bench.weights(one))
    both = made(shards, tmp_path / "both", "two-stream-r18")
    with pytest.raises(UsageError, match=r"no checkpoint[\s\S]*model\.weights=FILE"):
        scoring.score(both)
    both = replace(both, model=replace(both.model, weights=",".join(files)))
    fused = scoring.score(both).score
    assert fused.scored == fused.total == SMALL["test"]
    assert launch.train(both) == 0
    summary = json.loads((tmp_path / "both" / "summary.json").read_text())
    assert summary["samples"] == SMALL["train"]
    trained = scoring.score(both).score
    assert trained.loss == pytest.approx(summary["eval"]["loss"])
    assert trained.loss != fused.loss
    capfd.readouterr()


@pytest.mark.parametrize(
    ("model", "changes", "message"),
    [
        ("two-stream-r18", {"streams": ("rgb",)}, r"data\.streams is 'rgb'[\s\S]*takes 'rgb,flow'"),
        ("tsn-r18", {"streams": ("rgb", "flow")}, r"takes 'rgb'[\s\S]*data\.streams=rgb"),
        ("temporal-r18", {"flow_stack": 10}, r"data\.flow_stack is 10, the model was built for 4"),
    ],
)
def test_a_model_that_takes_something_else_is_refused(shards: Path, tmp_path: Path, model, changes, message) -> None:
    one = made(shards, tmp_path, model)
    with pytest.raises(UsageError, match=message):
        launch.train(replace(one, data=replace(one.data, **changes)))


def test_mixing_of_pictures_alone_is_refused(shards: Path, tmp_path: Path) -> None:
    one = made(shards, tmp_path, "two-stream-r18")
    mixing = replace(one, data=replace(one.data, group_size=4), optim=replace(one.optim, mixup=0.2))
    with pytest.raises(UsageError, match="mixup and CutMix mix pictures only"):
        launch.train(mixing)


@pytest.mark.soak
def test_what_neither_stream_shows_is_learned_from_both(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    top1 = bench.run_toy(tmp_path, seed=0, epochs=30)
    held_out = bench.VIDEOS["test"]
    # Four standard deviations of a coin.
    chance = 50 + 4 * 100 * 0.5 / held_out**0.5
    assert max(top1[f"{label} {net}"] for label in ("xor", "both") for net in ("tsn-r18", "temporal-r18")) <= chance
    assert top1["xor two-stream-r18"] >= 95
    assert top1["both two-stream-r18, late fusion of the two"] >= 95


@pytest.mark.soak
def test_flow_alone_tells_the_direction(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    assert bench.run_motion(tmp_path, seed=0, epochs=6)["motion temporal-r18"] >= 95
