"""Frame samplers: they choose the frames of a clip from facts about its video, known before anything is read, and from
random numbers.

A sampler is a frozen dataclass with `draw(video, draws)`, which returns the frames of a clip. Its repr is part of a
loader's fingerprint.
"""

from __future__ import annotations

import reprlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Final, Literal, Protocol, Self, cast, get_args

import numpy as np
import numpy.typing as npt

from fastvid.errors import FastvidError, UsageError
from fastvid.load.order.draws import BatchDraws, Draws, Purpose
from fastvid.runtime.arrays import FloatArray, IntArray
from fastvid.runtime.values import check_choice, check_integer, check_switches

NO_ANNOTATIONS: Final[Mapping[str, Any]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class VideoInfo:
    """What is known about a video before it is read.

    Attributes:
        num_frames: Number of frames F, at least 1.
        fps: Frames per second: the double nearest to the exact rate, as in the annotations.
        width: Width of the stored frames in pixels.
        height: Height of the stored frames in pixels.
        key: The sample's key.
        annotations: The sample's row of the annotations by column; a column is read when it is first used.
        anchor: Frame from which offsets are counted, in an item of `EveryFrame`; None if the sampler chooses it.
        times: When each frame is shown, in seconds since the first, float64 [F]; None if frame f is shown at f / fps.
    """

    num_frames: int
    fps: float
    width: int
    height: int
    key: str = ""
    annotations: Mapping[str, Any] = field(default_factory=lambda: NO_ANNOTATIONS, compare=False, repr=False)
    anchor: int | None = None
    times: FloatArray | None = field(default=None, compare=False, repr=False)

    @property
    def duration(self) -> float:
        """Duration in seconds, num_frames / fps, as in the annotations."""
        return self.num_frames / self.fps


@dataclass(frozen=True, slots=True, eq=False)
class Videos:
    """What is known about the videos of several clips, and the random numbers of the clips."""

    num_frames: IntArray  # frames of each video, int64 [N]
    fps: FloatArray  # its frames per second, float64 [N]
    draws: BatchDraws
    anchors: IntArray | None = None  # frame from which offsets are counted, int64 [N]; None if the sampler chooses it
    # when each frame is shown, in seconds, float64 [F], by the index of the video; only if the frame rate varies
    times: Mapping[int, FloatArray] = field(default_factory=dict)

    @classmethod
    def of(cls, video: VideoInfo, draws: BatchDraws, count: int = 1) -> Videos:
        """Return the same video `count` times."""
        anchors = None if video.anchor is None else np.full(count, video.anchor)
        times = {} if video.times is None else dict.fromkeys(range(count), video.times)
        return cls(np.full(count, video.num_frames), np.full(count, video.fps), draws, anchors, times)


Clips = IntArray | Sequence[IntArray]
"""Frame indices of several clips, int64 [N, T], or [T] each if their lengths differ."""

Short = Literal["loop", "clamp"]


class Sampler(Protocol):
    """Protocol of a frame sampler. `draw` is all that it must have.

    A sampler whose clips all have the same length should have a property ``num_frames: int``; without it, or if it is
    None, the length may be different for each video. Batches that are planned from the clips' lengths also need
    ``count(num_frames, fps)``, see `clip_lengths`, and buckets ``of_length(T)``, see `with_length`.
    """

    def draw(self, video: VideoInfo, draws: Draws, /) -> npt.ArrayLike:
        """Return the frame indices of a clip: [T], T >= 1, each 0 <= i < video.num_frames, in any order.

        A list, a tensor or an array of any integer type is accepted.
        """
        ...


class BatchSampler(ABC):
    """Base of fastvid's samplers: computes all clips of a batch at once, without the checks of a user's `draw`."""

    def draw(self, video: VideoInfo, draws: Draws, /) -> IntArray:
        """Return the frame indices of a clip, int64 [T]."""
        numbers = BatchDraws(draws.seed, draws.epoch, np.array([draws.position]))
        frames: IntArray = self.draw_all(Videos.of(video, numbers))[0]
        return frames

    @abstractmethod
    def draw_all(self, videos: Videos) -> Clips:
        """Return the frame indices of each clip."""


def is_own(sampler: object) -> bool:
    """Return whether a sampler's clips come from `draw_all`: False if a user's subclass overrides `draw`."""
    return isinstance(sampler, BatchSampler) and type(sampler).draw is BatchSampler.draw


def clip_length(sampler: Sampler) -> int | None:
    """Return the number of frames of every clip; None if it depends on the video."""
    length: int | None = getattr(sampler, "num_frames", None)
    return length


def clip_lengths(sampler: Sampler, num_frames: IntArray, fps: FloatArray) -> IntArray:
    """Return the number of frames of the clip that a sampler makes of each video, int64 [N].

    `num_frames`: frames of each video, int64 [N]. `fps`: frames per second of each video, float64 [N].
    """
    length = clip_length(sampler)
    if length is not None:
        return np.full(len(num_frames), length, dtype=np.int64)
    count = getattr(sampler, "count", None)
    if count is None:
        hint = "add count(num_frames, fps): int64 [N] and float64 [N] to int64 [N]"
        raise UsageError(f"sampler {sampler!r} does not say how many frames it makes of a video", hint=hint)
    made = np.asarray(_called(sampler, lambda: count(num_frames, fps)))
    if made.dtype.kind not in "iu" or made.shape != num_frames.shape or (made < 1).any():
        raise UsageError(
            f"sampler {sampler!r} counts {made.dtype} {list(made.shape)}, expected positive integers"
            f" [{len(num_frames)}]: {reprlib.repr(made.tolist())}",
            hint="return the number of frames of each clip from count(num_frames, fps)",
        )
    return made.astype(np.int64, copy=False)


def with_length(sampler: Sampler, length: int) -> Sampler:
    """Return the sampler making clips of `length` frames."""
    if clip_length(sampler) == length:
        return sampler
    of_length = getattr(sampler, "of_length", None)
    if of_length is None:
        hint = "add of_length(T), or use another shape"
        raise UsageError(f"sampler {sampler!r} cannot make clips of {length} frames", hint=hint)
    return cast(Sampler, of_length(length))


def draw_frames(sampler: Sampler, video: VideoInfo, draw: Callable[[], Any]) -> list[IntArray]:
    """Call `draw` and return its clips, each int64 [T], after checking that they are frames of the video."""
    return [_checked(sampler, clip, video) for clip in _called(sampler, draw, key=video.key or None)]


def _called(sampler: Sampler, call: Callable[[], Any], **where: object) -> Any:
    try:
        return call()
    except FastvidError:
        raise
    except Exception as error:
        told = f"sampler {sampler!r} failed with {type(error).__name__}: {error}"
        raise UsageError(told, hint="correct its code; the original error is above", **where) from error


def _checked(sampler: Sampler, frames: npt.ArrayLike, video: VideoInfo) -> IntArray:
    length, where = clip_length(sampler), {"key": video.key or None}
    number = "at least one integer" if length is None else f"integers [{length}]"
    expected = f"expected {number} from 0 to {video.num_frames - 1}"
    try:
        found = np.asarray(frames)
    except (TypeError, ValueError) as error:
        hint = "return a list, an array or a tensor on the CPU"
        told = f"sampler {sampler!r} returned {reprlib.repr(frames)}, {expected}: {error}"
        raise UsageError(told, hint=hint, **where) from error
    right = found.ndim == 1 and (len(found) > 0 if length is None else len(found) == length)
    if found.dtype.kind not in "iu" or not right:
        told = f"{found.dtype} {list(found.shape)}, {expected}: {reprlib.repr(found.tolist())}"
        hint = "return one frame index for each frame of the clip"
        raise UsageError(f"sampler {sampler!r} returned {told}", hint=hint, **where)
    outside = found[(found < 0) | (found >= video.num_frames)]
    if len(outside):
        told = f"sampler {sampler!r} returned frame {outside[0]}, {expected}"
        raise UsageError(told, hint="keep indices inside the video", **where)
    indices: IntArray = found.astype(np.int64, copy=False)
    return indices


def check_counts(owner: object, *names: str) -> None:
    """Check that fields of a frozen dataclass are integers of at least 1, and make them ints; a default None passes."""
    for name in names:
        if getattr(owner, name) is not None or getattr(type(owner), name, 0) is not None:
            object.__setattr__(owner, name, check_integer(name, getattr(owner, name), 1))


def refuse_length(sampler: Sampler, length: int, reason: str, hint: str) -> UsageError:
    """Return the error for a length that a sampler cannot make."""
    return UsageError(f"{sampler!r} cannot make clips of {length} frames: {reason}", hint=hint)


@dataclass(frozen=True)
class Segments(BatchSampler):
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
        check_counts(self, "num_segments", "length")
        check_switches(jitter=self.jitter)

    @property
    def num_frames(self) -> int:
        """Frames of a clip."""
        return self.num_segments * self.length

    def of_length(self, length: int) -> Self:
        """Return the same sampler making `length` frames.

        Raises:
            UsageError: If `length` is not a multiple of the frames taken at each place.
        """
        if length % self.length:
            raise refuse_length(self, length, f"each segment has {self.length}", f"use a multiple of {self.length}")
        return replace(self, num_segments=length // self.length)

    def draw_all(self, videos: Videos) -> IntArray:
        """See `BatchSampler`; the frames of a segment are neighbours in the clip."""
        num_frames, segments = videos.num_frames, self.num_segments
        if not self.jitter:
            return self._at(num_frames, 0.5)
        places = np.maximum(1, num_frames - self.length + 1)
        steps = places // segments
        drawn = videos.draws.integers(Purpose.FRAMES, np.where(steps > 0, steps, places), segments)
        spaced = np.arange(segments) * steps[:, None] + drawn
        few = np.where(num_frames[:, None] > segments, np.sort(drawn, axis=1), 0)
        return self._consecutive(np.where(steps[:, None] > 0, spaced, few), num_frames)

    def spread(self, video: VideoInfo, num_clips: int) -> IntArray:
        """Return the frame indices of several clips, int64 [num_clips, T*L]: clip c is at (c + 1/2) / num_clips of each
        segment, so that a single clip equals `draw` without jitter."""
        return np.stack([self.at(video, (2 * clip + 1) / (2 * num_clips)) for clip in range(num_clips)])

    def at(self, video: VideoInfo, place: float) -> IntArray:
        """Return the frame indices at `place` of each segment, int64 [T*L]; 0 <= place < 1, and 1/2 is the middle."""
        frames: IntArray = self._at(np.array([video.num_frames]), place)[0]
        return frames

    def _at(self, num_frames: IntArray, place: float) -> IntArray:
        tick = np.maximum(1, num_frames - self.length + 1)[:, None] / self.num_segments
        return self._consecutive((tick * place + tick * np.arange(self.num_segments)).astype(np.int64), num_frames)

    def _consecutive(self, starts: IntArray, num_frames: IntArray) -> IntArray:
        if self.length == 1:
            return starts
        frames: IntArray = np.minimum(starts[..., None] + np.arange(self.length), num_frames[:, None, None] - 1)
        return frames.reshape(len(starts), -1)


@dataclass(frozen=True)
class Dense(BatchSampler):
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
        check_counts(self, "num_frames", "stride")
        check_switches(jitter=self.jitter)
        check_choice("short", self.short, get_args(Short))

    def of_length(self, length: int) -> Self:
        """Return the same sampler making `length` frames, at the same stride."""
        return replace(self, num_frames=length)

    def draw_all(self, videos: Videos) -> IntArray:
        """See `BatchSampler`."""
        spare = self._spare(videos.num_frames)
        starts = videos.draws.integers(Purpose.FRAMES, spare + 1, 1)[:, 0] if self.jitter else spare // 2
        return self._from(starts, videos.num_frames)

    def spread(self, video: VideoInfo, num_clips: int) -> IntArray:
        """Return the frame indices of several clips, int64 [num_clips, T]: starts are evenly spaced from the first
        place where a clip fits to the last, inclusive; a single clip starts in the middle."""
        num_frames = np.full(num_clips, video.num_frames)
        return self._from(spread_over(self._spare(num_frames)), num_frames)

    def _spare(self, num_frames: IntArray) -> IntArray:
        return np.maximum(0, num_frames - ((self.num_frames - 1) * self.stride + 1))

    def _from(self, starts: IntArray, num_frames: IntArray) -> IntArray:
        frames = starts[:, None] + np.arange(self.num_frames, dtype=np.int64) * self.stride
        return frames % num_frames[:, None] if self.short == "loop" else np.minimum(frames, num_frames[:, None] - 1)


def spread_over(spare: IntArray) -> IntArray:
    """Return evenly spaced starts from 0 to `spare`, both int64 [num_clips]; a single start is in the middle."""
    count = len(spare)
    return spare * np.arange(count) // (count - 1) if count > 1 else spare // 2


def evenly(count: int, num_frames: IntArray) -> IntArray:
    """Return `count` frame indices of each video from its first frame to the last, int64 [N, count]: i*(F-1)/(count-1),
    rounded half up; the middle frame if the count is 1."""
    steps, last = count - 1, num_frames[:, None] - 1
    if not steps:
        return last // 2
    return (2 * np.arange(count, dtype=np.int64) * last + steps) // (2 * steps)


@dataclass(frozen=True)
class Uniform(BatchSampler):
    """Frames evenly spaced from the first to the last, inclusive; the same in every epoch.

    Frame i is i*(F-1)/(T-1), rounded half up; with T = 1 it is the middle frame. If F < T, frames are repeated.

    Args:
        num_frames: T >= 1.

    Raises:
        UsageError: If the argument is out of range.
    """

    num_frames: int

    def __post_init__(self) -> None:
        check_counts(self, "num_frames")

    def of_length(self, length: int) -> Self:
        """Return the same sampler making `length` frames."""
        return replace(self, num_frames=length)

    def draw_all(self, videos: Videos) -> IntArray:
        """See `BatchSampler`; frames are ascending."""
        return evenly(self.num_frames, videos.num_frames)
