"""How decoded pictures of a stream are changed to be shown as a player shows them, and at what time each is shown.

Everything else in fastvid means shown pictures: upright, with square pixels, cropped as the container says. Only
decoders see pictures as they are coded, and only the tables of a stream have their times.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import gcd
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from fastvid.runtime.arrays import FloatArray, IntArray
from fastvid.runtime.values import as_type

EARLY: Final = 1e-3
"""Seconds by which a frame may begin after a requested time and still be the one that is meant, at most half of its
duration: people and tables write times with two or three decimals."""

# Seconds per tick as numerator and denominator, before the compressed steps.
_TICK: Final = struct.Struct("<QQ")
# With ticks of at most this many seconds, times of a constant rate may be rounded by up to a tick; with longer ticks
# they are exact.
FINE: Final = Fraction(1, 1000)
_EXACT: Final = 1e-6  # ticks by which exact times may differ from a constant rate
# Seconds by which times and bounds that are meant to be equal may differ.
_EQUAL: Final = 1e-6


@dataclass(frozen=True, slots=True)
class Coded:
    """Decoded pictures that are not shown as they are: players crop, mirror, turn and then stretch them."""

    width: int  # of decoded pictures, in pixels
    height: int
    crop: tuple[int, int, int, int]  # the part that is shown: first row, first column, height and width
    turn: int = 0  # quarter turns clockwise, 0 to 3
    mirror: bool = False  # whether left and right are exchanged before the turn

    def check(self) -> None:
        """Raise ValueError for a crop that is not inside the decoded pictures, or an impossible turn."""
        y, x, height, width = self.crop
        if min(height, width) < 2 or y + height > self.height or x + width > self.width or self.turn > 3:
            raise ValueError(f"pictures of {self.width}x{self.height} are shown as {self}")

    def cut(self, shown: tuple[int, int], box: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
        """Return the box of decoded pictures that corresponds to a box of shown ones; its numbers are all even.

        Boxes are given as first row, first column, height and width. `shown`: height and width of the shown pictures.
        """
        top, left, height, width = self.crop
        upright = (width, height) if self.turn % 2 else (height, width)
        (y, h), (x, w) = (
            _scaled(start, size, whole, now)
            for start, size, whole, now in zip(box[:2], box[2:], shown, upright, strict=True)
        )
        if self.turn == 1:
            y, x, h, w = height - x - w, y, w, h
        elif self.turn == 2:
            y, x = height - y - h, width - x - w
        elif self.turn == 3:
            y, x, h, w = x, width - y - h, w, h
        if self.mirror:
            x = width - x - w
        return _even(top + y, h, self.height), _even(left + x, w, self.width), h, w

    def stretches(self, shown: tuple[int, int]) -> bool:
        """Return whether the crop is stretched to a height and width that are shown."""
        upright = self.crop[:1:-1] if self.turn % 2 else self.crop[2:]
        return any(whole & ~1 != now & ~1 for whole, now in zip(shown, upright, strict=True))

    @property
    def shown_part(self) -> tuple[int, int, int, int]:
        """The crop in pictures that are turned but not cropped: first row, first column, height and width."""
        y, x, height, width = self.crop
        if self.mirror:
            x = self.width - x - width
        below, right = self.height - y - height, self.width - x - width
        top, left = ((y, x), (x, below), (below, right), (right, y))[self.turn]
        return (top, left, width, height) if self.turn % 2 else (top, left, height, width)


def coded_of(record: Mapping[str, Any] | None) -> Coded | None:
    """Return a description of decoded pictures from its JSON; raise ValueError or TypeError if invalid."""
    if record is None:
        return None
    coded = as_type({"turn": None, "mirror": None} | dict(record), Coded)
    coded.check()
    return coded


def _scaled(start: int, size: int, whole: int, now: int) -> tuple[int, int]:
    """Scale an interval of a side of `whole` pixels to a side of `now` pixels; return its even start and size."""
    if whole & ~1 == now & ~1:
        return start, size
    begin, end = (2 * round(at * now / whole / 2) for at in (start, start + size))
    begin = min(begin, (now & ~1) - 2)
    return begin, max(min(end, now & ~1), begin + 2) - begin


def _even(start: int, size: int, whole: int) -> int:
    return max(0, min(start, whole - size)) & ~1


@dataclass(frozen=True, slots=True)
class Times:
    """The times of the frames of a stream whose frame rate varies, compressed."""

    data: bytes  # `_TICK`, then the compressed steps between frames in ticks
    num_frames: int  # at most so many times are unpacked, because a few bytes can expand to billions

    @classmethod
    def pack(cls, ticks: Sequence[int] | IntArray, tick: Fraction) -> Times:
        """Pack times in ticks of `tick` seconds, ascending; time 0 is the first frame."""
        steps = np.diff(np.asarray(ticks, np.int64)).astype("<i8")
        data = _TICK.pack(tick.numerator, tick.denominator) + zlib.compress(steps.tobytes())
        return cls(data, len(steps) + 1)

    @classmethod
    def of(cls, pts: IntArray, tick: Fraction, fps: Fraction) -> Times | None:
        """Return the times of frames at `pts` ticks; None if `fps` explains them within the rounding of their clock."""
        ticks = pts - pts[0]
        exact = np.arange(len(ticks)) * float(1 / (fps * tick))
        # Times may have been rounded to a longer tick before: all are multiples of it then, as in a remuxed file.
        rounding = gcd(np.gcd.reduce(ticks), FINE // tick) if tick <= FINE else _EXACT
        return None if (np.abs(ticks - exact) <= rounding).all() else cls.pack(ticks, tick)

    def check(self) -> None:
        """Raise ValueError unless there is one time per frame and they ascend."""
        seconds = self.seconds()
        if len(seconds) != self.num_frames or (np.diff(seconds) <= 0).any():
            raise ValueError(f"{len(seconds)} times, or not ascending, for {self.num_frames} frames")

    @property
    def tick(self) -> Fraction:
        """Seconds per tick."""
        return _unpacked(self)[0]

    def ticks(self) -> IntArray:
        """Return when each frame is shown, in ticks since the first frame, int64 [N], read-only."""
        return _unpacked(self)[1]

    def seconds(self) -> FloatArray:
        """Return when each frame is shown, in seconds since the first frame, float64 [N], read-only."""
        return _unpacked(self)[2]

    def frames_at(self, seconds: FloatArray, nominal: float) -> IntArray:
        """Return the frames shown at given times, int64 [T]; see `StreamInfo.frames_at`.

        `nominal`: mean duration of a frame in seconds.
        """
        times = self.seconds()
        # Also at most half of the previous frame's duration, so that the exact time of that frame still means it.
        before = np.append(nominal, np.diff(times)) / 2
        begins = times - np.minimum(np.minimum(EARLY, before), half_durations(times, nominal))
        return np.clip(np.searchsorted(begins, seconds, side="right") - 1, 0, len(times) - 1).astype(np.int64)


def usual_step(steps: npt.NDArray[Any], otherwise: Any) -> Any:
    """Return the median of frame durations, always one of them; `otherwise` if there are none."""
    return np.sort(steps)[(len(steps) - 1) // 2].item() if len(steps) else otherwise


def frame_bounds(seconds: FloatArray, nominal: float) -> FloatArray:
    """Return when each frame begins, and when the last one ends, in seconds, float64 [N + 1].

    The last frame is given the usual duration, see `usual_step`. `seconds`: presentation times of the shown frames,
    increasing. `nominal`: duration of a frame that is the only one of its video.
    """
    return np.append(seconds, seconds[-1] + usual_step(np.diff(seconds), nominal))


def half_durations(seconds: FloatArray, nominal: float) -> FloatArray:
    """Return half of each frame's duration, or of the usual duration if that is less, in seconds, float64 [N].

    For the arguments see `frame_bounds`.
    """
    lasts = np.diff(frame_bounds(seconds, nominal))
    halves: FloatArray = np.minimum(lasts, lasts[-1]) / 2
    return halves


def clip_range(seconds: FloatArray, nominal: float, start: float | None, end: float | None) -> tuple[int, int]:
    """Return the first frame of the clip from `start` until before `end` seconds, and the frame after its last.

    Annotations are rounded, so both ends go to the nearest frame: a clip begins at the first frame that is shown at
    `start` - h or later, and ends before the first frame at `end` - h or later, where h is the frame's entry in
    `half_durations`. For the other arguments see `frame_bounds`.
    """
    nearest = seconds + half_durations(seconds, nominal) + _EQUAL
    first = 0 if start is None else int(np.searchsorted(nearest, start))
    return first, len(seconds) if end is None else int(np.searchsorted(nearest, end))


# Cached: several clips of a video often follow each other.
@lru_cache(maxsize=1024)
def _unpacked(times: Times) -> tuple[Fraction, IntArray, FloatArray]:
    """Return the seconds per tick of packed times, the times in ticks, int64 [N], and in seconds, float64 [N]."""
    try:
        numerator, denominator = _TICK.unpack_from(times.data)
        # One byte more than there should be is unpacked, so that too many steps are noticed.
        packed = zlib.decompressobj().decompress(times.data[_TICK.size :], 8 * (times.num_frames - 1) + 1)
        steps = np.frombuffer(packed, "<i8")
    except (struct.error, zlib.error, ValueError) as error:
        raise ValueError(f"its times cannot be read: {error}") from error
    if not denominator or not numerator:
        raise ValueError("its times have no clock")
    ticks = np.concatenate([np.zeros(1, np.int64), np.cumsum(steps)])
    seconds: FloatArray = ticks * numerator / denominator
    for array in (ticks, seconds):
        array.setflags(write=False)
    return Fraction(numerator, denominator), ticks, seconds
