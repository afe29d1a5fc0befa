"""Frame samplers: pure functions of a video's frame count and the clip's random numbers.

A sampler is a frozen dataclass with `num_frames`, the length T of its clips, and `draw(num_frames, draws)`, which
returns int64 [T]. Its repr is part of a loader's fingerprint.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, get_args

import numpy as np
import numpy.typing as npt

from fastvid.errors import UsageError
from fastvid.load.order.random_draws import Draws, Purpose
from fastvid.runtime.arrays import IntArray
from fastvid.runtime.checks import check_choice, check_least

Short = Literal["loop", "clamp"]


class Sampler(Protocol):
    """Protocol of a frame sampler."""

    @property
    def num_frames(self) -> int:
        """Frames of a clip, T."""
        ...

    def draw(self, num_frames: int, draws: Draws, /) -> IntArray:
        """Return the frame indices of a clip, int64 [T], each 0 <= i < num_frames; the video has num_frames >= 1.

        A list, a tensor or an array of another integer type is accepted too.
        """
        ...


def check_frames(sampler: Sampler, frames: npt.ArrayLike, num_frames: int) -> IntArray:
    """Return the frame indices that a sampler chose as int64 [T].

    Args:
        sampler: The sampler, for messages and T.
        frames: What it returned.
        num_frames: Frames of the video.

    Raises:
        UsageError: If they are not T integers from 0 to num_frames - 1.
    """
    expected = f"expected integers [{sampler.num_frames}] from 0 to {num_frames - 1}"
    found = np.asarray(frames)
    if found.dtype.kind not in "iu" or found.shape != (sampler.num_frames,):
        raise UsageError(
            f"sampler {sampler!r} returned {found.dtype} {list(found.shape)}, {expected}",
            hint="return one frame index for each frame of the clip",
        )
    indices: IntArray = found.astype(np.int64, copy=False)
    if len(indices) and not (indices.min() >= 0 and indices.max() < num_frames):
        outside = indices[(indices < 0) | (indices >= num_frames)][0]
        raise UsageError(
            f"sampler {sampler!r} returned frame {outside}, {expected}", hint="keep indices inside the video"
        )
    return indices


@dataclass(frozen=True)
class Segments:
    """TSN's sparse sampling: divide the video into equal segments and take one place in each.

    With F frames, T segments and L frames taken at each place, there are n = F - L + 1 places.

    Training (`jitter=True`): segment i covers d = n // T places, and the place is i*d plus a uniform integer below d.
    If there are fewer places than segments (d = 0), places are uniform and sorted when F > T, otherwise all are 0.

    Evaluation (`jitter=False`): the middle of segment i, int(n/T/2 + n/T*i).

    Args:
        num_segments: T >= 1.
        jitter: Whether to draw random places, for training.
        length: Consecutive frames L taken from each place, >= 1; the clip has T*L frames. If a video is shorter than L,
            its last frame is repeated.

    Raises:
        UsageError: If an argument is out of range.

    Source:
        Wang et al., Temporal Segment Networks, ECCV 2016; formulas of mit-han-lab/temporal-shift-module
        ops/dataset.py (_sample_indices, _get_test_indices).
    """

    num_segments: int
    jitter: bool = True
    length: int = 1

    def __post_init__(self) -> None:
        check_least(1, num_segments=self.num_segments, length=self.length)

    @property
    def num_frames(self) -> int:
        """Frames of a clip."""
        return self.num_segments * self.length

    def draw(self, num_frames: int, draws: Draws) -> IntArray:
        """Return frame indices, int64 [T*L], each segment's frames together."""
        segments = self.num_segments
        places = max(1, num_frames - self.length + 1)
        if not self.jitter:
            return self.at(num_frames, 0.5)
        if places >= segments:
            step = places // segments
            starts = np.arange(segments) * step + np.array(
                draws.integers(Purpose.FRAMES, step, segments), dtype=np.int64
            )
        elif num_frames > segments:
            starts = np.sort(np.array(draws.integers(Purpose.FRAMES, places, segments), dtype=np.int64))
        else:
            starts = np.zeros(segments, dtype=np.int64)
        return self._consecutive(starts, num_frames)

    def spread(self, num_frames: int, num_clips: int) -> IntArray:
        """Return the frame indices of several clips, int64 [num_clips, T*L]: clip c is at (c + 1/2) / num_clips of each
        segment, so that a single clip equals `draw` without jitter."""
        return np.stack([self.at(num_frames, (2 * clip + 1) / (2 * num_clips)) for clip in range(num_clips)])

    def at(self, num_frames: int, place: float) -> IntArray:
        """Return the frame indices at `place` of each segment, int64 [T*L]; 0 <= place < 1, and 1/2 is the middle."""
        tick = max(1, num_frames - self.length + 1) / self.num_segments
        return self._consecutive((tick * place + tick * np.arange(self.num_segments)).astype(np.int64), num_frames)

    def _consecutive(self, starts: IntArray, num_frames: int) -> IntArray:
        if self.length == 1:
            return starts
        frames: IntArray = np.minimum(starts[:, None] + np.arange(self.length), num_frames - 1).reshape(-1)
        return frames


