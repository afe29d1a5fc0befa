"""Crops are inside the video at even pixels, have the specified shapes, and follow their sources."""

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastvid.errors import UsageError
from fastvid.load.clips.crops import (
    CenterCrop,
    HorizontalFlip,
    MultiScaleCrop,
    RandomCrop,
    RandomResizedCrop,
    Spatial,
)
from fastvid.load.order.draws import Draws

DRAWS = st.builds(Draws, st.integers(0, 9), st.integers(0, 9), st.integers(0, 10**6))
SIDES = st.integers(2, 700)
SIZES = st.integers(1, 300) | st.tuples(st.integers(1, 300), st.integers(1, 300))
SHORT = st.none() | st.integers(1, 400)
CROPS = (
    st.builds(CenterCrop, SIZES, SHORT)
    | st.builds(RandomCrop, SIZES, SHORT)
    | st.builds(RandomResizedCrop, SIZES)
    | st.builds(RandomResizedCrop, SIZES, st.just((0.01, 0.02)), st.just((0.1, 9.0)))
    | st.builds(MultiScaleCrop, SIZES)
    | st.builds(MultiScaleCrop, SIZES, st.just((1.0, 0.01)), st.integers(0, 2), st.booleans())
)


@given(CROPS, SIDES, SIDES, DRAWS)
def test_every_crop_is_even_and_inside(crop, height, width, draws):
    view = Spatial(crop).draw(height, width, draws)
    box = view.box  # Box refuses odd or negative numbers
    assert box.y + box.height <= height
    assert box.x + box.width <= width
    assert view.size == crop.output
    assert not view.flip


@given(st.sampled_from([CenterCrop, RandomCrop]), st.integers(1, 150), st.integers(1, 150), SIDES, SIDES, DRAWS)
def test_a_crop_that_fits_is_not_resized(kind, half_height, half_width, height, width, draws):
    size = (2 * half_height, 2 * half_width)
    box = kind(size).draw(height, width, draws)
    if size[0] <= height and size[1] <= width:
        assert (box.height, box.width) == size
    else:
        # The largest region of this aspect ratio: one side is the video's, rounded to even, and the ratio is kept.
        assert box.height >= height - 2 or box.width >= width - 2
        scale = min(height / size[0], width / size[1])
        assert abs(box.height - size[0] * scale) <= 2
        assert abs(box.width - size[1] * scale) <= 2


@given(SIDES, SIDES, DRAWS)
def test_center_crop_is_central(height, width, draws):
    box = CenterCrop(112).draw(height, width, draws)
    assert abs((height - box.y - box.height) - box.y) <= 3
    assert abs((width - box.x - box.width) - box.x) <= 3


def test_short_side_crops_as_if_resized_first():
    # 224 of 256 rows are 7/8 of the picture, whatever its size.
    box = CenterCrop(224, short_side=256).draw(720, 1280, Draws(0, 0, 0))
    assert (box.y, box.x, box.height, box.width) == (44, 324, 630, 630)
    same = CenterCrop(224, short_side=256).draw(256, 454, Draws(0, 0, 0))
    assert (same.height, same.width) == (224, 224)


def test_random_crops_reach_every_even_corner_equally():
    corners = [RandomCrop(8).draw(14, 12, Draws(3, 0, p)) for p in range(2400)]
    counts = {}
    for box in corners:
        counts[box.y, box.x] = counts.get((box.y, box.x), 0) + 1
    assert set(counts) == {(y, x) for y in (0, 2, 4, 6) for x in (0, 2, 4)}
    # 11 degrees of freedom: mean 11, deviation 4.7.
    assert sum((count - 200) ** 2 / 200 for count in counts.values()) < 11 + 4 * 4.7


def test_resized_crops_have_area_and_ratio_within_bounds():
    boxes = [RandomResizedCrop(64, scale=(0.2, 0.6)).draw(256, 340, Draws(1, 0, p)) for p in range(3000)]
    area = np.array([box.height * box.width for box in boxes]) / (256 * 340)
    ratio = np.array([box.width / box.height for box in boxes])
    # A side is at most one pixel from the drawn one, 1.3 % of the shortest side here.
    assert 0.2 * 0.97 < area.min() < 0.21
    assert 0.59 < area.max() < 0.6 * 1.03
    assert 3 / 4 * 0.97 < ratio.min() < 0.77
    assert 1.31 < ratio.max() < 4 / 3 * 1.03
    # Area is uniform; the logarithm of the ratio is uniform around 0, with standard error 0.003.
    assert abs(area.mean() - 0.4) < 0.01
    assert abs(np.log(ratio).mean()) < 0.015


def test_central_region_is_used_when_no_random_one_fits():
    box = RandomResizedCrop(64, scale=(1.0, 1.0)).draw(100, 1000, Draws(0, 0, 0))
    assert (box.height, box.width) == (100, 134)  # the whole height, and 4/3 of it
    assert (box.y, box.x) == (0, 432)
    tall = RandomResizedCrop(64, scale=(1.0, 1.0)).draw(1000, 100, Draws(0, 0, 0))
    assert (tall.height, tall.width) == (134, 100)


