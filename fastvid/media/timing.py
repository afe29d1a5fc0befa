"""Choose the constant frame rate to write a source at, from the timestamps of its packets.

Shards contain constant frame rates only. The first of these cases that applies decides:

- *constant*: every frame is within half a step of a regular grid. Frames keep their number and order, one to one; their
  rounded timestamps are discarded.
- *gaps*: frames are on a grid with holes, and filling the holes at most doubles their number. The frame before a hole
  is repeated; no frame is lost.
- *variable*: no grid fits. The average rate is kept: as many frames as before, each at the nearest grid point in time.
- *counted*: there are no timestamps, or they jump implausibly. Frames keep their number at the nominal rate.

Rates above 60 are divided by the smallest integer that makes them 60 or less.
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
"""Rates of common devices and editors."""

# Relative tolerance to snap to a standard rate: header rates are rounded to a few digits (29.97 for 30000/1001 is
# 33 ppm off), and neighbours such as 24 and 24000/1001 are 1000 ppm apart.
_SNAP: Final = Fraction(1, 2000)
# Relative tolerance for short videos: three frames at 60 per second, timed in milliseconds, measure as 60.6.
_NEAR: Final = Fraction(3, 100)
_FALLBACK: Final = Fraction(25)  # FFmpeg's assumption for raw streams
# Ignore higher nominal rates: Matroska and FLV count milliseconds, for which FFmpeg reports a rate of 1000. The rate of
# a faster camera is measured.
_MOST_CLAIMED: Final = 300
# Part of the frames that may have the time of the one before; more are a broken clock.
_MOST_EQUAL: Final = 0.1
_MOST_ADDED: Final = 2  # maximum ratio of frames after filling holes to frames before
# A pause longer than both limits means a broken clock; FFmpeg's own limit for a jump is 10 s.
_JUMP_SECONDS: Final = 10
_JUMP_STEPS: Final = 50


@dataclass(frozen=True, slots=True)
class FrameTiming:
    """How to convert a source's frames to a constant rate."""

    kind: str
    rate: Fraction  # frames per second to write, exact, at most 60
    input_rate: Fraction | None
    frames: int  # frames written for `shown` frames; exact if `input_rate` is set, else within two
    shown: int  # frames that the source shows


def choose_timing(
    pts: Sequence[int | None], time_base: Fraction, nominal: Sequence[Fraction | None], shown: int
) -> FrameTiming:
    """Choose the constant rate of a source.

    `time_base`: seconds per tick. `shown`: frames that the source shows; `pts` may have one or two more in streams
    with placeholder packets.
    """
    rates = [snapped for rate in nominal if rate is not None and 0 < rate <= _MOST_CLAIMED and (snapped := _snap(rate))]
    times = np.sort(np.asarray([t for t in pts if t is not None], dtype=np.int64))
    if len(times) < 2 or len(times) < len(pts) or times[-1] == times[0]:
        return _forced("counted", rates[0] if rates else _FALLBACK, shown)
    steps = np.diff(times)
    if np.count_nonzero(steps == 0) > len(steps) * _MOST_EQUAL:
        return _forced("counted", rates[0] if rates else _FALLBACK, shown)
    usual = int(np.median(steps))
    jump = max(_JUMP_SECONDS / float(time_base), _JUMP_STEPS * usual)
    if usual and steps.max() > jump:
        return _forced("counted", _snap(1 / (usual * time_base)) or _FALLBACK, shown)
    average = _snap(Fraction(len(times) - 1) / (int(times[-1] - times[0]) * time_base))
    if not average:
        # Less than one frame in a quarter of an hour is a broken clock, too.
        return _forced("counted", rates[0] if rates else _FALLBACK, shown)
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
    """Return the rate of the coarsest grid of `rate` that separates the frames, and their grid points."""
    per_tick = float(time_base * rate)
    index = np.rint((times - times[0]) * per_tick).astype(np.int64)
    # Divide by the common stride: a nominal rate may count milliseconds (1000 per second) or fields (twice the rate).
    stride = int(np.gcd.reduce(np.diff(index)))
    return (rate / stride, index // stride) if stride > 1 else (rate, index)


def _forced(kind: str, rate: Fraction, shown: int) -> FrameTiming:
    divisor = max(1, ceil(rate / MAX_RATE))
    return FrameTiming(kind, rate / divisor, rate, ceil(shown / divisor), shown)


def _resampled(kind: str, rate: Fraction, frames: int, shown: int) -> FrameTiming:
    divisor = max(1, ceil(rate / MAX_RATE))
    return FrameTiming(kind, rate / divisor, None, ceil(frames / divisor), shown)


# Cached: a collection has few rates, and comparing fractions with all standard rates takes as long as a small probe.
@lru_cache(maxsize=1024)
def _standard_near(rate: Fraction) -> tuple[Fraction, ...]:
    """Return the standard rates within the tolerance for short videos with a coarse clock, nearest first."""
    near = [standard for standard in STANDARD if abs(standard - rate) <= rate * _NEAR]
    return tuple(sorted(near, key=lambda standard: abs(standard - rate)))


@lru_cache(maxsize=1024)
def _snap(rate: Fraction) -> Fraction:
    if rate in STANDARD:
        return rate
    nearest = min(STANDARD, key=lambda standard: abs(standard - rate))
    if abs(nearest - rate) <= rate * _SNAP:
        return nearest
    # An MP4 time scale must fit about 512 times the numerator; four digits are finer than any clock here.
    return rate.limit_denominator(1001)
