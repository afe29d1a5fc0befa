"""Evaluation protocols: which clips and crops, and what is made of their probabilities."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fastvid.errors import StateError, UsageError
from fastvid.load.clips.augment import CenterCrop, RandomCrop
from fastvid.load.clips.sampling import Dense, Segments, Uniform
from fastvid.load.order.random_draws import Draws
from fastvid.train.run.eval_protocols import views
from fastvid.train.run.scoring import Tally

NONE = Draws(0, 0, 0)
SEGMENTS, DENSE = Segments(4, jitter=False), Dense(4, stride=8, jitter=False)
CENTER = (CenterCrop(224),)


def frames(protocol: str, sampler: object, num_frames: int) -> list[list[int]]:
    return [view.frames.draw(num_frames, NONE).tolist() for view in views(protocol, sampler, CENTER)]  # type: ignore[arg-type]


def test_one_view_is_the_recipes_own() -> None:
    (view,) = views("1x1", SEGMENTS, CENTER)
    assert view.frames is SEGMENTS
    assert view.spatial == CENTER


def test_twice_sample_is_the_middle_and_the_start_of_each_segment() -> None:
    # TSM: tick = 10 / 4 = 2.5; int(1.25 + 2.5 i) and int(2.5 i).
    assert frames("twice", SEGMENTS, 10) == [[1, 3, 6, 8], [0, 2, 5, 7]]


def test_clips_of_segments_are_spread_inside_each_segment() -> None:
    # 40 frames, ticks of 10, five clips at a tenth, three tenths, ...
    assert frames("5", SEGMENTS, 40) == [[place, 10 + place, 20 + place, 30 + place] for place in (1, 3, 5, 7, 9)]


def test_dense_clips_start_from_the_first_place_to_the_last() -> None:
    # A span of 25 frames leaves places 0 to 75.
    found = frames("10", DENSE, 100)
    assert [clip[0] for clip in found] == np.linspace(0, 75, 10, dtype=int).tolist()
    assert found[0] == [0, 8, 16, 24]
    assert found[-1] == [75, 83, 91, 99]
    # A video shorter than the span goes on at its beginning.
    assert frames("2", DENSE, 10) == [[0, 8, 6, 4]] * 2


@pytest.mark.parametrize(("height", "width"), [(256, 340), (340, 256)])
def test_three_crops_go_along_the_longer_side(height: int, width: int) -> None:
    found = views("1x3", SEGMENTS, (CenterCrop(224, short_side=256),), size=256)
    boxes = [next(iter(view.spatial)).draw(height, width, NONE) for view in found]  # type: ignore[union-attr, call-arg]
    assert [(box.height, box.width) for box in boxes] == [(256, 256)] * 3
    along = [box.x if width > height else box.y for box in boxes]
    assert along == [0, 42, 84]
    assert {box.y if width > height else box.x for box in boxes} == {0}


def test_ten_crops_are_centre_and_corners_and_their_mirror_images() -> None:
    found = views("1x10", SEGMENTS, CENTER)
    corners = {(box.y, box.x) for box in (view.spatial[0].draw(256, 340, NONE) for view in found)}  # type: ignore[union-attr, call-arg]
    assert corners == {(16, 58), (0, 0), (0, 116), (32, 0), (32, 116)}
    assert sum(len(view.spatial) == 2 for view in found) == 5


def test_the_number_of_views_is_in_the_name() -> None:
    assert len(views("10x3", DENSE, CENTER)) == 30
    assert len(views("twicex3", SEGMENTS, CENTER)) == 6


@pytest.mark.parametrize("protocol", ["", "x3", "0x3", "10x4", "10x3x2", "thrice"])
def test_a_wrong_name_is_refused(protocol: str) -> None:
    with pytest.raises(UsageError):
        views(protocol, DENSE, CENTER)


def test_what_cannot_be_moved_is_refused() -> None:
    with pytest.raises(UsageError, match="no 10 clips"):
        views("10", Uniform(4), CENTER)
    with pytest.raises(UsageError, match="RandomCrop"):
        views("1x3", SEGMENTS, (RandomCrop(224),))


def tally(*passes: tuple[list[list[float]], list[bool]]) -> Tally:
    made = Tally(3, 2)
    for logits, valid in passes:
        made.add(torch.tensor(logits), torch.arange(3), torch.tensor(valid))
    return made


def test_probabilities_are_averaged_and_counted_by_class() -> None:
    # Sample 0: 0.9 and 0.2 of class 0, so 0.55. Sample 1: 0.4 and 0.5 of class 0. Sample 2 decodes only once.
    odds = {share: math.log(share / (1 - share)) for share in (0.9, 0.2, 0.4, 0.5)}
    made = tally(
        ([[odds[0.9], 0.0], [odds[0.4], 0.0], [5.0, 0.0]], [True, True, True]),
        ([[odds[0.2], 0.0], [odds[0.5], 0.0], [5.0, 0.0]], [True, True, False]),
    )
    report = made.report(torch.tensor([0, 0, 1]), 2, "2x1", ["a", "b"])
    assert (report.score.scored, report.score.total) == (2, 3)
    assert report.score.top1_percent == 50.0
    assert report.score.loss == pytest.approx(-(math.log(0.55) + math.log(0.45)) / 2, abs=1e-6)
    assert report.confusion.tolist() == [[1, 1], [0, 0]]
    first, second = report.per_class()
    assert first == {"class": "a", "videos": 2, "top1_percent": 50.0, "taken_for": "b", "taken_for_videos": 1}
    assert second["top1_percent"] is None


def test_ties_and_infinite_logits_are_no_hits() -> None:
    made = tally(([[0.0, 0.0], [float("nan"), 0.0], [1.0, 0.0]], [True, True, True]))
    assert made.report(torch.tensor([0, 1, 0]), 1, "1x1", ["a", "b"]).score.top1_percent == pytest.approx(100 / 3)


def test_a_video_seen_too_often_is_an_error() -> None:
    logits = ([[0.0, 1.0]] * 3, [True] * 3)
    with pytest.raises(StateError, match="2 times, the protocol has 1 views"):
        tally(logits, logits).report(torch.zeros(3, dtype=torch.int64), 1, "1x1", ["a", "b"])