def tsn_crops(image_w, image_h, size):
    """Return all crops of TSN's multi-scale cropping as (width, height, x, y), each as often as it is drawn."""
    scales, max_distort = [1, 0.875, 0.75, 0.66], 1
    base_size = min(image_w, image_h)
    crop_sizes = [int(base_size * x) for x in scales]
    crop_h = [size if abs(x - size) < 3 else x for x in crop_sizes]
    crop_w = [size if abs(x - size) < 3 else x for x in crop_sizes]
    pairs = [(w, h) for i, h in enumerate(crop_h) for j, w in enumerate(crop_w) if abs(i - j) <= max_distort]
    crops = []
    for w, h in pairs:
        w_step, h_step = (image_w - w) // 4, (image_h - h) // 4
        places = [
            (0, 0),
            (4, 0),
            (0, 4),
            (4, 4),
            (2, 2),
            (0, 2),
            (4, 2),
            (2, 4),
            (2, 0),
            (1, 1),
            (3, 1),
            (1, 3),
            (3, 3),
        ]
        crops += [(w, h, across * w_step, down * h_step) for across, down in places]
    return crops


@pytest.mark.parametrize(("width", "height"), [(340, 256), (256, 256), (320, 240), (171, 256)])
def test_multi_scale_crops_match_tsn(width, height):
    even = {tuple(value & ~1 for value in crop) for crop in tsn_crops(width, height, 224)}
    drawn = [MultiScaleCrop(224).draw(height, width, Draws(0, 1, p)) for p in range(4000)]
    assert {(box.width, box.height, box.x, box.y) for box in drawn} == even


def test_multi_scale_crops_are_equally_likely():
    expected = tsn_crops(340, 256, 224)
    assert len(expected) == 10 * 13
    # Places coincide if there is no free height or width.
    times = Counter(tuple(value & ~1 for value in crop) for crop in expected)
    boxes = [MultiScaleCrop(224).draw(256, 340, Draws(2, 0, p)) for p in range(13_000)]
    counts = Counter((box.width, box.height, box.x, box.y) for box in boxes)
    assert set(counts) == set(times)
    freedom = len(times) - 1
    chi2 = sum((counts[crop] - 100 * n) ** 2 / (100 * n) for crop, n in times.items())
    assert chi2 < freedom + 4 * math.sqrt(2 * freedom)


def test_flips_have_the_given_probability():
    flips = [HorizontalFlip(0.3).draw(Draws(0, 0, p)) for p in range(5000)]
    assert abs(np.mean(flips) - 0.3) < 4 * math.sqrt(0.21 / 5000)
    assert not any(HorizontalFlip(0.0).draw(Draws(0, 0, p)) for p in range(500))
    assert all(HorizontalFlip(1.0).draw(Draws(0, 0, p)) for p in range(500))


def test_flip_and_crop_are_independent():
    spatial = Spatial.of([RandomCrop(8), HorizontalFlip(0.5)])
    views = [spatial.draw(64, 64, Draws(0, 0, p)) for p in range(5000)]
    correlation = np.corrcoef([view.box.x for view in views], [view.flip for view in views])[0, 1]
    assert abs(correlation) < 4 / math.sqrt(5000)


def test_equal_sizes_have_equal_fingerprints():
    assert repr(CenterCrop(224)) == repr(CenterCrop((224, 224)))
    assert MultiScaleCrop(224, scales=[1, 0.875]) == MultiScaleCrop(224, scales=(1.0, 0.875))


@pytest.mark.parametrize(
    "transforms",
    [
        [],
        [HorizontalFlip()],
        [CenterCrop(8), RandomCrop(8)],
        [CenterCrop(8), HorizontalFlip(), HorizontalFlip()],
        [224],
    ],
)
def test_invalid_transform_lists_are_refused(transforms):
    with pytest.raises(UsageError, match="spatial"):
        Spatial.of(transforms)


def test_order_in_the_list_does_not_matter_and_one_crop_needs_no_list():
    crop, flip = CenterCrop(8), HorizontalFlip()
    assert Spatial.of([flip, crop]) == Spatial.of((crop, flip)) == Spatial(crop, flip)
    assert Spatial.of(crop) == Spatial(crop)


@pytest.mark.parametrize(
    "make",
    [
        *(
            lambda: CenterCrop(0),
            lambda: RandomCrop((8, 0)),
            lambda: CenterCrop((1, 2, 3)),
            lambda: HorizontalFlip(1.1),
        ),
        *(lambda: CenterCrop(8, short_side=0), lambda: RandomCrop(8, short_side=-1)),
        *(lambda: RandomResizedCrop(8, scale=(0, 1)), lambda: RandomResizedCrop(8, scale=(0.5, 1.5))),
        *(lambda: RandomResizedCrop(8, ratio=(2, 1)), lambda: MultiScaleCrop(8, scales=())),
        *(lambda: MultiScaleCrop(8, scales=(1.5,)), lambda: MultiScaleCrop(8, max_distort=-1)),
    ],
)
def test_arguments_out_of_range_are_refused(make):
    with pytest.raises(UsageError, match="expected"):
        make()


def test_a_video_too_small_for_any_crop_is_refused():
    with pytest.raises(UsageError, match="40x1 pixels"):
        Spatial(CenterCrop(8)).draw(1, 40, Draws(0, 0, 0))
