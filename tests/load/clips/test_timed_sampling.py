"""Samplers in seconds compared with exact arithmetic, also of videos whose frames last differently."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fastvid.errors import UsageError
from fastvid.load.clips.sampling import Uniform, VideoInfo, clip_length, with_length
from fastvid.load.clips.timed_sampling import AtFps, Deltas, Window
from fastvid.load.order.draws import Draws
from tests.load.clips.sampler_contract import SamplerContract
from tests.load.tools import video

RATES = st.sampled_from(
    [Fraction(n) for n in (1, 5, 10, 12, 15, 24, 25, 30, 50, 60, 120)]
    + [Fraction(24_000, 1001), Fraction(30_000, 1001), Fraction(60_000, 1001), Fraction(19_001, 317)]
)
WANTED = st.sampled_from([Fraction(n, 10) for n in (1, 5, 9, 10, 11, 13, 15, 20, 40, 80, 100, 250, 300)])
LENGTHS = st.integers(1, 5000)
DRAWS = st.builds(Draws, st.integers(0, 9), st.integers(0, 9), st.integers(0, 10**6))
ANY = Draws(0, 0, 0)


class TestContract(SamplerContract):
    samplers = (
        AtFps(2),
        AtFps(2.5, max_frames=16),
        AtFps(2, min_frames=4, max_frames=30, multiple=2),
        AtFps(40, max_frames=64, multiple=6),
        AtFps(2, min_frames=6, max_frames=6),
        Window(seconds=4, num_frames=16),
        Window(num_frames=6, fps=8),
        Window(seconds=2, fps=3, jitter=False),
        Window(fps=4),
        Deltas([-0.2, -0.1, 0, 0.4]),
        Deltas([0.0, 0.1], anchor=1.5),
    )


def spread_evenly(count, num_frames):
    """Return frames from the first to the last, inclusive, rounded half up."""
    if count == 1:
        return [(num_frames - 1) // 2]
    return [math.floor(Fraction(i * (num_frames - 1), count - 1) + Fraction(1, 2)) for i in range(count)]


@given(LENGTHS, RATES, WANTED, st.integers(1, 8), st.none() | st.integers(8, 100), st.sampled_from([1, 2, 4, 5, 7]))
def test_the_whole_video_is_sampled_at_the_rate_within_the_bounds(num_frames, rate, wanted, least, most, multiple):
    assume(most is None or most // multiple >= -(-least // multiple))
    sampler = AtFps(float(wanted), min_frames=least, max_frames=most, multiple=multiple)
    frames = sampler.draw(video(num_frames, float(rate)), ANY).tolist()
    step = max(Fraction(1), rate / wanted)
    whole = math.ceil(num_frames / step) // multiple * multiple
    count = max(whole, -(-least // multiple) * multiple)
    count = count if most is None else min(count, most // multiple * multiple)
    if count == whole:
        assert frames == [math.floor(k * step) for k in range(count)]
    else:
        assert frames == spread_evenly(count, num_frames)
    assert len(frames) % multiple == 0
    if num_frames >= count:
        assert len(set(frames)) == count, "only a shorter video repeats frames"


def test_two_frames_a_second_of_ten_seconds():
    assert AtFps(2).draw(video(250, 25.0), ANY).tolist() == [math.floor(12.5 * k) for k in range(20)]
    # A bucket takes the middle of the video at the same rate, or spreads its frames over a shorter one.
    assert AtFps(10).of_length(3).draw(video(100, 30.0), ANY).tolist() == [45, 48, 51]
    short = AtFps(10, min_frames=6).of_length(6).draw(video(12, 30.0), ANY)
    assert short.tolist() == Uniform(6).draw(video(12), ANY).tolist()


@given(LENGTHS, RATES, st.sampled_from([1, 2, 4, 7, 8, 16]), WANTED, st.booleans(), DRAWS)
def test_a_window_has_its_rate_and_fits_where_it_can(num_frames, rate, count, wanted, jitter, draws):
    frames = Window(num_frames=count, fps=float(wanted), jitter=jitter).draw(video(num_frames, float(rate)), draws)
    steps = [math.floor(k * rate / wanted) for k in range(count)]
    start = int(frames[0])
    spare = num_frames - 1 - steps[-1]
    if spare < 0:
        assert start == 0
    elif not jitter:
        assert start == spare // 2
    assert frames.tolist() == [min(start + step, num_frames - 1) for step in steps]
    assert spare < 0 or frames[-1] == start + steps[-1]


@given(LENGTHS, RATES, st.sampled_from([1, 4, 16]), st.sampled_from([0.5, 1.0, 4.0, 30.0]), DRAWS)
def test_a_window_of_seconds_spreads_its_frames_over_them(num_frames, rate, count, seconds, draws):
    frames = Window(seconds=seconds, num_frames=count).draw(video(num_frames, float(rate)), draws)
    step = Fraction(seconds) * rate / count
    expected = [min(int(frames[0]) + math.floor(k * step), num_frames - 1) for k in range(count)]
    assert frames.tolist() == expected


def test_windows_start_at_every_frame_where_they_fit():
    starts = [int(Window(seconds=0.4, num_frames=5).draw(video(16, 25.0), Draws(0, 0, p))[0]) for p in range(600)]
    counts = np.bincount(starts)  # a span of 9 frames leaves 8 places
    assert len(counts) == 8
    # 7 degrees of freedom: mean 7, deviation 3.7.
    assert ((counts - 75) ** 2 / 75).sum() < 7 + 4 * 3.7


def test_whole_numbers_that_float64_rounds_down_count_as_whole():
    # 11 * (5 / 1.1) is 49.99999999999999 in float64, and 50 / (5 / 1.1) is 11.000000000000002.
    assert len(AtFps(1.1).draw(video(50, 5.0), ANY)) == 11
    assert AtFps(1.1).draw(video(60, 5.0), ANY)[11] == 50
    assert Window(num_frames=12, fps=1.1).draw(video(51, 5.0), ANY).tolist()[-1] == 50


def test_two_of_three_settings_determine_a_window():
    assert clip_length(Window(seconds=4, fps=8)) == 32
    assert Window(seconds=4, fps=8) == Window(4, 32, 8)
    assert clip_length(Window(seconds=0.01, fps=8)) == 1
    for wrong in ({}, {"seconds": 4}, {"num_frames": 4}, {"seconds": 4, "num_frames": 31, "fps": 8}):
        with pytest.raises(UsageError, match="Window") as caught:
            Window(**wrong)
        assert caught.value.hint


@given(LENGTHS, RATES, WANTED)
def test_an_open_window_is_the_whole_video_and_a_bucket_decides_its_length(num_frames, rate, wanted):
    sampler, shown = Window(fps=float(wanted)), video(num_frames, float(rate))
    assert clip_length(sampler) is None
    frames = sampler.draw(shown, ANY)
    assert frames[0] < max(1, rate / wanted), "one more frame would fit before it"
    assert len(frames) == sampler.count(np.array([num_frames]), np.array([float(rate)]))[0]
    assert num_frames - 1 - frames[-1] < max(1, rate / wanted), "one more frame would fit after it"
    shorter = with_length(sampler, max(1, len(frames) // 2)).draw(shown, ANY)
    assert np.array_equal(np.diff(shorter), np.diff(frames)[: len(shorter) - 1]), "the rate stays the same"


def test_windows_of_another_length_keep_their_rate_or_their_seconds():
    assert with_length(Window(num_frames=16, fps=8), 4) == Window(num_frames=4, fps=8)
    assert with_length(Window(seconds=4, num_frames=16), 4) == Window(seconds=4, num_frames=4)
    with pytest.raises(UsageError, match="it has 32"):
        with_length(Window(seconds=4, fps=8), 4)
    with pytest.raises(UsageError, match="multiple is 2"):
        with_length(AtFps(2, multiple=2), 5)


def test_clips_of_several_windows_are_spread_over_the_video():
    sampler = Window(num_frames=5, fps=5, jitter=False)
    clips = sampler.spread(video(100, 25.0), 3)
    assert clips.tolist() == [[0, 5, 10, 15, 20], [39, 44, 49, 54, 59], [79, 84, 89, 94, 99]]
    assert np.array_equal(sampler.spread(video(100, 25.0), 1)[0], sampler.draw(video(100, 25.0), ANY))


@given(LENGTHS, RATES, st.lists(st.sampled_from([-3.0, -0.5, -0.1, 0.0, 0.04, 0.3, 2.0]), min_size=1), DRAWS)
def test_deltas_are_offsets_from_one_frame_clamped_to_the_video(num_frames, rate, offsets, draws):
    shown = video(num_frames, float(rate))
    frames = Deltas(offsets).draw(shown, draws).tolist()
    anchor = int(Deltas([0.0]).draw(shown, draws)[0])
    exact = [math.floor(Fraction(str(offset)) * rate + Fraction(1, 2)) for offset in offsets]
    assert frames == [min(max(anchor + offset, 0), num_frames - 1) for offset in exact]


def test_deltas_around_an_anchor_and_beyond_the_ends():
    sampler = Deltas([-0.1, 0, 0.1, 5], anchor=0.5)
    assert sampler.draw(video(20, 10.0), ANY).tolist() == [4, 5, 6, 19]
    assert Deltas([-9, 0], anchor=99).draw(video(20, 10.0), ANY).tolist() == [0, 19]
    anchors = {int(Deltas([0]).draw(video(5), Draws(0, 0, p))[0]) for p in range(100)}
    assert anchors == set(range(5))


def test_equal_settings_have_equal_fingerprints():
    assert repr(AtFps(2)) == repr(AtFps(2.0))
    assert repr(Window(seconds=4, num_frames=8)) == repr(Window(seconds=4.0, num_frames=8))
    assert repr(Deltas([0, 1])) == repr(Deltas((0.0, 1.0)))


@pytest.mark.parametrize(
    "create",
    [
        *(lambda: AtFps(0), lambda: AtFps(math.nan), lambda: AtFps("2"), lambda: AtFps(2, min_frames=0)),
        *(lambda: AtFps(2, max_frames=0), lambda: AtFps(2, multiple=0), lambda: Window(seconds=-1, num_frames=2)),
        *(lambda: Window(num_frames=0, fps=2), lambda: Window(num_frames=2, fps=math.inf), lambda: Deltas([])),
        *(lambda: Deltas([math.nan]), lambda: Deltas([0], anchor=-1.0), lambda: Deltas([0], anchor="x")),
        *(lambda: Deltas(["a"]), lambda: Deltas("ab"), lambda: Deltas([[0.0, 1.0]]), lambda: Deltas(0.5)),
        *(lambda: Deltas([0], tolerance=-1), lambda: Deltas([0], tolerance="x")),
        lambda: Deltas([0], tolerance=math.nan),
    ],
)
def test_arguments_out_of_range_are_refused(create):
    with pytest.raises(UsageError, match="expected"):
        create()
    with pytest.raises(UsageError, match="at least 4 and at most 0") as caught:
        AtFps(2, max_frames=3, multiple=4)
    assert "raise max_frames" in caught.value.hint


@st.composite
def videos(draw):
    steps = draw(st.lists(st.sampled_from([0.02, 0.033, 0.1, 0.5, 4.0]), min_size=3, max_size=60))
    times = np.cumsum([0.0, *steps])
    return VideoInfo(len(times), len(times) / (float(times[-1]) + 0.04), 64, 48, times=times)


def shown(video, second):
    """Return the last frame that has begun at a time."""
    return max(number for number, time in enumerate(video.times.tolist()) if time <= second + 1e-6)


@given(videos(), st.sampled_from([0.5, 2.0, 7.5]))
def test_the_whole_video_at_a_rate(video, fps):
    frames = AtFps(fps).draw(video, ANY).tolist()
    if video.fps > fps:
        assert frames == [shown(video, number / fps) for number in range(len(frames))]
        assert video.duration - 1 / fps <= len(frames) / fps <= video.duration + 1 / fps
    else:
        assert len(frames) == video.num_frames


@given(videos(), st.integers(1, 9), st.booleans())
def test_a_window_spans_its_seconds(video, count, jitter):
    sampler = Window(num_frames=count, fps=5, jitter=jitter)
    frames = sampler.draw(video, ANY)
    places = range(video.num_frames)  # where it may start, in frames of the mean rate
    assert any(
        frames.tolist() == [shown(video, place / video.fps + number / 5) for number in range(count)] for place in places
    )
    assert sampler.spread(video, 3).shape == (3, count)


@given(videos(), st.integers(0, 60))
def test_offsets_lead_to_the_nearest_frame(video, anchor):
    anchor %= video.num_frames
    times = video.times
    item = VideoInfo(video.num_frames, video.fps, 64, 48, anchor=anchor, times=times)
    offsets = (-0.1, 0.0, 0.25)
    for frame, offset in zip(Deltas(offsets).draw(item, ANY).tolist(), offsets, strict=True):
        away = np.abs(times - (times[anchor] + offset))
        assert away[frame] == pytest.approx(away.min())
    anchored = Deltas(offsets, anchor=float(times[anchor])).draw(video, ANY)
    assert np.array_equal(anchored, Deltas(offsets).draw(item, ANY))


def test_halfway_between_two_frames_the_later_one_is_nearest():
    film = VideoInfo(3, 0.75, 64, 48, times=np.array([0.0, 1.0, 3.0]))
    assert Deltas([0.5, 2.0, -1], anchor=0.9).draw(film, ANY).tolist() == [1, 2, 0]
