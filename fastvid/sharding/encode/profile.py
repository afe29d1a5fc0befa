"""Profiles and settings: the parameters with which samples are encoded, and what they mean for ffmpeg.

`ENCODER_OPTIONS` has the options of each encoder: GOP structure, determinism, and equal headers for equal sizes.
`plan_window` chooses what ffmpeg decodes for some frames of a source: from the first packet, or from a key frame before
them. The frames that are written, and so their bytes, are the same either way: filters select frames by their times,
never by counting from where decoding began.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from typing import Any, Final

import numpy as np

from fastvid.errors import UsageError
from fastvid.media.describe import HDR, TONE_MAP
from fastvid.media.ffmpeg import FfmpegBuild, Limits
from fastvid.media.index_video import Proof
from fastvid.media.probe import SourceInfo
from fastvid.media.timing import MAX_RATE, FrameTiming, pairs
from fastvid.runtime.arrays import FloatArray
from fastvid.sharding.encode.flow import PICTURES, Streams
from fastvid.sharding.encode.salvage import allowed_frames


@dataclass(frozen=True, slots=True)
class Profile:
    """Parameters with which samples are encoded."""

    name: str
    codec: str
    gop: int  # frames from one key frame to the next
    bframes: int  # non-reference frames between two reference frames
    crf: int
    preset: str
    short_side: int = 256  # shorter side in pixels, a multiple of `multiple`
    multiple: int = 16  # width and height in pixels are multiples of it
    fps: str = ""  # frames per second as a fraction such as "30000/1001"; empty for the source's own rate
    # high dynamic range: "tonemap" makes pictures of the usual one, and refuses what is not encoded; "keep" its values
    hdr: str = TONE_MAP

    def __post_init__(self) -> None:
        if self.hdr not in HDR:
            raise UsageError(f"hdr is {self.hdr!r}", hint=f"use one of {', '.join(HDR)}")
        if self.codec == _COPY:
            return
        if self.codec not in _ENCODERS:
            raise UsageError(
                f"unknown codec {self.codec!r} of profile {self.name!r}",
                hint="use one of h264, hevc, vp9, mjpeg, copy",
            )
        if self.gop < 1 or not 0 <= self.bframes < self.gop:
            raise UsageError(
                f"a gop of {self.gop} with {self.bframes} B-frames is invalid", hint="choose 0 <= bframes < gop"
            )
        if self.multiple < 2 or self.short_side < self.multiple or self.short_side % self.multiple:
            raise UsageError(f"short side {self.short_side} is not a multiple of {self.multiple}")
        if self.codec == "mjpeg" and not _QSCALE[0] <= self.crf <= _QSCALE[1]:
            raise UsageError(f"quality {self.crf} of profile {self.name!r} is outside {_QSCALE[0]} to {_QSCALE[1]}")
        if self.fps:
            _check_rate(self.fps)

    @property
    def copies(self) -> bool:
        """Whether it does not encode: the source's file or its packets are copied into the shards."""
        return self.codec == _COPY

    @property
    def full_range(self) -> bool:
        """Whether luma ranges from 0 to 255, as always in JPEG (JFIF 1.02), which has no field for it."""
        return self.codec == "mjpeg"

    @property
    def encoder(self) -> str:
        """ffmpeg's name of the encoder; empty for "copy"."""
        return _ENCODERS.get(self.codec, "")

    def runs_on(self, build: FfmpegBuild) -> bool:
        """Return whether a build of ffmpeg has the encoder of this profile."""
        return self.copies or self.encoder in build.encoders

    def changed(self, **changes: Any) -> Profile:
        """Return this profile with other parameters: ``short_side``, ``crf``, ``gop``, ``fps``, ``hdr``; None keeps."""
        given = {name: value for name, value in changes.items() if value is not None}
        useless = next((name for name in given if name != "hdr"), None)
        if self.copies and useless is not None:
            raise UsageError(f"profile {self.name!r} does not encode: {useless} has no effect on it")
        if "gop" in given:
            given["bframes"] = min(self.bframes, given["gop"] - 1)
        return replace(self, **given)

    def to_json(self) -> dict[str, Any]:
        """Return all parameters, as a dataset records them; without `hdr` where it is what 0.2 did."""
        values = asdict(self)
        return values if self.hdr != TONE_MAP else {name: values[name] for name in values if name != "hdr"}


@dataclass(frozen=True, slots=True)
class Settings:
    """What all tasks of a job have in common."""

    profile: Profile  # how samples are encoded
    build: FfmpegBuild
    limits: Limits
    max_seconds: float  # longer videos are split into parts of at most this length, in seconds
    streams: Streams = PICTURES
    blocked: tuple[str, ...] = ()
    # the most frames that may be left out of a damaged source, such as "100" or "5%" of its frames; None rejects
    # every damaged source. See `fastvid.sharding.encode.salvage`.
    max_bad_frames: str | None = None
    proof: Proof | None = None

    def __post_init__(self) -> None:
        if self.max_bad_frames is not None:
            allowed_frames(self.max_bad_frames, 0)
            if self.profile.copies:
                raise UsageError(
                    "profile 'copy' takes whole files over, so it cannot leave out damaged frames",
                    hint="remove max_bad_frames, or use --profile compact",
                )


def written_timing(timing: FrameTiming, profile: Profile) -> FrameTiming:
    """Return the rate and frame count that a profile writes: the source's unless it sets a rate."""
    if not profile.fps:
        return timing
    rate = Fraction(profile.fps)
    return replace(timing, rate=rate, input_rate=None, frames=max(1, round(timing.frames * rate / timing.rate)))


