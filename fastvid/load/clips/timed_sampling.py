"""Frame samplers that count in seconds: clips of videos with different frame rates then span the same time.

Frame i of a video with r frames a second is shown from i/r to (i+1)/r seconds, so the frame shown at t seconds is
floor(t*r). If the frame rate varies, r is the mean rate, and the frame shown at t seconds is looked up. All formulas
are in float64 and the same for one video and for arrays of videos. Where a formula says floor(x) or ceil(x) of a
quotient, 1e-6 is added or subtracted first, so that a whole number that was rounded to the wrong side counts as whole;
a millionth of a frame is never visible.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Final, Self

import numpy as np

from fastvid.errors import UsageError
from fastvid.load.clips.sampling import (
    BatchSampler,
    VideoInfo,
    Videos,
    check_counts,
    evenly,
    refuse_length,
    spread_over,
)
from fastvid.load.order.draws import BatchDraws, Purpose
from fastvid.runtime.arrays import AnyArray, FloatArray, IntArray
from fastvid.runtime.values import check_least, check_numbers, check_switches

_NEAR: Final = 1e-6
"""Tolerance in frames of the roundings above: far above float64's error for videos of days, far below one frame."""


@dataclass(frozen=True)
class AtFps(BatchSampler):
    """The whole video at `fps` frames a second, as video-language models take it; the same in every epoch.

    For a video of F frames at r frames a second and m = `multiple`:

    1. s = max(1, r / fps) is the step in frames. A video with fewer frames a second than `fps` gives every frame once.
    2. n = ceil(F / s) instants 0, s, 2s, ... are inside the video.
    3. T = floor(n / m) * m, then at least ceil(min_frames / m) * m, then at most floor(max_frames / m) * m.
    4. If T = floor(n / m) * m, frame k is floor(k * s). Otherwise T frames are spread evenly over the whole video as by
       `Uniform`; they repeat only if F < T.

    In a bucket of T frames the clip is the T instants in the middle of the video, at the same rate, if it has so many.

    Args:
        fps: Frames a second, > 0.
        min_frames: Least frames of a clip, >= 1.
        max_frames: Most frames of a clip, at least `min_frames` and `multiple`; None for no bound.
        multiple: Divides the number of frames of every clip, >= 1: for models that merge so many frames into one token.

    Raises:
        UsageError: If an argument is out of range.
    """

    fps: float
    min_frames: int = 1
    max_frames: int | None = None
    multiple: int = 1
    _in_bucket = False  # whether a bucket decided the length

    def __post_init__(self) -> None:
        # Normalise, so that 2 and 2.0 have the same fingerprint.
        object.__setattr__(self, "fps", _positive("fps", self.fps))
        check_counts(self, "min_frames", "max_frames", "multiple")
        if self.max_frames is not None and self._most < self._least:
            told = f"{self!r} allows no number of frames: at least {self._least} and at most {self._most}"
            raise UsageError(told, hint="raise max_frames, or lower min_frames or multiple")

    @property
    def num_frames(self) -> int | None:
        """Frames of every clip; None if they depend on the video."""
        return self._least if self._least == self._most else None

    def count(self, num_frames: IntArray, fps: FloatArray) -> IntArray:
        """Return the number of frames of each video's clip, int64 [N].

        Args:
            num_frames: Frames of each video, int64 [N].
            fps: Frames per second of each video, float64 [N].
        """
        return np.clip(self._at_rate(num_frames, fps), self._least, self._most).astype(np.int64)

    def of_length(self, length: int) -> Self:
        """Return the same sampler making `length` frames.

        Raises:
            UsageError: If `length` is not a multiple of `multiple`.
        """
        if length % self.multiple:
            raise refuse_length(self, length, f"multiple is {self.multiple}", f"use a multiple of {self.multiple}")
        made = replace(self, min_frames=length, max_frames=length)
        object.__setattr__(made, "_in_bucket", True)
        return made

    def draw_all(self, videos: Videos) -> Sequence[IntArray]:
        """See `BatchSampler`; frames are ascending."""
        counts = self.count(videos.num_frames, videos.fps)
        instants = self._at_rate(videos.num_frames, videos.fps)
        steps = np.maximum(1.0, videos.fps / self.fps)
        frames = _instants(np.maximum(counts, instants), steps, np.zeros_like(counts), videos)
        for row, (count, whole) in enumerate(zip(counts.tolist(), instants.tolist(), strict=True)):
            if self._in_bucket and count <= whole:
                first = (whole - count) // 2
                frames[row] = frames[row][first : first + count]
            elif count != whole:
                frames[row] = evenly(count, videos.num_frames[row : row + 1])[0]
        return frames

    def _at_rate(self, num_frames: IntArray, fps: FloatArray) -> IntArray:
        instants = np.ceil(num_frames / np.maximum(1.0, fps / self.fps) - _NEAR).astype(np.int64)
        return instants // self.multiple * self.multiple

    @property
    def _least(self) -> int:
        return -(-self.min_frames // self.multiple) * self.multiple

    @property
    def _most(self) -> int:
        return 2**62 if self.max_frames is None else self.max_frames // self.multiple * self.multiple


@dataclass(frozen=True)
class Window(BatchSampler):
    """A part of the video at a steady rate: a random one (`jitter=True`) or the middle one.

    Two of the first three arguments determine the clip; the third one, if given, must agree with them. With `fps` alone
    the length is open: a bucket decides it, and without buckets the clip is the whole video.

    For a video of F frames at r frames a second, with step s = r / fps, or s = seconds * r / T if `fps` is not given:

    - T = num_frames, or floor(seconds * fps + 1/2), at least 1; if the length is open, T = ceil(F / s).
    - Frame k is a + floor(k * s), where the first frame a is uniform over all frames from which the clip fits into the
      video, or in the middle of them, rounded down. Frames repeat if s < 1.
    - If the video is shorter than the clip, a = 0 and the last frame is repeated at the end.

    Args:
        seconds: Duration of the clip, > 0: its frames are seconds / T apart.
        num_frames: Frames of the clip T, >= 1.
        fps: Frames of the clip a second, > 0.
        jitter: Whether to start at random, for training.

    Raises:
        UsageError: If an argument is out of range, or if they do not determine the clip.
    """

    seconds: float | None = None
    num_frames: int | None = None
    fps: float | None = None
    jitter: bool = True

    def __post_init__(self) -> None:
        check_counts(self, "num_frames")
        check_switches(jitter=self.jitter)
        for name in ("seconds", "fps"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, _positive(name, getattr(self, name)))
        if self.fps is None and (self.seconds is None or self.num_frames is None):
            hint = "give two of seconds, num_frames and fps, or fps alone for buckets"
            raise UsageError(f"{self!r} has no frame rate", hint=hint)
        if self.seconds is not None and self.fps is not None:
            length = max(1, math.floor(self.seconds * self.fps + 0.5 + _NEAR))
            if self.num_frames not in (None, length):
                told = f"{self!r}: {self.seconds:g} s at {self.fps:g} frames a second are {length} frames"
                raise UsageError(told, hint="leave out one of seconds, num_frames and fps")
            object.__setattr__(self, "num_frames", length)

    def count(self, num_frames: IntArray, fps: FloatArray) -> IntArray:
        """Return the number of frames of each video's clip, int64 [N]; if the length is open, the most it can give.

        Args:
            num_frames: Frames of each video, int64 [N].
            fps: Frames per second of each video, float64 [N].
        """
        if self.num_frames is not None:
            return np.full(len(num_frames), self.num_frames, dtype=np.int64)
        assert self.fps is not None
        return np.maximum(1, np.ceil(num_frames / (fps / self.fps) - _NEAR)).astype(np.int64)

    def of_length(self, length: int) -> Self:
        """Return the same sampler making `length` frames: at the same `fps`, or else in the same `seconds`.

        Raises:
            UsageError: If `seconds` and `fps` determine another length.
        """
        if self.seconds is not None and self.fps is not None and length != self.num_frames:
            raise refuse_length(self, length, f"it has {self.num_frames}", "give fps alone: buckets decide the length")
        return replace(self, num_frames=length)

    def draw_all(self, videos: Videos) -> Sequence[IntArray]:
        """See `BatchSampler`; frames are ascending."""
        counts, steps, spare = self._places(videos)
        starts = videos.draws.integers(Purpose.FRAMES, spare + 1, 1)[:, 0] if self.jitter else spare // 2
        return _instants(counts, steps, starts, videos)

    def spread(self, video: VideoInfo, num_clips: int) -> IntArray:
        """Return the frame indices of several clips, int64 [num_clips, T]: starts are evenly spaced from the first
        place where a clip fits to the last, inclusive; a single clip starts in the middle."""
        videos = Videos.of(video, BatchDraws(0, 0, np.zeros(num_clips, np.int64)), num_clips)
        counts, steps, spare = self._places(videos)
        return np.stack(_instants(counts, steps, spread_over(spare), videos))

    def _places(self, videos: Videos) -> tuple[IntArray, FloatArray, IntArray]:
        """Return for each clip its number of frames, the step between them, and the last frame where it can start."""
        counts = self.count(videos.num_frames, videos.fps)
        if self.fps is not None:
            steps = videos.fps / self.fps
        else:
            assert self.seconds is not None
            steps = self.seconds * videos.fps / counts
        last = np.minimum(np.floor((counts - 1) * steps + _NEAR).astype(np.int64), videos.num_frames - 1)
        return counts, steps, videos.num_frames - 1 - last


@dataclass(frozen=True)
class Deltas(BatchSampler):
    """Frames at offsets in seconds from an anchor: the history and the future of one moment, as robot policies take it.

    The anchor is a frame of the video, in training uniformly random. A frame is the anchor plus the offset times the
    video's frame rate, rounded to the nearest frame, half up; beyond the ends of the video it is the first or the last.

    Args:
        seconds: Offsets of the T frames in any order, negative ones before the anchor.
        anchor: Time of the anchor in seconds, >= 0, the last frame if the video is shorter; None for a random frame, or
            for the frame of an item of `EveryFrame`.
        tolerance: Seconds that an offset may be away from a whole number of frames; None for any. LeRobot allows 1e-4.

    Raises:
        UsageError: If an argument is out of range.
    """

    seconds: Sequence[float]
    anchor: float | None = None
    tolerance: float | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        offsets = check_numbers("seconds", self.seconds)
        if not offsets or not all(map(math.isfinite, offsets)):
            raise UsageError(f"seconds are {list(offsets)}, expected at least one finite offset")
        object.__setattr__(self, "seconds", offsets)
        check_least(0, anchor=self.anchor, tolerance=self.tolerance)
        if self.anchor is not None:
            if self.anchor == math.inf:
                raise UsageError("anchor is inf, expected a time in the video", hint="a large number is its last frame")
            object.__setattr__(self, "anchor", float(self.anchor))

    @property
    def num_frames(self) -> int:
        """Frames of a clip."""
        return len(self.seconds)

    def draw_all(self, videos: Videos) -> IntArray:
        """See `BatchSampler`; in the order of the offsets."""
        last = videos.num_frames - 1
        if videos.anchors is not None:
            anchors = videos.anchors
        elif self.anchor is None:
            anchors = videos.draws.integers(Purpose.FRAMES, videos.num_frames, 1)[:, 0]
        else:
            once = np.ones_like(last)
            anchors = np.concatenate(_instants(once, once, self.anchor * videos.fps, videos))
        offsets = np.stack([_offsets(tuple(self.seconds), self.tolerance, fps) for fps in videos.fps.tolist()])
        frames: IntArray = np.clip(anchors[:, None] + offsets, 0, last[:, None])
        for row, times in videos.times.items():
            wanted = times[anchors[row]] + np.array(self.seconds) + _NEAR / videos.fps[row]
            frames[row] = np.searchsorted((times[1:] + times[:-1]) / 2, wanted)  # the nearest
        return frames

    def offsets(self, fps: float) -> IntArray:
        """Return the offsets in frames, int64 [T], read-only.

        Raises:
            UsageError: If one is farther from a whole number of frames than the tolerance.
        """
        return _offsets(tuple(self.seconds), self.tolerance, fps)


# Cached: the videos of a dataset have few rates.
@lru_cache(maxsize=1024)
def _offsets(seconds: tuple[float, ...], tolerance: float | None, fps: float) -> IntArray:
    exact = np.array(seconds) * fps
    offsets: IntArray = np.floor(exact + 0.5 + _NEAR).astype(np.int64)
    if tolerance is not None:
        wrong = np.flatnonzero(np.abs(exact - offsets) > tolerance * fps)
        if len(wrong):
            told = f"offset {seconds[wrong[0]]:g} s is {exact[wrong[0]]:g} frames at {fps:g} a second"
            raise UsageError(told, hint=f"use multiples of 1/{fps:g} s, or another tolerance")
    offsets.setflags(write=False)
    return offsets


def _instants(counts: IntArray, steps: AnyArray, starts: AnyArray, videos: Videos) -> list[IntArray]:
    """Return the frames floor(start + k * step) of each video, at most its last one, int64 [count] each.

    If the frame rate varies, the frames that are shown at the same times in seconds.
    """
    instants = np.arange(counts.max()) * steps[:, None]
    frames = np.minimum(np.floor(starts[:, None] + instants + _NEAR), videos.num_frames[:, None] - 1).astype(np.int64)
    for row, times in videos.times.items():
        seconds = (starts[row] + instants[row] + _NEAR) / videos.fps[row]
        frames[row] = np.searchsorted(times, seconds, side="right") - 1
    return [clip[:count] for clip, count in zip(frames, counts.tolist(), strict=True)]


def _positive(name: str, value: float) -> float:
    if not hasattr(value, "__float__") or not 0 < value < math.inf:
        raise UsageError(f"{name} is {value!r}, expected a positive number")
    return float(value)
