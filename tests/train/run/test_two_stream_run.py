"""Runs of two streams: from raw videos through the trainer to fused scores."""

import json
from dataclasses import replace

import pytest
import torch

from bench.train import two_stream as bench
from fastvid.errors import UsageError
from fastvid.sharding.encode.profiles import get_profile
from fastvid.sharding.job.job import run_job
from fastvid.train.run import launch, scoring
from fastvid.train.tasks.classification import Classification

pytest.importorskip("cv2", reason="optical flow needs OpenCV")

SMALL = {"train": 8, "test": 4}


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two-stream")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench, "VIDEOS", SMALL)
        made = bench.make_toys(folder / "videos", seed=0)
    profile = get_profile("compact").changed(short_side=bench.SIDE)
    run_job(str(made.parent), folder / "shards", annotations=f"csv:{made}", profile=profile, streams="rgb,flow")
    return folder / "shards"


def made(shards, out, model, **options):
    one = bench.config(out, shards, model, epochs=1, crop=32, **options)
    return replace(one, data=replace(one.data, global_batch_size=4), optim=replace(one.optim, base_lr=0.01))


def test_streams_are_trained_separately_fused_by_scores_and_fine_tuned(shards, tmp_path, capfd):
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
    viewed = scoring.score(both, protocol="2x3")
    assert (viewed.num_views, viewed.score.scored) == (6, SMALL["test"])
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
def test_a_model_with_different_inputs_is_refused(shards, tmp_path, model, changes, message):
    one = made(shards, tmp_path, model)
    with pytest.raises(UsageError, match=message):
        launch.train(replace(one, data=replace(one.data, **changes)))


def test_mixing_with_several_streams_is_refused(shards, tmp_path):
    one = made(shards, tmp_path, "two-stream-r18")
    with pytest.raises(UsageError, match="mixup and CutMix do not support models with several streams"):
        replace(one, data=replace(one.data, group_size=4), task=Classification(mixup=0.2))


@pytest.mark.soak
def test_a_class_visible_in_neither_stream_alone_is_learned_from_both(tmp_path):
    torch.set_num_threads(1)
    top1 = bench.run_toy(tmp_path, seed=0, epochs=30)
    assert top1.keys() == {*bench.ALONE, *bench.LEARNED} - {"motion temporal-r18"}
    assert bench.misses(top1) == []


@pytest.mark.soak
def test_flow_alone_predicts_the_direction(tmp_path):
    torch.set_num_threads(1)
    top1 = bench.run_motion(tmp_path, seed=0, epochs=6)
    assert top1.keys() == {"motion temporal-r18"}
    assert bench.misses(top1) == []
