"""Sizes that follow the video or a bucket."""

import math
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
from tests.load.tools import make

SIDES = st.integers(2, 2200)
DRAWS = st.builds(Draws, st.integers(0, 9), st.integers(0, 9), st.integers(0, 10**6))
ANY = Draws(0, 0, 0)
BUCKET_CROPS = (CenterCrop(), RandomCrop(None), RandomResizedCrop(None), MultiScaleCrop(None))
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
    SIDES,
    SIDES,
    st.sampled_from([2, 14, 16, 28, 32]),
    st.none() | st.integers(1, 3000),
    st.sampled_from([None, 3000, 10**5]),
)
def test_native_sizes_are_those_of_qwens_processor(height, width, multiple, least, most):
    crop = Native(multiple, min_pixels=least, max_pixels=most)
    assert crop.output_of(height, width) == smart_resize(height & ~1, width & ~1, multiple, least, most)


@given(SIDES, SIDES)
def test_native_shows_the_video_as_it_is(height, width):
    view = Spatial.of(Native()).draw(height, width, ANY)
    assert (view.box.y, view.box.x) == (0, 0)
    assert view.size == (view.box.height, view.box.width) == (height // 2 * 2, width // 2 * 2)


@given(SIDES, SIDES, st.integers(2, 512))
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


@given(st.lists(st.tuples(SIDES, SIDES), min_size=1, max_size=5), st.sampled_from([*WHOLE, CenterCrop((40, 30))]))
def test_sizes_of_many_videos_are_those_of_each(videos, crop):
    spatial = Spatial.of(crop)
    heights, widths = np.array(videos).T
    high, wide = spatial.sizes(heights, widths)
    assert high.dtype == wide.dtype == np.int64
    assert list(zip(high.tolist(), wide.tolist(), strict=True)) == [spatial.output_of(*sides) for sides in videos]
    for sides in videos:
        assert spatial.draw(*sides, ANY).size == spatial.output_of(*sides)


def test_a_crop_for_buckets_counts_with_the_even_part_of_the_video():
    for crop in BUCKET_CROPS:
        high, wide = Spatial.of(crop).sizes(np.array([101, 64]), np.array([50, 33]))
        assert (high.tolist(), wide.tolist()) == ([100, 64], [50, 32])


@given(SIDES, SIDES, st.integers(8, 512), st.integers(8, 512))
@pytest.mark.parametrize("crop", [CenterCrop(), RandomCrop(None), *WHOLE[::2]])
def test_the_region_of_a_bucket_is_the_largest_with_its_aspect_ratio(crop, height, width, high, wide):
    spatial = Spatial.of([crop, HorizontalFlip(0)]).of_size((high, wide))
    view = spatial.draw(height, width, ANY)
    box = view.box
    assert view.size == spatial.output == (high, wide)
    assert box.y + box.height <= height
    assert box.x + box.width <= width
    scale = min(Fraction(height, high), Fraction(width, wide))
    # Rounded down to even numbers, at least 2.
    for side, out in ((box.height, high), (box.width, wide)):
        assert side == 2 or out * scale - 2 < side <= out * scale + Fraction(1, 10**5)


@given(SIDES, SIDES, st.integers(8, 512), st.integers(8, 512), DRAWS)
@pytest.mark.parametrize("crop", BUCKET_CROPS)
def test_regions_of_a_bucket_are_inside_the_video(crop, height, width, high, wide, draws):
    view = Spatial.of(crop).of_size((high, wide)).draw(height, width, draws)
    assert view.size == (high, wide)
    assert 0 <= view.box.y <= view.box.y + view.box.height <= height
    assert 0 <= view.box.x <= view.box.x + view.box.width <= width


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
    for kind in (RandomResizedCrop, MultiScaleCrop):
        for position in range(50):
            draws = Draws(0, 0, position)
            if kind is MultiScaleCrop:
                assert kind(None).of_size((96, 96)).draw(256, 340, draws) == kind(96).draw(256, 340, draws)
            else:
                box = kind(None, scale=(0.5, 0.5)).of_size((96, 96)).draw(256, 256, draws)
                assert box == kind(96, scale=(0.5, 0.5)).draw(256, 256, draws)


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
    with pytest.raises(UsageError, match="a bucket has the size"):
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


@pytest.mark.parametrize(
    "create",
    [
        *(lambda: Resize(), lambda: Resize(short_side=8, size=8), lambda: Resize(short_side=0)),
        *(lambda: Resize(size=(8, 0)), lambda: Native(0), lambda: Native(2, 0), lambda: Native(2, max_pixels=0)),
        lambda: Native(2, min_pixels=9, max_pixels=8),
    ],
)
def test_arguments_out_of_range_are_refused(create):
    with pytest.raises(UsageError, match="expected"):
        create()
