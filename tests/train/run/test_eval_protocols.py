"""Evaluation protocols: which clips and crops, and what is made of their probabilities."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fastvid.errors import StateError, UsageError
from fastvid.load.batch.batch import Batch
from fastvid.load.clips.crops import CenterCrop, HorizontalFlip, RandomCrop
from fastvid.load.clips.sampling import Dense, Segments, Uniform
from fastvid.sharding.encode.profiles import PROFILES
from fastvid.train.config.config import DataConfig, ShardConfig
from fastvid.train.parts.evaluate import Gathered
from fastvid.train.run.scoring import _profile, add_batch, report, views, with_views
from fastvid.train.tasks.classification import Classification
from tests.train import toy

SEGMENTS, DENSE = Segments(4, jitter=False), Dense(4, stride=8, jitter=False)
CENTER = (CenterCrop(224),)


def data(sampler=SEGMENTS, spatial=CENTER):
    return DataConfig(path="-", frames=sampler, eval_frames=sampler, spatial=spatial, eval_spatial=spatial)


def test_one_view_equals_the_recipes_evaluation():
    random = (RandomCrop(64), HorizontalFlip())
    recipe = data(Segments(4), random)
    assert with_views(recipe, views("1x1")) == recipe
    cropped = data(spatial=(CenterCrop(48, short_side=56), HorizontalFlip()))
    assert with_views(cropped, views("1x3")).eval_spatial == (CenterCrop(48, short_side=56),)
    assert with_views(cropped, views("1x3"), 64).eval_spatial == (CenterCrop(64, short_side=56),)
    assert [views(name).num_views for name in ("1", "1x1", "10x3", "twicex3")] == [1, 1, 30, 6]


def test_unknown_protocols_and_samplers_and_crops_without_views_are_refused():
    for protocol in ("", "x3", "0x3", "10x4", "10x3x2", "thrice"):
        with pytest.raises(UsageError):
            views(protocol)
    for protocol, recipe, message in (
        ("10", data(Uniform(4)), "one clip of a video, not 10"),
        ("twice", data(DENSE), "no segments"),
        ("1x3", data(spatial=(RandomCrop(224),)), "RandomCrop"),
        ("1", data(spatial=()), "must contain one crop"),
    ):
        with toy.refused(message):
            with_views(recipe, views(protocol))


TASK = Classification()


def tally(labels, *passes):
    made = Gathered(3)
    for logits, valid in passes:
        probabilities = TASK.predict(torch.tensor(logits))
        made.add(probabilities, torch.tensor(valid), torch.arange(3), torch.tensor(labels))
    return made


def test_probabilities_are_averaged_and_the_confusion_counts_classes():
    # Sample 0: 0.9 and 0.2 of class 0, so 0.55. Sample 1: 0.4 and 0.5 of class 0. Sample 2 decodes only once.
    odds = {share: math.log(share / (1 - share)) for share in (0.9, 0.2, 0.4, 0.5)}
    made = tally(
        [0, 0, 1],
        ([[odds[0.9], 0.0], [odds[0.4], 0.0], [5.0, 0.0]], [True, True, True]),
        ([[odds[0.2], 0.0], [odds[0.5], 0.0], [5.0, 0.0]], [True, True, False]),
    )
    scored = report(TASK, made, 2, "2x1", ["a", "b"])
    assert (scored.score.scored, scored.score.total) == (2, 3)
    assert scored.score.numbers["top1_percent"] == scored.score.value == 50.0
    assert scored.score.loss == pytest.approx(-(math.log(0.55) + math.log(0.45)) / 2, abs=1e-6)
    assert scored.confusion is not None
    assert scored.confusion.tolist() == [[1, 1], [0, 0]]
    first, second = scored.rows
    assert first == {"class": "a", "videos": 2, "top1_percent": 50.0, "taken_for": "b", "taken_for_videos": 1}
    assert second["top1_percent"] is None

    # Ties and infinite logits are never hits, and a video that was seen too often is an error.
    logits = ([[0.0, 0.0], [float("nan"), 0.0], [1.0, 0.0]], [True, True, True])
    scored = report(TASK, tally([0, 1, 0], logits), 1, "1x1", ["a", "b"])
    assert scored.score.numbers["top1_percent"] == pytest.approx(100 / 3)
    with toy.refused("2 times, the protocol has 1 views", kind=StateError):
        tally([0, 1, 0], logits, logits).means(1)


class Summing(nn.Module):
    """Logits from the levels of both streams; remembers how many clips it got at once."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, video, flow):
        self.seen.append(len(video))
        both = video.flatten(1).sum(1) + flow.flatten(1).sum(1)
        return torch.stack([both, -both], 1)


def test_views_of_all_streams_are_averaged_in_chunks():
    numbers = torch.Generator().manual_seed(0)
    video, flow = (torch.randn(3, 5, width, 1, 2, 2, generator=numbers) for width in (3, 4))
    valid = torch.tensor([True, False, True])
    batch = Batch(
        video=video, flow=flow, label=torch.tensor([0, 0, 1]), weight=torch.ones(3), valid=valid, key=("a", "b", "c"),
        sample=torch.arange(3), frame_index=torch.zeros(3, 5, 1, dtype=torch.int64),
    )  # fmt: skip
    config = replace(toy.toy_config(toy.ROOT), data=replace(data(), eval_batch_size=4))
    model, made = Summing(), Gathered(3)
    add_batch(model, batch, made, toy.ALONE, config)
    assert model.seen == [4, 4, 4, 3]
    predictions, targets, scored = made.means(5)
    assert scored.tolist() == [True, False, True]
    assert targets[:, 0].tolist() == [0, 1]
    for row, found in zip((0, 2), predictions, strict=True):
        probabilities = Summing()(video[row], flow[row]).double().softmax(1)
        assert torch.allclose(found, probabilities.mean(0))


def test_videos_to_predict_are_encoded_like_the_dataset_of_the_recipe():
    options = {"short-side": "96", "fps": "10", "hdr": "keep", "audio": "copy"}
    shard = ShardConfig(sources=("videos",), profile="intra", options=options)
    assert _profile(SimpleNamespace(shard=shard)) == PROFILES["intra"].changed(short_side=96, fps="10", hdr="keep")
