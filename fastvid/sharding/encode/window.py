"""Choose what ffmpeg decodes for some frames of a source: from the first packet, or from a key frame before them.

The frames that are written, and so their bytes, are the same either way: filters select frames by their times, never
by counting from where decoding began.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from fastvid.media.probe import SourceInfo
from fastvid.runtime.arrays import FloatArray
from fastvid.sharding.encode.profile import Profile, written_timing

# FFmpeg seeks this much earlier in formats that it seeks by decode times (3 / 23 s, ffmpeg's ffmpeg_demux.c).
_SEEK_MARGIN_SECONDS: Final = 3 / 23
# Frames next to a part that resampling may read.
_RESAMPLED_MARGIN: Final = 2
# What starting ffmpeg once more costs, in pixels decoded: 0.1 s at 250 megapixels per second on a slow core.
_START_PIXELS: Final = 25_000_000
# Encoders that run at the same time in one pass: each keeps tens of frames.
_MOST_PARTS: Final = 16

Part = tuple[int, int]


@dataclass(frozen=True, slots=True)
class DecodeWindow:
    """The part of a source that one run of ffmpeg decodes."""

    first: int
    last: int
    key: int
    seek: float | None  # where ffmpeg must seek, in seconds of the container's clock; None to begin at the first packet
    trims: bool  # whether frames outside `first` to `last` can be dropped before they are filtered

    def from_start(self) -> DecodeWindow:
        """Return the same window, decoded from the first packet."""
        return DecodeWindow(self.first, self.last, 0, None, self.trims)


def plan_window(info: SourceInfo, profile: Profile, parts: Sequence[Part | None]) -> DecodeWindow:
    """Return what ffmpeg must decode for parts of a source.

    `parts`: frames at the rate that is written, half-open; None for all.
    """
    shown = info.timing.shown
    ranges = [part for part in parts if part is not None]
    if len(ranges) < len(parts):
        return DecodeWindow(0, shown, 0, None, trims=False)
    first, last = min(first for first, _ in ranges), max(last for _, last in ranges)
    written = written_timing(info.timing, profile)
    one_to_one = written.input_rate is not None
    if written.input_rate is not None:
        step = int(written.input_rate / written.rate)
        begin, end = first * step, min(shown, (last - 1) * step + 1)
    else:
        shows = np.rint(source_seconds(info) * float(written.rate))
        begin = max(0, int(np.searchsorted(shows, first)) - _RESAMPLED_MARGIN)
        end = min(shown, int(np.searchsorted(shows, last)) + _RESAMPLED_MARGIN)
    trims = one_to_one and not info.interlaced
    # At its end, resampling goes by the duration of the stream, which depends on how the times were made.
    whole_end = not one_to_one and end >= shown
    if whole_end or not len(info.keys) or not _on_grid(info):
        return DecodeWindow(begin, end, 0, None, trims)
    number = int(np.searchsorted(info.keys, info.times[begin], side="right")) - 1
    if number <= 0:
        return DecodeWindow(begin, end, 0, None, trims)
    key, tick = info.keys[number], float(info.time_base)
    seek = float(key) * tick + min(float(info.times[begin] - key) * tick, _SEEK_MARGIN_SECONDS)
    return DecodeWindow(begin, end, int(np.searchsorted(info.times, key)), seek, trims)


def plan_runs(info: SourceInfo, profile: Profile, clips: Sequence[Sequence[Part | None]]) -> list[range]:
    """Divide the clips of a source into runs of ffmpeg, each of consecutive clips.

    Clips share a run if decoding on to the next one costs less than another run for it.
    """
    start = _START_PIXELS / max(1, info.width * info.height)
    runs: list[range] = []
    parts, end = 0, 0
    for number, clip in enumerate(clips):
        window = plan_window(info, profile, clip)
        onward = max(0, window.first - end)
        # A clip that begins before the run's end is decoded already, but for its rest.
        afresh = start + window.first - window.key
        fits = bool(runs) and None not in (*clip, *clips[runs[-1].start]) and parts + len(clip) <= _MOST_PARTS
        if fits and onward <= afresh:
            runs[-1] = range(runs[-1].start, number + 1)
            parts, end = parts + len(clip), max(end, window.last)
        else:
            runs.append(range(number, number + 1))
            parts, end = len(clip), window.last
    return runs


def source_seconds(info: SourceInfo) -> FloatArray:
    """Return when each source frame is shown, in seconds from the first one, float64 [N], as filters see it."""
    if info.timing.input_rate is not None:
        return np.arange(info.timing.shown) / float(info.timing.input_rate)
    return np.asarray((info.times - info.times[0]) * float(info.time_base))


def _on_grid(info: SourceInfo) -> bool:
    """Return whether ffmpeg's filters count the frames from their times as the forced rate counts them."""
    rate = info.timing.input_rate
    if rate is None:
        return True
    per_tick = info.time_base * rate
    # av_rescale_q: to the nearest integer, halves away from zero.
    ticks = info.times - info.times[0]
    counted = (2 * ticks * per_tick.numerator + per_tick.denominator) // (2 * per_tick.denominator)
    return bool((counted == np.arange(len(ticks))).all())
