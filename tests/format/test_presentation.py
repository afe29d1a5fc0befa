"""How pictures are turned and when they are shown: by arrays that are turned, and by lists of times."""

import struct
import zlib
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastvid.format.presentation import Coded, Times, clip_range, coded_of, frame_bounds, usual_step

MS = Fraction(1, 1000)


def upright(data, coded):
    return np.rot90(data[..., ::-1] if coded.mirror else data, -coded.turn)


@st.composite
def turned(draw, step=2):
    """A crop of a picture, its numbers multiples of `step`, with a turn."""
    height, width = (step * draw(st.integers(4, 12)) for _ in range(2))
    top, left = step * draw(st.integers(0, height // step - 2)), step * draw(st.integers(0, width // step - 2))
    rows = step * draw(st.integers(-(-2 // step), (height - top) // step))
    columns = step * draw(st.integers(-(-2 // step), (width - left) // step))
    return Coded(width, height, (top, left, rows, columns), draw(st.integers(0, 3)), draw(st.booleans()))


@given(turned(), st.data())
def test_a_box_of_shown_pixels_is_cut_from_those_of_the_coded_picture(coded, data):
    picture = np.arange(coded.height * coded.width).reshape(coded.height, coded.width)
    top, left, rows, columns = coded.crop
    shown = upright(picture[top : top + rows, left : left + columns], coded)
    height, width = shown.shape
    y, x = (2 * data.draw(st.integers(0, side // 2 - 1)) for side in (height, width))
    h, w = 2 * data.draw(st.integers(1, (height - y) // 2)), 2 * data.draw(st.integers(1, (width - x) // 2))
    at, along, tall, wide = coded.cut((height, width), (y, x, h, w))
    assert np.array_equal(upright(picture[at : at + tall, along : along + wide], coded), shown[y : y + h, x : x + w])


@given(turned(), st.integers(2, 60), st.integers(2, 60), st.data())
def test_a_box_of_stretched_pixels_is_cut_at_the_nearest_even_place(coded, height, width, data):
    height, width = 2 * (height // 2), 2 * (width // 2)
    y, x = (2 * data.draw(st.integers(0, side // 2 - 1)) for side in (height, width))
    h, w = 2 * data.draw(st.integers(1, (height - y) // 2)), 2 * data.draw(st.integers(1, (width - x) // 2))
    cut = coded.cut((height, width), (y, x, h, w))
    assert all(number % 2 == 0 for number in cut)
    assert cut[0] >= coded.crop[0] & ~1
    assert cut[1] >= coded.crop[1] & ~1
    assert cut[0] + cut[2] <= coded.crop[0] + coded.crop[2]
    assert cut[1] + cut[3] <= coded.crop[1] + coded.crop[3]
    rows, columns = coded.crop[2:]
    if coded.turn % 2:
        rows, columns = columns, rows
    tall, wide = (cut[3], cut[2]) if coded.turn % 2 else cut[2:]
    # Either end of a side goes to the nearest even number, so that a length is off by at most 2.
    assert abs(tall - h * rows / height) <= 2
    assert abs(wide - w * columns / width) <= 2
    whole = coded.cut((height, width), (0, 0, height, width))
    assert whole == coded.crop


@given(turned(step=1))
def test_a_picture_is_stretched_if_its_even_sides_change(coded):
    height, width = coded.crop[2:] if coded.turn % 2 == 0 else coded.crop[:1:-1]
    assert not any(coded.stretches((height & ~1 | odd, width & ~1 | odd)) for odd in (0, 1))
    assert coded.stretches((height + 2, width))
    assert coded.stretches((height, width + 2))
    assert all(number % 2 == 0 for number in coded.cut((height, width), (0, 0, 2, 2)))


@given(turned(step=1))
def test_the_shown_part_of_a_turned_picture_is_the_turned_crop(coded):
    picture = np.arange(coded.height * coded.width).reshape(coded.height, coded.width)
    top, left, rows, columns = coded.crop
    y, x, height, width = coded.shown_part
    crop = upright(picture[top : top + rows, left : left + columns], coded)
    assert np.array_equal(upright(picture, coded)[y : y + height, x : x + width], crop)


@pytest.mark.parametrize(
    "wrong",
    [
        {"crop": [0, 0, 1, 8]},
        {"crop": [4, 0, 6, 8]},
        {"crop": [0, 4, 8, 6]},
        {"turn": 4},
        {"turn": "1"},
        {"width": None},
    ],
)
def test_an_impossible_crop_or_turn_is_refused(wrong):
    good = {"width": 8, "height": 8, "crop": [0, 0, 8, 8], "turn": 3, "mirror": True}
    assert coded_of(good) == Coded(8, 8, (0, 0, 8, 8), 3, True)
    assert coded_of(None) is None
    assert Coded(8, 8, (0, 0, 8, 8)) == Coded(8, 8, (0, 0, 8, 8), 0, False)
    for crop in ((4, 0, 4, 8), (0, 4, 8, 4)):
        Coded(8, 8, crop).check()
    with pytest.raises((ValueError, TypeError)):
        coded_of(good | wrong)


@given(st.lists(st.integers(1, 2000), max_size=40), st.integers(-99, 99))
def test_times_are_kept_as_they_are_unless_a_rate_explains_them(steps, first):
    pts = first + np.cumsum([0, *steps])
    times = Times.pack(pts - first, MS)
    times.check()
    assert (times.num_frames, times.tick) == (len(pts), MS)
    assert times.ticks().tolist() == (pts - first).tolist()
    assert times.seconds() == pytest.approx((pts - first) / 1000)
    found = Times.of(pts, MS, Fraction(25))
    is_regular = all(abs(at - first - 40 * number) <= 1 for number, at in enumerate(pts.tolist()))
    assert found == (None if is_regular else times)


def test_a_coarse_clock_must_agree_with_the_rate_exactly():
    rounded = np.array([0, 33, 67, 100, 133])
    assert Times.of(rounded, MS, Fraction(30)) is None
    assert Times.of(8 * rounded, MS / 8, Fraction(30)) is None  # in a remuxed file, whose clock is finer
    assert Times.of(8 * rounded + [0, 0, 1, 0, 0], MS / 8, Fraction(30)) is not None
    coarse = Times.of(np.array([0, 3, 7, 10, 13]), Fraction(1, 100), Fraction(30))
    assert coarse is not None
    assert coarse.ticks().tolist() == [0, 3, 7, 10, 13]
    assert Times.of(np.array([5, 9, 13]), Fraction(1, 100), Fraction(25)) is None


@pytest.mark.parametrize(
    ("data", "count", "message"),
    [
        (b"short", 3, "cannot be read"),
        (struct.pack("<QQ", 1, 1000) + b"no zlib", 3, "cannot be read"),
        (struct.pack("<QQ", 1, 1000) + zlib.compress(bytes(11)), 3, "cannot be read"),
        (struct.pack("<QQ", 0, 1000) + zlib.compress(bytes(16)), 3, "have no clock"),
        (struct.pack("<QQ", 1, 0) + zlib.compress(bytes(16)), 3, "have no clock"),
        (struct.pack("<QQ", 1, 1000) + zlib.compress(bytes(16)), 3, "not ascending"),
        (struct.pack("<QQ", 1, 1000) + zlib.compress(struct.pack("<qq", 5, -3)), 3, "not ascending"),
        (struct.pack("<QQ", 1, 1000) + zlib.compress(struct.pack("<q", 9)), 3, "2 times, or not"),
        (struct.pack("<QQ", 1, 1000) + zlib.compress(struct.pack("<q", 9) * 10**6), 3, "cannot be read"),
    ],
)  # fmt: skip
def test_times_that_cannot_be_are_refused(data, count, message):
    with pytest.raises(ValueError, match=message):
        Times(data, count).check()


def test_the_frame_at_a_time_is_one_of_the_video():
    times = Times.pack([0, 100, 500, 520], MS)
    wanted = np.array([-9.0, 0.0, 0.0989, 0.099, 0.4989, 0.499, 9.0])
    assert times.frames_at(wanted, 0.1).tolist() == [0, 0, 0, 1, 1, 2, 3]


def test_a_clip_begins_and_ends_at_the_nearest_frames():
    assert [usual_step(np.array(steps), 9) for steps in ([5, 1, 2], [5, 1], [])] == [2, 1, 9]
    seconds = np.array([0.0, 0.1, 0.2, 0.7, 0.8])
    assert frame_bounds(seconds, 9.0).tolist() == pytest.approx([0, 0.1, 0.2, 0.7, 0.8, 0.9])
    assert frame_bounds(np.array([0.0]), 0.04).tolist() == [0, 0.04]
    assert clip_range(seconds, 9.0, None, None) == (0, 5)
    assert clip_range(seconds, 9.0, 0.149, 0.7) == (1, 3)
    assert clip_range(seconds, 9.0, 0.151, 0.749) == (2, 3)
    assert clip_range(seconds, 9.0, 0.151, 0.751) == (2, 4)
    # Half of the usual duration, not of the long pause.
    assert clip_range(seconds, 9.0, 0.24, 0.3) == (2, 3)
    assert clip_range(seconds, 9.0, 0.26, 0.8) == (3, 4)
