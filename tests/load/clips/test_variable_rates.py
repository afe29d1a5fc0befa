"""Samplers that count in seconds, of videos whose frames last differently: the frames shown at their instants."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastvid import AtFps, Deltas, Window
from fastvid.load.clips.sampling import VideoInfo
from fastvid.load.order.draws import Draws

DRAWS = Draws(0, 0, 0)


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
    frames = AtFps(fps).draw(video, DRAWS).tolist()
    if video.fps > fps:
        assert frames == [shown(video, number / fps) for number in range(len(frames))]
        assert video.duration - 1 / fps <= len(frames) / fps <= video.duration + 1 / fps
    else:
        assert len(frames) == video.num_frames


@given(videos(), st.integers(1, 9), st.booleans())
def test_a_window_spans_its_seconds(video, count, jitter):
    sampler = Window(num_frames=count, fps=5, jitter=jitter)
    frames = sampler.draw(video, DRAWS)
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
    for frame, offset in zip(Deltas(offsets).draw(item, DRAWS).tolist(), offsets, strict=True):
        away = np.abs(times - (times[anchor] + offset))
        assert away[frame] == pytest.approx(away.min())
