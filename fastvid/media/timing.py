"""At which constant rate a source is written, from the timestamps of its packets.

Shards hold constant frame rates only. What that means for a source is decided here, in this order:

- *constant*: every frame lies on a regular grid, within half a step. Frames keep their number and order, one to one;
  their rounded timestamps are dropped.
- *gaps*: frames lie on a grid with holes, and filling the holes at most doubles their number. Frames before a hole are
  repeated; no frame is lost.
- *variable*: no grid fits. The average rate is kept: as many frames as before, each at the grid point nearest in time.
- *counted*: there are no timestamps, or a jump in them cannot be real. Frames keep their number at the nominal rate.

Rates above 60 are divided by the smallest whole number that brings them to 60 or less.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import ceil
from typing import Final

import numpy as np

MAX_RATE: Final = 60

STANDARD: Final = tuple(
    Fraction(numerator, denominator)
    for numerator, denominator in (
        (5, 1), (6, 1), (8, 1), (10, 1), (12, 1), (25, 2), (15000, 1001), (15, 1), (16, 1), (20, 1), (24000, 1001),
        (24, 1), (25, 1), (30000, 1001), (30, 1), (48, 1), (50, 1), (60000, 1001), (60, 1), (100, 1), (120, 1),
        (240, 1),
    )
)  # fmt: skip
"""Rates that devices and editors write."""

# Header rates are rounded to a few digits (29.97 for 30000/1001 is 33 ppm off); neighbours such as 24 and 24000/1001
# are 1000 ppm apart.
_SNAP: Final = Fraction(1, 2000)
# Three frames at 60 a second, timed in milliseconds, measure as 60.6.
_NEAR: Final = Fraction(3, 100)
_FALLBACK: Final = Fraction(25)  # what FFmpeg assumes for raw streams
# Matroska and FLV count milliseconds, and FFmpeg then offers 1000 as a rate. Faster cameras are found by measuring.
_MOST_CLAIMED: Final = 300
_MOST_ADDED: Final = 2  # frames after filling holes, over frames before
# A pause longer than this, and this many usual steps long, is a broken clock; FFmpeg's own limit for a jump is 10 s.
_JUMP_SECONDS: Final = 10
_JUMP_STEPS: Final = 50


@dataclass(frozen=True, slots=True)
class Timing:
    """How frames become a constant-rate stream.

    Attributes:
        kind: "constant", "gaps", "variable" or "counted".
        rate: Frames a second that are written, exact, at most 60.
        input_rate: Rate that replaces the source's timestamps; None where they are used.
        frames: Frames that come out if `shown` go in; exact when `input_rate` is set, within two otherwise.
        shown: Frames the source shows.
    """

    kind: str
    rate: Fraction
    input_rate: Fraction | None
    frames: int
    shown: int


def choose_timing(
    pts: Sequence[int | None], time_base: Fraction, nominal: Sequence[Fraction | None], shown: int
) -> Timing:
    """Chooses the constant rate of a source.

    Args:
        pts: Presentation times of the packets that show a frame, in ticks, any order; None where missing.
        time_base: Seconds per tick.
        nominal: Rates that the container claims, best first.
        shown: Frames that the source shows; `pts` may hold one or two more in streams with placeholder packets.
    """
    rates = [_snap(rate) for rate in nominal if rate is not None and 0 < rate <= _MOST_CLAIMED]
    times = np.sort(np.asarray([t for t in pts if t is not None], dtype=np.int64))
    if len(times) < 2 or len(times) < len(pts) or times[-1] == times[0]:
        return _forced("counted", rates[0] if rates else _FALLBACK, shown)
    steps = np.diff(times)
    usual = int(np.median(steps))
    jump = max(_JUMP_SECONDS / float(time_base), _JUMP_STEPS * usual)
    if usual and steps.max() > jump:
        return _forced("counted", _snap(1 / (usual * time_base)), shown)
    average = _snap(Fraction(len(times) - 1) / (int(times[-1] - times[0]) * time_base))
    candidates = list(dict.fromkeys([*rates, *_standard_near(average), average]))
    grids = [(rate, *_grid(times, time_base, rate)) for rate in candidates]
    for _, rate, index in grids:
        if len(index) == len(times) and (index == np.arange(len(times))).all():
            return _forced("constant", rate, shown)
    for _, rate, index in grids:
        holes_only = (np.diff(index) > 0).all() and np.bincount(np.diff(index)).argmax() == 1
        if holes_only and index[-1] + 1 <= _MOST_ADDED * len(times):
            return _resampled("gaps", rate, int(index[-1]) + 1, shown)
    return _resampled("variable", average, len(times), shown)


def _grid(
    times: np.ndarray[tuple[int], np.dtype[np.int64]], time_base: Fraction, rate: Fraction
) -> tuple[Fraction, np.ndarray[tuple[int], np.dtype[np.int64]]]:
    """Nearest grid point of each time, on the coarsest grid that divides `rate` and still tells the frames apart."""
    per_tick = float(time_base * rate)
    index = np.rint((times - times[0]) * per_tick).astype(np.int64)
    # Containers that count milliseconds claim 1000 a second, and fields count double: take out the common stride.
    stride = int(np.gcd.reduce(np.diff(index)))
    return (rate / stride, index // stride) if stride > 1 else (rate, index)


def _forced(kind: str, rate: Fraction, shown: int) -> Timing:
    divisor = max(1, ceil(rate / MAX_RATE))
    return Timing(kind, rate / divisor, rate, ceil(shown / divisor), shown)


def _resampled(kind: str, rate: Fraction, frames: int, shown: int) -> Timing:
    divisor = max(1, ceil(rate / MAX_RATE))
    return Timing(kind, rate / divisor, None, ceil(frames / divisor), shown)


# Rates of a collection are few, and arithmetic of fractions with all standards takes as long as a small file's probing.
@lru_cache(maxsize=1024)
def _standard_near(rate: Fraction) -> tuple[Fraction, ...]:
    """Standard rates that a short video with a coarse clock may mean, nearest first."""
    near = [standard for standard in STANDARD if abs(standard - rate) <= rate * _NEAR]
    return tuple(sorted(near, key=lambda standard: abs(standard - rate)))


@lru_cache(maxsize=1024)
def _snap(rate: Fraction) -> Fraction:
    if rate in STANDARD:
        return rate
    nearest = min(STANDARD, key=lambda standard: abs(standard - rate))
    if abs(nearest - rate) <= rate * _SNAP:
        return nearest
    # MP4 time scales must hold numerator times 512 or so; four digits are finer than any clock here.
    return rate.limit_denominator(1001)
