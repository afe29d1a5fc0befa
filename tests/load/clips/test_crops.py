"""Crops: inside the video at even pixels, with the size asked for, that of the video or of a bucket."""

import math
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastvid.errors import UsageError
from fastvid.load.clips.crops import (
    CenterCrop,
    HorizontalFlip,
    MultiScaleCrop,
    Native,
    RandomCrop,
    RandomResizedCrop,
    Resize,
    Spatial,
)
from fastvid.load.order.draws import Draws
from tests.load.fakes import FakeDataset
from tests.load.tools import make, views_of

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


BUCKET_CROPS = (CenterCrop(), RandomCrop(None), RandomResizedCrop(None), MultiScaleCrop(None))
BUCKETED = st.builds(
    lambda crop, high, wide: crop.of_size((high, wide)),
    st.sampled_from(BUCKET_CROPS), st.integers(8, 512), st.integers(8, 512),
)  # fmt: skip


@given(CROPS | BUCKETED, SIDES, SIDES, DRAWS)
def test_every_crop_is_even_and_inside(crop, height, width, draws):
    (view,) = views_of(Spatial(crop), height, width, draws)
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
    counts = Counter((box.y, box.x) for box in corners)
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
        places = [(0, 0), (4, 0), (0, 4), (4, 4), (2, 2), (0, 2), (4, 2), (2, 4), (2, 0)]
        places += [(1, 1), (3, 1), (1, 3), (3, 3)]
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
    views = [views_of(spatial, 64, 64, Draws(0, 0, p))[0] for p in range(5000)]
    correlation = np.corrcoef([view.box.x for view in views], [view.flip for view in views])[0, 1]
    assert abs(correlation) < 4 / math.sqrt(5000)


def test_equal_sizes_have_equal_fingerprints():
    assert repr(CenterCrop(224)) == repr(CenterCrop((224, 224)))
    assert MultiScaleCrop(224, scales=[1, 0.875]) == MultiScaleCrop(224, scales=(1.0, 0.875))


def test_order_in_the_list_does_not_matter_and_one_crop_needs_no_list():
    crop, flip = CenterCrop(8), HorizontalFlip()
    assert Spatial.of([flip, crop]) == Spatial.of((crop, flip)) == Spatial(crop, flip)
    assert Spatial.of(crop) == Spatial(crop)
    for wrong in ([], [flip], [crop, RandomCrop(8)], [crop, flip, flip], [224]):
        with pytest.raises(UsageError, match="spatial"):
            Spatial.of(wrong)


@pytest.mark.parametrize(
    "make",
    [
        *(lambda: CenterCrop(0), lambda: RandomCrop((8, 0)), lambda: CenterCrop((1, 2, 3)), lambda: HorizontalFlip(2)),
        *(lambda: CenterCrop(8, short_side=0), lambda: RandomCrop(8, short_side=-1)),
        *(lambda: RandomResizedCrop(8, scale=(0, 1)), lambda: RandomResizedCrop(8, scale=(0.5, 1.5))),
        *(lambda: RandomResizedCrop(8, ratio=(2, 1)), lambda: MultiScaleCrop(8, scales=())),
        *(lambda: MultiScaleCrop(8, scales=(1.5,)), lambda: MultiScaleCrop(8, max_distort=-1)),
        *(lambda: Resize(), lambda: Resize(short_side=8, size=8), lambda: Resize(short_side=0)),
        *(lambda: Resize(size=(8, 0)), lambda: Native(0), lambda: Native(2, 0), lambda: Native(2, max_pixels=0)),
        *(lambda: Native(2, min_pixels=9, max_pixels=8), lambda: Native(2.5), lambda: Native(math.inf)),
        *(lambda: MultiScaleCrop(8, scales=0.5), lambda: MultiScaleCrop(8, scales=("a",)), lambda: CenterCrop("32")),
        lambda: CenterCrop(np.ones((2, 2))),
    ],
)
def test_arguments_out_of_range_are_refused(make):
    with pytest.raises(UsageError, match="expected"):
        make()


