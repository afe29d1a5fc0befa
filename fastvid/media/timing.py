"""Determines from a source's packets, before it is encoded, its frame rate and where decoding can begin.

Profiles write constant frame rates only. The rate is chosen from the timestamps of the packets.
The first of these cases that applies decides:

- *constant*: every frame is within half a step of a regular grid. Frames keep their number and order, one to one; their
  rounded timestamps are discarded.
- *gaps*: frames are on a grid with holes, and filling the holes at most doubles their number. The frame before a hole
  is repeated; no frame is lost.
- *variable*: no grid fits. The average rate is kept: as many frames as before, each at the nearest grid point in time.
- *counted*: there are no timestamps, or they jump implausibly. Frames keep their number at the nominal rate.

Rates above 60 are divided by the smallest integer that makes them 60 or less.

`RandomAccess` finds the packets at which decoding can begin with the same result as from the start. A container's key
flag does not guarantee that: it also marks open groups of pictures and recovery points. The packet's own header
does. At an IDR picture (H.264, H.265) or a key frame of VP9 a decoder discards all references and
derived state, so the frames from there on depend only on packets from there on and on the parameter sets. So the
parameter sets must not change inside the stream, and every packet that the container marks must be such a picture,
unless it is damaged.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from math import ceil
from typing import Any, Final

import numpy as np

from fastvid.errors import FormatError, SourceError
from fastvid.format.bitstream import begins_afresh, changes_parameters, nal_length_size
from fastvid.format.presentation import clip_range, frame_bounds
from fastvid.format.schema import Codec
from fastvid.media.reasons import Reason
from fastvid.runtime.arrays import FloatArray, IntArray

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
FALLBACK: Final = Fraction(25)  # FFmpeg's assumption for raw streams
# Ignore higher nominal rates: Matroska and FLV count milliseconds, for which FFmpeg reports a rate of 1000. The rate of
# a faster camera is measured.
MOST_CLAIMED: Final = 300
# Fraction of the frames that may have the same time as the frame before; more mean a broken clock.
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
    rates = [snapped for rate in nominal if rate is not None and 0 < rate <= MOST_CLAIMED and (snapped := _snap(rate))]
    times = np.sort(np.asarray([t for t in pts if t is not None], dtype=np.int64))
    steps = np.diff(times)
    is_unknown = len(times) < 2 or len(times) < len(pts) or times[-1] == times[0]
    if is_unknown or np.count_nonzero(steps == 0) > len(steps) * _MOST_EQUAL:
        return _forced("counted", rates[0] if rates else FALLBACK, shown)
    usual = int(np.median(steps))
    jump = max(_JUMP_SECONDS / float(time_base), _JUMP_STEPS * usual)
    if usual and steps.max() > jump:
        return _forced("counted", _snap(1 / (usual * time_base)) or FALLBACK, shown)
    average = _snap(Fraction(len(times) - 1) / (int(times[-1] - times[0]) * time_base))
    if not average:
        # Less than one frame in a quarter of an hour is a broken clock, too.
        return _forced("counted", rates[0] if rates else FALLBACK, shown)
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
    """Return the rate of the coarsest regular grid on which the frames stay distinct, and the grid point of each.

    `times`: in ticks. `time_base`: seconds per tick. `rate`: of the finest grid, which the returned rate divides.
    """
    per_tick = float(time_base * rate)
    index = np.rint((times - times[0]) * per_tick).astype(np.int64)
    # Divide by the common stride: a nominal rate may count milliseconds (1000 per second) or fields (twice the rate).
    stride = int(np.gcd.reduce(np.diff(index)))
    return (rate / stride, index // stride) if stride > 1 else (rate, index)


def _forced(kind: str, rate: Fraction, shown: int) -> FrameTiming:
    return replace(_resampled(kind, rate, shown, shown), input_rate=rate)


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


def clip_frames(seconds: FloatArray, nominal: float, start: float | None, end: float | None) -> tuple[int, int]:
    """Return the frames of a clip of a source, see `clip_range`; raise a SourceError if there are none."""
    first, stop = clip_range(seconds, nominal, start, end)
    if first >= stop:
        clip = f"{start or 0:g} s to {'the end' if end is None else f'{end:g} s'}"
        length = frame_bounds(seconds, nominal)[-1]
        raise SourceError(f"the clip {clip} is not in {length:.2f} s of video", reason=Reason.OUT_OF_RANGE)
    return first, stop


# Containers whose packets have reliable presentation times and an index by them. Not MPEG-TS and -PS, whose demuxers
# guess positions, nor AVI, which stores no presentation times.
_CONTAINERS: Final = frozenset({"mov", "matroska"})
# x264 writes its version into the first packet. Decoders work around bugs of versions before 151 if they have seen it.
_X264: Final = re.compile(rb"x264 - core (\d+)")
_FIXED_X264: Final = 151


class RandomAccess:
    """Collects the packets of a stream, in decode order."""

    def __init__(self, container: str, codec: str, extradata: bytes) -> None:
        known = next((one for one in (Codec.H264, Codec.HEVC, Codec.VP9) if one.label == codec), None)
        is_split = known in (None, Codec.VP9) or nal_length_size(known, extradata) is not None
        # None if decoding must begin at the first packet.
        self._codec = known if container in _CONTAINERS and is_split else None
        self._extradata = extradata
        self._keys: list[int] = []
        self._first = True
        self.old_x264 = False

    def add(self, packet: Any) -> bool:
        """Take a packet of PyAV; return False if it is damaged, so that its parts cannot be told apart."""
        if self._codec is None:
            return True
        data = memoryview(packet)
        if self._first:
            self._first, found = False, _X264.search(data)
            # Its workarounds concern 4:4:4, and streams of 2006.
            self.old_x264 = found is not None and int(found[1]) < _FIXED_X264
        try:
            is_usable = not changes_parameters(self._codec, self._extradata, data)
            if is_usable and packet.is_keyframe:
                is_usable = packet.pts is not None and begins_afresh(self._codec, self._extradata, data)
                self._keys.append(packet.pts)
        except (FormatError, IndexError):
            # Decoding cannot begin here. What begins at a later packet need not fail with this one.
            return False
        if not is_usable:
            self._codec = None
        return True

    def keys(self, times: IntArray, shown: int) -> IntArray:
        """Return the times of the packets at which decoding can begin, in ticks, ascending; empty if unproven.

        `times`: presentation times of the shown frames, ascending. `shown`: number of shown frames.
        """
        distinct = len(times) == shown and bool((np.diff(times) > 0).all())
        if self._codec is None or not distinct or any(b <= a for a, b in zip(self._keys, self._keys[1:], strict=False)):
            return np.zeros(0, np.int64)
        return np.asarray(self._keys, np.int64)


COLOUR: Final = {"colorspace": "smpte170m", "color_primaries": "smpte170m", "color_trc": "smpte170m"}
"""The colour tags that profiles write, BT.601: options of an ffmpeg output and of the filter setparams."""


def tagged(full_range: bool) -> str:
    """Return the ffmpeg filter that tags pictures with COLOUR and their range.

    The pictures themselves must be tagged: the encoders of ffmpeg 9 write the pictures' tags and ignore options.
    """
    return f"setparams={pairs({'range': 'full' if full_range else 'limited', **COLOUR})}"


def pairs(values: Mapping[str, object]) -> str:
    """Join options in ffmpeg's syntax: ``name=value`` separated by colons."""
    return ":".join(f"{name}={value}" for name, value in values.items())