@dataclass(frozen=True)
class Dense:
    """Consecutive frames at a stride, as in I3D and SlowFast.

    The clip spans (T-1)*stride + 1 frames. With jitter its start is uniform over all places where it fits, otherwise it
    is in the middle. If a video is shorter than the span, the clip starts at frame 0, and `short` extends it.

    Args:
        num_frames: T >= 1.
        stride: Distance between consecutive frames of the clip, >= 1.
        jitter: Whether to start at random, for training.
        short: "loop" continues at frame 0 (indices modulo F, TSM's dense sampling); "clamp" repeats the last frame.

    Raises:
        UsageError: If an argument is out of range.
    """

    num_frames: int
    stride: int
    jitter: bool = True
    short: Short = "loop"

    def __post_init__(self) -> None:
        check_least(1, num_frames=self.num_frames, stride=self.stride)
        check_choice("short", self.short, get_args(Short))

    def draw(self, num_frames: int, draws: Draws) -> IntArray:
        """Return frame indices, int64 [T]."""
        spare = self._spare(num_frames)
        return self._from(draws.integers(Purpose.FRAMES, spare + 1, 1)[0] if self.jitter else spare // 2, num_frames)

    def spread(self, num_frames: int, num_clips: int) -> IntArray:
        """Return the frame indices of several clips, int64 [num_clips, T]: starts are evenly spaced from the first
        place where a clip fits to the last, inclusive; a single clip starts in the middle."""
        spare = self._spare(num_frames)
        starts = [spare * clip // (num_clips - 1) for clip in range(num_clips)] if num_clips > 1 else [spare // 2]
        return np.stack([self._from(start, num_frames) for start in starts])

    def _spare(self, num_frames: int) -> int:
        return max(0, num_frames - ((self.num_frames - 1) * self.stride + 1))

    def _from(self, start: int, num_frames: int) -> IntArray:
        frames = start + np.arange(self.num_frames, dtype=np.int64) * self.stride
        return frames % num_frames if self.short == "loop" else np.minimum(frames, num_frames - 1)


@dataclass(frozen=True)
class Uniform:
    """Frames evenly spaced from the first to the last, inclusive; the same in every epoch.

    Frame i is i*(F-1)/(T-1), rounded half up; with T = 1 it is the middle frame. If F < T, frames are repeated.

    Args:
        num_frames: T >= 1.

    Raises:
        UsageError: If the argument is out of range.
    """

    num_frames: int

    def __post_init__(self) -> None:
        check_least(1, num_frames=self.num_frames)

    def draw(self, num_frames: int, _draws: Draws, /) -> IntArray:
        """Return frame indices, int64 [T], ascending."""
        steps = self.num_frames - 1
        if not steps:
            return np.array([(num_frames - 1) // 2], dtype=np.int64)
        return (2 * np.arange(self.num_frames, dtype=np.int64) * (num_frames - 1) + steps) // (2 * steps)