def written_seconds(info: SourceInfo, timing: FrameTiming) -> FloatArray:
    """Return when each frame that is written is shown in the source, in seconds from the first one, float64 [N].

    `timing`: see `written_timing`.
    """
    grid: FloatArray = np.asarray(np.arange(timing.frames) / float(timing.rate))
    times: FloatArray = np.asarray((info.times - info.times[:1]) * float(info.time_base))
    if timing.input_rate is None or timing.kind != "constant" or len(times) != timing.shown:
        return grid
    kept = times[:: int(timing.input_rate / timing.rate)]
    return kept if (np.diff(kept) > 0).all() else grid


_COPY: Final = "copy"


_ENCODERS: Final = {"h264": "libx264", "hevc": "libx265", "vp9": "libvpx-vp9", "mjpeg": "mjpeg"}


_QSCALE: Final = (2, 31)  # of FFmpeg's MJPEG encoder


def _check_rate(text: str) -> None:
    try:
        rate = Fraction(text)
    except (ValueError, ZeroDivisionError) as error:
        raise UsageError(
            f"frame rate {text!r} is not a number", hint="use a number such as 25 or 30000/1001"
        ) from error
    if not 0 < rate <= MAX_RATE:
        raise UsageError(f"frame rate is {text}, expected more than 0 and at most {MAX_RATE}")


# Most macroblocks per frame at H.264 level 3.1 (ITU-T H.264 table A-1); larger frames get 5.1, which allows 36,864.
_LEVEL_31_BLOCKS: Final = 3600


def _h264_options(profile: Profile, size: tuple[int, int], full_range: bool) -> dict[str, Any]:
    blocks = size[0] * size[1] // 256
    x264 = {
        "threads": 1,
        "cpu-independent": 1,
        "keyint": profile.gop,
        "min-keyint": profile.gop,
        "scenecut": 0,
        "open-gop": 0,
        "bframes": profile.bframes,
        "b-adapt": 0,
        "b-pyramid": "none",
        # By default level and motion vector range in the header would depend on size and rate.
        "level": "3.1" if blocks <= _LEVEL_31_BLOCKS else "5.1",
    }
    # Equal headers for equal sizes, at any rate, so that one decoder can stay open for all clips.
    header = {
        "tick_rate": 60,
        "fixed_frame_rate_flag": 0,
        "sample_aspect_ratio": "1/1",
        "video_full_range_flag": int(full_range),
        "colour_primaries": 6,
        "transfer_characteristics": 6,
        "matrix_coefficients": 6,
        "chroma_sample_loc_type": 0,
    }
    return {
        "crf": profile.crf,
        "preset": profile.preset,
        # Turns off CABAC, deblocking and weighted prediction, the most expensive parts of decoding.
        "tune": "fastdecode",
        "x264-params": pairs(x264),
        # Removes the SEI (type 6), x264's version and settings, 700 bytes per file.
        "bsf:v": f"h264_metadata={pairs(header)},filter_units=remove_types=6",
    }


def _vp9_options(profile: Profile, size: tuple[int, int], full_range: bool) -> dict[str, Any]:
    del size, full_range
    return {
        "crf": profile.crf,
        "b:v": 0,  # constant quality by crf alone
        "deadline": "good",
        "cpu-used": profile.preset,
        # No hidden frames and no look-ahead, so that one packet is one frame.
        "auto-alt-ref": 0,
        "lag-in-frames": 0,
        "row-mt": 0,
        "tile-columns": 0,
        "tile-rows": 0,
        "frame-parallel": 0,
    }


def _hevc_options(profile: Profile, size: tuple[int, int], full_range: bool) -> dict[str, Any]:
    blocks = size[0] * size[1] // 256
    x265 = {
        # One thread and no wavefronts, so that the bytes depend on neither the number of cores nor their load.
        "pools": "none",
        "frame-threads": 1,
        "wpp": 0,
        "keyint": profile.gop,
        "min-keyint": profile.gop,
        "scenecut": 0,
        "open-gop": 0,
        "bframes": profile.bframes,
        "b-adapt": 0,
        "b-pyramid": 0,
        "colorprim": "smpte170m",
        "transfer": "smpte170m",
        "colormatrix": "smpte170m",
        "range": "full" if full_range else "limited",
        "level-idc": "3.1" if blocks <= _LEVEL_31_BLOCKS else "5.1",
        "info": 0,  # no SEI with x265's settings, 2 kB per file
        "log-level": "warning",
    }
    return {
        "crf": profile.crf,
        "preset": profile.preset,
        "x265-params": pairs(x265),
        "tag:v": "hvc1",
        "bsf:v": "hevc_metadata=tick_rate=60,filter_units=remove_types=39",
    }


def _mjpeg_options(profile: Profile, size: tuple[int, int], full_range: bool) -> dict[str, Any]:
    del size, full_range
    # Default Huffman tables keep headers equal, and decoders have fast paths for them.
    # The integer transform is deterministic: faster ones differ between CPUs.
    return {"q:v": profile.crf, "huffman": "default", "dct": "int"}


ENCODER_OPTIONS: Final[dict[str, Callable[[Profile, tuple[int, int], bool], dict[str, Any]]]] = {
    "h264": _h264_options,
    "hevc": _hevc_options,
    "vp9": _vp9_options,
    "mjpeg": _mjpeg_options,
}
"""For each codec a function that returns its encoder's options from a profile, the width and height in pixels, and
whether luma is full range."""


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