def test_equal_arguments_have_the_same_text():
    """It is part of the fingerprint of a state."""
    assert repr(RandomResizedCrop(8, scale=[0.2, 1.0])) == repr(RandomResizedCrop((8, 8), scale=(0.2, 1.0)))
    assert repr(RandomResizedCrop(8, ratio=[1.0, 2.0])) == repr(RandomResizedCrop(8, ratio=(1.0, 2.0)))
    assert repr(CenterCrop(np.array([8, 4]))) == repr(CenterCrop((8, 4)))


def test_a_video_too_small_for_any_crop_is_refused():
    with pytest.raises(UsageError, match="40x1 pixels"):
        views_of(Spatial(CenterCrop(8)), 1, 40)


WIDE_SIDES = st.integers(2, 2200)
ANY = Draws(0, 0, 0)
WHOLE = (Resize(short_side=64), Resize(size=(90, 120)), Native(), Native(28, 4 * 28 * 28, 1280 * 28 * 28))


def smart_resize(height, width, factor, min_pixels, max_pixels):
    """Return Qwen2-VL's size for a picture, as transformers computes it."""
    h_bar = max(factor, round(height / factor) * factor)
    w_bar = max(factor, round(width / factor) * factor)
    if max_pixels is not None and h_bar * w_bar > max_pixels:
        beta = math.sqrt((height * width) / max_pixels)
        h_bar = max(factor, math.floor(height / beta / factor) * factor)
        w_bar = max(factor, math.floor(width / beta / factor) * factor)
    elif min_pixels is not None and h_bar * w_bar < min_pixels:
        beta = math.sqrt(min_pixels / (height * width))
        h_bar = math.ceil(height * beta / factor) * factor
        w_bar = math.ceil(width * beta / factor) * factor
    return h_bar, w_bar


@given(
    WIDE_SIDES,
    WIDE_SIDES,
    st.sampled_from([2, 14, 16, 28, 32]),
    st.none() | st.integers(1, 3000),
    st.sampled_from([None, 3000, 10**5]),
)
def test_native_sizes_are_those_of_qwens_processor(height, width, multiple, least, most):
    crop = Native(multiple, min_pixels=least, max_pixels=most)
    assert crop.output_of(height, width) == smart_resize(height & ~1, width & ~1, multiple, least, most)


