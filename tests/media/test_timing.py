"""The choice of a source's constant frame rate."""

from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastvid.errors import SourceError
from fastvid.media.timing import MAX_RATE, STANDARD, choose_timing, clip_frames

MILLISECONDS = Fraction(1, 1000)
TICKS = Fraction(1, 90_000)

rates = st.sampled_from([rate for rate in STANDARD if rate <= MAX_RATE])


def grid(rate, count, base=TICKS, start=0):
    return [round(start + number / rate / base) for number in range(count)]


@given(rates, st.integers(2, 400), st.integers(0, 10**9), st.randoms())
def test_frames_on_a_grid_stay_one_to_one_when_times_are_rounded_or_reordered(rate, count, start, random):
    for base in (TICKS, MILLISECONDS):
        pts = grid(rate, count, base, start)
        random.shuffle(pts)
        timing = choose_timing(pts, base, [rate], count)
        assert (timing.kind, timing.rate, timing.input_rate, timing.frames) == ("constant", rate, rate, count)


@given(rates, st.integers(3, 300))
def test_true_rate_is_found_when_container_counts_milliseconds(rate, count):
    # For Matroska and FLV FFmpeg reports a rate of 1000.
    timing = choose_timing(grid(rate, count, MILLISECONDS), MILLISECONDS, [Fraction(1000)], count)
    assert timing.kind == "constant"
    assert timing.frames == count
    # Over the whole video the clock is accurate to half a frame.
    assert abs((count - 1) / timing.rate - (count - 1) / rate) < Fraction(1, 2) / rate + 2 * MILLISECONDS


@given(rates, st.lists(st.booleans(), min_size=8, max_size=200))
def test_holes_are_filled_and_no_frame_is_lost(rate, there):
    there = [True, True, *there, True]
    kept = [number for number, keep in enumerate(there) if keep]
    timing = choose_timing([grid(rate, len(there))[number] for number in kept], TICKS, [rate], len(kept))
    if timing.kind == "gaps":
        assert timing.rate == rate
        assert timing.frames == len(there) <= 2 * len(kept)
        assert timing.input_rate is None
    assert timing.frames >= len(kept)


@given(st.lists(st.integers(1, 90_000), min_size=2, max_size=200))
def test_any_timestamps_give_a_rate_and_a_bounded_number_of_frames(steps):
    pts = [sum(steps[:number]) for number in range(len(steps) + 1)]
    timing = choose_timing(pts, TICKS, [None, Fraction(30)], len(pts))
    assert 0 < timing.rate <= MAX_RATE
    assert 1 <= timing.frames <= 2 * len(pts)


@pytest.mark.parametrize(
    ("pts", "base", "nominal", "rate"),
    [
        ([None] * 5, TICKS, [Fraction(50)], 50),
        ([None] * 5, TICKS, [None], 25),
        ([0, 3600, None, 10800], TICKS, [Fraction(24)], 24),
        ([7, 7, 7], TICKS, [Fraction(12)], 12),
        ([0], TICKS, [Fraction(15)], 15),
        ([0], TICKS, [Fraction(1000)], 25),
        # A clock that jumps by a day, as in a recording that was stopped and resumed.
        ([*grid(Fraction(30), 50), *grid(Fraction(30), 50, start=90_000 * 86_400)], TICKS, [Fraction(90_000)], 30),
        # Steps of days, as broken stts tables have; the rate rounds to zero.
        (range(0, 4 << 31, 1 << 31), Fraction(1, 90), [Fraction(1, 100_000), Fraction(25)], 25),
        (range(0, 4 << 40, 1 << 40), Fraction(1, 90), [Fraction(1, 100_000), Fraction(25)], 25),
        # As in an MP4 whose durations are all zero: only the offsets of reordered frames differ.
        ([0, 0, 0, 0, 512, 512, 512, 512, 1024, 1024], Fraction(1, 12800), [Fraction(25)], 25),
    ],
)
def test_frames_are_counted_when_timestamps_are_unusable(pts, base, nominal, rate):
    timing = choose_timing(list(pts), base, nominal, len(pts))
    assert (timing.kind, timing.rate, timing.frames) == ("counted", rate, len(pts))


@pytest.mark.parametrize(("rate", "written"), [(120, 60), (100, 50), (240, 60), (90, 45), (144, 48)])
def test_high_rates_are_divided_by_an_integer(rate, written):
    timing = choose_timing(grid(Fraction(rate), 241), TICKS, [Fraction(rate)], 241)
    assert timing.rate == written
    assert timing.frames == -(-241 // (rate // written))


@pytest.mark.parametrize(
    ("claimed", "rate"),
    [("2997/100", "30000/1001"), ("45000/1501", "30000/1001"), ("24000/1001", "24000/1001"), ("24", "24")],
)
def test_rounded_header_rates_snap_to_standard_rates(claimed, rate):
    pts = grid(Fraction(rate), 60)
    assert choose_timing(pts, TICKS, [Fraction(claimed)], 60).rate == Fraction(rate)


@pytest.mark.parametrize("base", [TICKS, MILLISECONDS])
@pytest.mark.parametrize("digits", [2, 3, 6])
@pytest.mark.parametrize("rate", [10, Fraction(24000, 1001), 25, Fraction(30000, 1001), 30, Fraction(60000, 1001)])
def test_adjacent_clips_whose_seconds_were_rounded_have_all_frames_once(rate, digits, base):
    seconds = np.array(grid(Fraction(rate), 170, base)) * float(base)
    bounds = [None if scene in (0, 10) else round(float(17 * scene / rate), digits) for scene in range(11)]
    clips = [clip_frames(seconds, 1 / rate, start, end) for start, end in pairwise(bounds)]
    assert clips == [(17 * scene, 17 * scene + 17) for scene in range(10)]


# Frames at 10 and 2 per second: at 0.0, 0.1, 0.2, 0.3, 0.8, 1.3 and 1.8 s.
@pytest.mark.parametrize(
    ("start", "end", "frames"),
    [
        (None, None, (0, 7)),
        (0.1, 0.3, (1, 3)),
        (0.15, 0.25, (1, 2)),  # a bound halfway between two frames belongs to the earlier one
        (0.151, 0.251, (2, 3)),
        (0.34, 1.8, (3, 6)),
        (0.36, 1.8, (4, 6)),  # frame 3 lasts 0.5 s, but frames usually last 0.1 s
        (0.8, 5.0, (4, 7)),
        (-1.0, 0.06, (0, 1)),
    ],
)
def test_bounds_of_clips_go_to_the_nearest_frame_at_any_rate(start, end, frames):
    assert clip_frames(np.array([0.0, 0.1, 0.2, 0.3, 0.8, 1.3, 1.8]), 0.1, start, end) == frames


@pytest.mark.parametrize(("start", "end"), [(2.4, None), (1.0, 1.0), (0.96, 0.97)])
def test_a_clip_without_a_frame_is_out_of_range(start, end):
    with pytest.raises(SourceError, match=r"not in 1\.90 s of video") as caught:
        clip_frames(np.array([0.0, 0.1, 0.2, 0.3, 0.8, 1.3, 1.8]), 0.1, start, end)
    assert caught.value.reason == "out-of-range"
