"""Translate what a user asks of a video, by number or by time, to frame indices."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from fastvid.errors import UsageError
from fastvid.format.packets import StreamInfo
from fastvid.runtime.arrays import FloatArray, IntArray


def wanted_frames(
    info: StreamInfo,
    frames: slice | Sequence[int] | npt.ArrayLike | None,
    seconds: Sequence[float] | npt.ArrayLike | None,
) -> IntArray:
    """Return frame indices, int64 [T]; whether numbers are inside the video is checked when they are planned."""
    if (frames is None) == (seconds is None):
        raise UsageError(
            "expected either frames or seconds", hint="call `video.frames([0, 8])` or `video.frames(seconds=[1.2])`"
        )
    hint = f"give frames from 0 to {info.num_frames - 1} as integers or a slice, or times as `seconds=`"
    if seconds is not None:
        wanted = frames_at(info, seconds)
    elif isinstance(frames, slice):
        wanted = np.arange(info.num_frames, dtype=np.int64)[frames]
    else:
        wanted = np.atleast_1d(np.asarray(frames))
        if wanted.ndim != 1 or (wanted.size and wanted.dtype.kind not in "iu"):
            raise UsageError(f"frames are {frames!r}, expected integers", hint=hint)
    if not wanted.size:
        raise UsageError("no frame requested, at least one is required", hint=hint)
    return wanted.astype(np.int64)


def frames_at(info: StreamInfo, seconds: Sequence[float] | npt.ArrayLike) -> IntArray:
    """Return the frames shown at some times, int64 [T].

    Frame f is shown from `shown_at(f)` until the next frame is; so the time of a frame always leads back to it, also
    where f / fps is no double, and 1.2 is frame 30 at 25 frames per second.
    """
    try:
        times = np.atleast_1d(np.asarray(seconds, dtype=np.float64))
    except (TypeError, ValueError):
        times = np.empty((0, 0))
    end = float(info.num_frames / info.fps)
    hint = f"give seconds from 0 to less than {end:.6g}"
    if times.ndim != 1:
        raise UsageError(f"seconds are {seconds!r}, expected a list of numbers", hint=hint)
    found = []
    for time in times.tolist():
        if not 0 <= time < end:  # also NaN
            raise UsageError(f"second {time:.6g} is outside the video", hint=hint)
        frame = int(Fraction(time) * info.fps)
        # The time may be a frame's start that was rounded down to a double.
        found.append(frame + (frame + 1 < info.num_frames and float((frame + 1) / info.fps) <= time))
    return np.array(found, dtype=np.int64)


def shown_at(info: StreamInfo, frames: IntArray) -> FloatArray:
    """Return when frames are shown, float64 [T]: the doubles nearest to f / fps seconds."""
    seconds: FloatArray = frames * info.fps.denominator / info.fps.numerator
    return seconds


def spread(count: int, most: int) -> IntArray:
    """Return at most `most` of `count` numbers, evenly spaced: the middles of equal parts, int64, ascending."""
    most = min(count, most)
    middles: IntArray = (2 * np.arange(most, dtype=np.int64) + 1) * count // (2 * max(most, 1))
    return middles