@given(WIDE_SIDES, WIDE_SIDES)
def test_native_shows_the_video_as_it_is(height, width):
    (view,) = views_of(Spatial.of(Native()), height, width)
    assert (view.box.y, view.box.x) == (0, 0)
    assert view.size == (view.box.height, view.box.width) == (height // 2 * 2, width // 2 * 2)


@given(WIDE_SIDES, WIDE_SIDES, st.integers(2, 512))
def test_resize_keeps_the_aspect_ratio(height, width, short_side):
    high, wide = Resize(short_side=short_side).output_of(height, width)
    assert min(high, wide) <= short_side or abs(max(high, wide) - short_side) <= 1
    long, short = max(height, width), min(height, width)
    exact = Fraction(long * short_side, short)
    other = wide if height < width else high
    assert (high if height <= width else wide) == short_side
    assert abs(other - exact) <= 1
    assert height == width or other % 2 == 0


def test_resize_examples():
    assert Resize(short_side=256).output_of(1080, 1920) == (256, 456)  # 455.1
    assert Resize(short_side=256).output_of(1920, 1080) == (456, 256)
    assert Resize(short_side=255).output_of(100, 100) == (255, 255)
    assert Resize(size=128).output_of(1080, 1920) == Resize(size=128).output == (128, 128)
    assert Resize(short_side=256).draw(1081, 1921, ANY) == Native().draw(1081, 1921, ANY)


@given(
    st.lists(st.tuples(WIDE_SIDES, WIDE_SIDES), min_size=1, max_size=5), st.sampled_from([*WHOLE, CenterCrop((40, 30))])
)
def test_sizes_of_many_videos_are_those_of_each(videos, crop):
    spatial = Spatial.of(crop)
    heights, widths = np.array(videos).T
    high, wide = spatial.sizes(heights, widths)
    assert high.dtype == wide.dtype == np.int64
    assert list(zip(high.tolist(), wide.tolist(), strict=True)) == [spatial.output_of(*sides) for sides in videos]
    for sides in videos:
        assert views_of(spatial, *sides)[0].size == spatial.output_of(*sides)


def test_a_crop_for_buckets_counts_with_the_even_part_of_the_video():
    for crop in BUCKET_CROPS:
        high, wide = Spatial.of(crop).sizes(np.array([101, 64]), np.array([50, 33]))
        assert (high.tolist(), wide.tolist()) == ([100, 64], [50, 32])


@given(WIDE_SIDES, WIDE_SIDES, st.integers(8, 512), st.integers(8, 512))
@pytest.mark.parametrize("crop", [CenterCrop(), RandomCrop(None), *WHOLE[::2]])
def test_the_region_of_a_bucket_is_the_largest_with_its_aspect_ratio(crop, height, width, high, wide):
    spatial = Spatial.of([crop, HorizontalFlip(0)]).of_size((high, wide))
    (view,) = views_of(spatial, height, width)
    box = view.box
    assert view.size == spatial.crop.output == (high, wide)
    assert box.y + box.height <= height
    assert box.x + box.width <= width
    scale = min(Fraction(height, high), Fraction(width, wide))
    # Rounded down to even numbers, at least 2.
    for side, out in ((box.height, high), (box.width, wide)):
        assert side == 2 or out * scale - 2 < side <= out * scale + Fraction(1, 10**5)


@pytest.mark.parametrize("kind", [RandomResizedCrop, MultiScaleCrop])
@pytest.mark.parametrize("size", [(100, 200), (200, 100), (150, 150)])
def test_random_regions_of_a_bucket_have_about_its_aspect_ratio(kind, size):
    crop = kind(None).of_size(size)
    boxes = [crop.draw(600, 800, Draws(0, 0, p)) for p in range(300)]
    ratios = np.array([box.width / box.height for box in boxes]) / (size[1] / size[0])
    assert 0.7 < ratios.min() < 0.95
    assert 1.05 < ratios.max() < 1.4
    assert abs(np.log(ratios).mean()) < 0.04
    scale = min(600 / size[0], 800 / size[1])
    areas = np.array([box.width * box.height for box in boxes]) / (size[0] * size[1] * scale**2)
    assert areas.max() <= 1.02
    assert areas.min() < 0.5


def test_a_square_bucket_crops_like_a_fixed_size():
    for open_size, fixed, width in (
        (MultiScaleCrop(None), MultiScaleCrop(96), 340),
        (RandomResizedCrop(None, (0.5, 0.5)), RandomResizedCrop(96, (0.5, 0.5)), 256),
    ):
        for draws in (Draws(0, 0, position) for position in range(50)):
            assert open_size.of_size((96, 96)).draw(256, width, draws) == fixed.draw(256, width, draws)


def test_a_crop_of_one_size_accepts_only_that_bucket():
    spatial = Spatial.of(CenterCrop(64))
    assert spatial.of_size((64, 64)) is spatial
    with pytest.raises(UsageError, match=r"cannot make clips of 64x96 pixels for a bucket") as caught:
        spatial.of_size((64, 96))
    assert "size=None" in caught.value.hint


@pytest.mark.parametrize("crop", BUCKET_CROPS)
def test_a_crop_without_a_size_needs_buckets(crop):
    with pytest.raises(UsageError, match=r"size=None.* has no size, which only a bucket can give it") as caught:
        make(FakeDataset(40), spatial=crop)
    assert "batches=Buckets" in caught.value.hint


def test_a_bucket_crop_differs_from_a_fixed_one():
    assert CenterCrop().of_size((64, 64)) != CenterCrop(64)
    assert CenterCrop().of_size((64, 64)).draw(200, 300, ANY).height == 200
    assert CenterCrop(64).draw(200, 300, ANY).height == 64
    with pytest.raises(UsageError, match="but size is None"):
        CenterCrop(short_side=256)


class Own:
    """A crop of a user without a fixed size, and without the methods that this needs."""

    output = None

    def draw(self, height, width, draws):
        raise AssertionError


def test_a_crop_of_a_user_without_its_methods_is_named():
    for ask in (
        lambda own: own.output_of(8, 8),
        lambda own: own.sizes(*np.ones((2, 1), int)),
        lambda own: own.of_size((8, 8)),
    ):
        with pytest.raises(UsageError, match=r"no fixed size and no \w+\(\)"):
            ask(Spatial.of(Own()))
