"""Encode profiles, the settings of a job, and the ffmpeg command that converts any source to a profile.

By default, every profile that encodes writes: constant frame rate, upright progressive frames with square pixels, 8-bit
4:2:0, BT.601 limited range (JPEG: full range) and tagged as such, short side 256, both sides multiples of 16. Frames
are scaled and then centre-cropped, never stretched. The short side of smaller videos is kept, rounded down to a
multiple of 16.

The bytes depend only on the source, the profile and the encoder build: one thread per encode, no code paths that differ
between CPUs, no version strings, no dates. The exception is tone mapping of HDR sources: the results of its
floating-point filters may differ between CPU models.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from typing import Any, Final

import ffmpeg
import numpy as np

from fastvid.errors import SourceError, UsageError
from fastvid.format.schema import Matrix
from fastvid.media.describe import HDR, HDR_TRANSFERS, TONE_MAP, shown_matrix
from fastvid.media.ffmpeg import FfmpegBuild, Limits
from fastvid.media.index_video import Proof
from fastvid.media.probe import SourceInfo
from fastvid.media.reasons import Reason
from fastvid.media.timing import COLOUR, MAX_RATE, FrameTiming, pairs
from fastvid.runtime.arrays import FloatArray
from fastvid.runtime.values import check_choice
from fastvid.sharding.encode.flow import PICTURES, Streams
from fastvid.sharding.encode.salvage import allowed_frames
from fastvid.sharding.encode.tiles import encoder_version

# With these flags, scaling is the same on every x86 CPU and from FFmpeg 5.1 to 9.0; with the defaults it is not.
SWS_FLAGS: Final = "bicubic+accurate_rnd+bitexact+full_chroma_int"

# Largest long side that hardware decoders of H.264 and VP9 support, in pixels.
_MAX_SIDE: Final = 4096
QUIET: Final = (
    "-nostdin", "-hide_banner", "-nostats", "-loglevel", "level+verbose", "-filter_complex_threads", "1", "-y",
)  # fmt: skip
"""Options of every run of ffmpeg."""
_MATRICES: Final = {
    Matrix.BT709: "bt709", Matrix.FCC: "fcc", Matrix.SMPTE240M: "smpte240m", Matrix.BT2020_NCL: "bt2020",
}  # fmt: skip
_HDR_MATRICES: Final = {1: "709", 5: "470bg", 6: "170m", 9: "2020_ncl", 10: "2020_cl"}
_HDR_PRIMARIES: Final = {1: "709", 5: "bt470bg", 6: "170m", 9: "2020", 12: "smpte432"}


@dataclass(frozen=True, slots=True)
class Profile:
    """Parameters with which samples are encoded."""

    name: str
    codec: str
    gop: int  # frames from one key frame to the next
    bframes: int  # non-reference frames between two reference frames
    crf: int  # quality, lower is better
    preset: str
    short_side: int = 256  # shorter side in pixels, a multiple of `multiple`; 0 for the source's own size
    multiple: int = 16  # width and height are multiples of this, in pixels
    fps: str = ""  # frames per second as a fraction such as "30000/1001"; empty for the source's own rate
    # high dynamic range: "tonemap" converts it to standard range, and rejects videos that are not encoded; "keep"
    # leaves its values as they are
    hdr: str = TONE_MAP
    enlarge: bool = True  # whether to enlarge smaller pictures to the short side, as 0.2 did; False in `PROFILES`

    def __post_init__(self) -> None:
        check_choice("hdr", self.hdr, HDR)
        if self.codec == _COPY:
            return
        check_choice(f"unknown codec {{}} of profile {self.name!r}", self.codec, [*_ENCODERS, _COPY])
        if self.gop < 1 or not 0 <= self.bframes < self.gop:
            raise UsageError(
                f"a gop of {self.gop} with {self.bframes} B-frames is invalid", hint="choose 0 <= bframes < gop"
            )
        if self.multiple < 2 or self.short_side < 0 or self.short_side % self.multiple:
            below = self.short_side // max(1, self.multiple) * self.multiple
            hint = f"use {below} or {below + self.multiple}" if below > 0 else None
            raise UsageError(f"short side {self.short_side} is not a multiple of {self.multiple}", hint=hint)
        least, most = _QUALITY[self.codec]
        if not least <= self.crf <= most:
            told = f"quality {self.crf} of profile {self.name!r} is outside {least} to {most}"
            raise UsageError(told, hint="give another crf: lower is better")
        if self.fps:
            _check_rate(self.fps)

    @property
    def copies(self) -> bool:
        """Whether the profile copies the source's file or its packets into the shards instead of encoding."""
        return self.codec == _COPY

    @property
    def full_range(self) -> bool:
        """Whether luma ranges from 0 to 255: only in JPEG, where it always does (JFIF 1.02)."""
        return self.codec in ("mjpeg", "jpeg")

    @property
    def pix_fmt(self) -> str:
        """FFmpeg's name of the format of the pictures that are written."""
        return "yuvj420p" if self.full_range else "yuv420p"

    @property
    def is_tiled(self) -> bool:
        """Whether pictures are written so that a crop of them can be decoded, see `fastvid.sharding.encode.tiles`."""
        return self.codec == "jpeg"

    @property
    def encoder(self) -> str:
        """ffmpeg's name of the encoder; empty for "copy". For tiles a lossless one, because Pillow makes the JPEGs."""
        return _ENCODERS.get(self.codec, "")

    def completed(self, build: FfmpegBuild) -> FfmpegBuild:
        """Return the build with the version of Pillow, if the profile's pictures are encoded by Pillow."""
        return replace(build, jpeg=encoder_version()) if self.is_tiled else build

    def runs_on(self, build: FfmpegBuild) -> bool:
        """Return whether a build of ffmpeg has the encoder of this profile."""
        return self.copies or self.encoder in build.encoders

    def changed(self, **changes: Any) -> Profile:
        """Return the profile with other parameters, such as ``short_side``, ``crf`` or ``fps``; None keeps the old."""
        given = {name: value for name, value in changes.items() if value is not None}
        useless = next((name for name in given if name != "hdr"), None)
        if self.copies and useless is not None:
            raise UsageError(f"profile {self.name!r} does not encode: {useless} has no effect on it")
        if "gop" in given:
            given["bframes"] = min(self.bframes, given["gop"] - 1)
        return replace(self, **given)

    def to_json(self) -> dict[str, Any]:
        """Return the parameters as datasets record them: without `hdr` and `enlarge` if they are as in fastvid 0.2."""
        usual = {"hdr": TONE_MAP, "enlarge": True}
        return {name: value for name, value in asdict(self).items() if value != usual.get(name, ...)}


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings that are the same for all tasks of a job."""

    profile: Profile  # how samples are encoded
    build: FfmpegBuild
    limits: Limits
    max_seconds: float  # longer videos are split into parts of at most this length, in seconds
    streams: Streams = PICTURES
    blocked: tuple[str, ...] = ()
    # maximum number of frames to leave out of a damaged source, such as "100", or "5%" of its frames; None rejects
    # every damaged source. See `fastvid.sharding.encode.salvage`.
    max_bad_frames: str | None = None
    proof: Proof | None = None
    hashed: bool = False  # whether videos in place are hashed, though their proof does not read them whole

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
    """Return the time of each written frame in the source, in seconds after the first frame, float64 [N].

    `timing`: see `written_timing`.
    """
    grid: FloatArray = np.asarray(np.arange(timing.frames) / float(timing.rate))
    times: FloatArray = np.asarray((info.times - info.times[:1]) * float(info.time_base))
    if timing.input_rate is None or timing.kind != "constant" or len(times) != timing.shown:
        return grid
    kept = times[:: int(timing.input_rate / timing.rate)]
    return kept if (np.diff(kept) > 0).all() else grid


_COPY: Final = "copy"


_ENCODERS: Final = {"h264": "libx264", "hevc": "libx265", "vp9": "libvpx-vp9", "mjpeg": "mjpeg", "jpeg": "libx264"}


# Range of `crf` by codec: for mjpeg FFmpeg's quantiser scale; for tiles the steps of quantisation in percent of the
# JPEG standard's, from libjpeg's quality 100 down to 5.
_QUALITY: Final = {"h264": (0, 51), "hevc": (0, 51), "vp9": (0, 63), "mjpeg": (2, 31), "jpeg": (1, 1000)}


def _check_rate(text: str) -> None:
    try:
        rate = Fraction(text)
    except (ValueError, ZeroDivisionError) as error:
        raise UsageError(f"frame rate {text!r} is not a number", hint="use one such as 25 or 30000/1001") from error
    if not 0 < rate <= MAX_RATE:
        raise UsageError(f"frame rate is {text}, expected more than 0 and at most {MAX_RATE}")


# Most macroblocks per frame at H.264 level 3.1 (ITU-T H.264 table A-1); larger frames get 5.1, which allows 36,864.
_LEVEL_31_BLOCKS: Final = 3600


def _level(size: tuple[int, int]) -> str:
    """Return the level of H.264 and H.265 for a picture size in pixels.

    It is set because the encoder's choice, and with it the range of motion vectors, depends on the frame rate too.
    """
    return "3.1" if size[0] * size[1] // 256 <= _LEVEL_31_BLOCKS else "5.1"


def _fixed_gop(profile: Profile) -> dict[str, Any]:
    """Return the options of x264 and x265 that give all groups of pictures the same structure."""
    gop = {"keyint": profile.gop, "min-keyint": profile.gop, "scenecut": 0, "open-gop": 0}
    return {**gop, "bframes": profile.bframes, "b-adapt": 0}


def _h264_options(profile: Profile, size: tuple[int, int], full_range: bool) -> dict[str, Any]:
    fixed = {**_fixed_gop(profile), "b-pyramid": "none", "level": _level(size)}
    x264 = {"threads": 1, "cpu-independent": 1, **fixed}
    # Equal sizes get equal headers, whatever the frame rate, so that one decoder can stay open for all clips.
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


def _vp9_options(profile: Profile, *_: Any) -> dict[str, Any]:
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
    x265 = {
        # One thread and no wavefronts, so that the bytes depend on neither the number of cores nor their load.
        "pools": "none",
        "frame-threads": 1,
        "wpp": 0,
        **_fixed_gop(profile),
        "b-pyramid": 0,
        "colorprim": "smpte170m",
        "transfer": "smpte170m",
        "colormatrix": "smpte170m",
        "range": "full" if full_range else "limited",
        "level-idc": _level(size),
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


def _mjpeg_options(profile: Profile, *_: Any) -> dict[str, Any]:
    # Default Huffman tables keep headers equal, and decoders have fast paths for them.
    # The integer transform is deterministic: faster ones differ between CPUs.
    return {"q:v": profile.crf, "huffman": "default", "dct": "int"}


ENCODER_OPTIONS: Final[dict[str, Callable[[Profile, tuple[int, int], bool], dict[str, Any]]]] = {
    "h264": _h264_options,
    "hevc": _hevc_options,
    "vp9": _vp9_options,
    "mjpeg": _mjpeg_options,
    "jpeg": lambda profile, *_: {"qp": 0, "preset": profile.preset},
}
"""For each codec a function that returns its encoder's options from a profile, the width and height in pixels, and
whether luma is full range."""


PROFILES: Final = {
    profile.name: profile
    for profile in (
        # A third more bytes than x264's defaults at equal quality, and five times the speed for sparse frames: seven of
        # eight frames are decoded only if requested.
        Profile("compact", "h264", gop=32, bframes=7, crf=23, preset="medium", enlarge=False),
        # One packet per requested frame: twice as fast again for sparse frames, at several times the bytes.
        Profile("intra", "h264", gop=1, bframes=0, crf=23, preset="medium", enlarge=False),
        # For pictures of 96 to 256 lines, as robots and world models have them: their own size, one packet per frame.
        Profile("small", "h264", gop=1, bframes=0, crf=18, preset="medium", short_side=0, multiple=2, enlarge=False),
        # For DALI on a CPU, at the quality of compact. A short GOP, because VP9 has no cheap non-reference frames.
        Profile("vp9", "vp9", gop=12, bframes=0, crf=40, preset="4", enlarge=False),
        # The structure of compact in HEVC: a little over half the bytes, two to three times the decode time on a CPU.
        Profile("hevc", "hevc", gop=32, bframes=7, crf=26, preset="medium", enlarge=False),
        # All-intra for DALI on a CPU.
        Profile("mjpeg", "mjpeg", gop=1, bframes=0, crf=4, preset="", enlarge=False),
        # All-intra, and only the part of each packet that the crop shows is decoded. The quality is that of intra with
        # crf 22; on libjpeg's scale it is 43 for luma and 60 for chroma.
        Profile("tiles", "jpeg", gop=1, bframes=0, crf=116, preset="ultrafast", enlarge=False),
        # No encoding: for videos that are already small and trimmed, or to inspect videos before choosing a profile.
        Profile("copy", "copy", gop=0, bframes=0, crf=0, preset="", short_side=0, multiple=0),
    )
}


def get_profile(name: str | Profile) -> Profile:
    """Return a profile by name; a profile is returned as it is."""
    if isinstance(name, Profile):
        return name
    check_choice("unknown profile {}", name, sorted(PROFILES))
    return PROFILES[name]


@dataclass(frozen=True, slots=True)
class Geometry:
    """Width and height in pixels of the upright picture: after scaling, and after the following crop."""

    scaled: tuple[int, int]
    cropped: tuple[int, int]


def plan_geometry(width: int, height: int, aspect: Fraction, profile: Profile) -> Geometry:
    """Return the sizes for an upright picture; `aspect`: width of a pixel divided by its height."""
    shape = Fraction(width, height) * aspect
    side, step = profile.short_side, profile.multiple
    if not side:
        side = max(2, round(min(width * aspect, Fraction(height))))
    elif not profile.enlarge:
        side = max(step, min(side, (height if shape >= 1 else width) // step * step))
    long = max(shape, 1 / shape) * side
    # Round to an even side: chroma planes have half the size, and so the scale factors of all planes are equal.
    scaled = max(side, 2 * round(long / 2) if profile.short_side else round(long))
    cropped, short = (one // step * step for one in (scaled, side))
    if cropped > _MAX_SIDE:
        raise SourceError(
            f"a picture of {width}x{height} would become {cropped}x{side} pixels, more than {_MAX_SIDE}",
            reason=Reason.BAD_SHAPE,
        )
    if shape >= 1:
        return Geometry((scaled, side), (cropped, short))
    return Geometry((side, scaled), (short, cropped))


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
        return replace(self, key=0, seek=None)


def build_command(
    settings: Settings,
    info: SourceInfo,
    source_url: str,
    targets: Sequence[tuple[str, tuple[int, int] | None]],
    window: DecodeWindow | None = None,
) -> list[str]:
    """Return the ffmpeg command that writes a source, or parts of it, as MP4.

    `targets`: URL of each MP4 and its frames, a half-open range at the profile's constant rate, or None for all.
    One pass over the source writes all of them. `window`: what is decoded, by default everything.
    """
    build, profile = settings.build, settings.profile
    window = window or DecodeWindow(0, info.timing.shown, 0, None, trims=False)
    seeks = window.seek is not None
    picture = ffmpeg.input(source_url, **input_options(build, info, settings.limits, window.seek))["V:0"]
    by_times = seeks or info.timing.input_rate is None
    if by_times:
        # Frames are counted from the first one, but ffmpeg's times from the first packet of any stream: shift them.
        picture = picture.filter("setpts", f"PTS-{info.times[0] * info.time_base}/TB")
    if info.timing.input_rate is not None and (seeks or window.trims):
        # Without a seek the times are frame numbers already, because ffmpeg counts frames at a forced rate.
        picture = picture.filter("settb", str(1 / info.timing.input_rate))
    if window.trims:
        picture = picture.filter("trim", start_pts=window.first, end_pts=window.last)
    picture = picture_filters(build, profile, info, picture)
    geometry, timing = upright_geometry(info, profile), written_timing(info.timing, profile)
    branches = picture.split() if len(targets) > 1 else None
    outputs = []
    for number, (url, frames) in enumerate(targets):
        branch = picture if branches is None else branches[number]
        if frames is not None:
            branch = _cut(branch, timing.rate, *frames)
        most = 2 * timing.frames + 16
        options = output_options(profile, geometry.cropped, frames=most, full_range=profile.full_range)
        outputs.append(ffmpeg.output(branch, url, **options, **({"copyts": None} if by_times else {})))
    command: list[str] = ffmpeg.merge_outputs(*outputs).get_args()
    return [build.path, *QUIET, *command]


def _cut(picture: Any, rate: Fraction, first: int, last: int) -> Any:
    """Append the filters that keep frames `first` to `last` - 1.

    They select by time, not by count: when a stream changes its size, format, range or matrix, ffmpeg rebuilds the
    filters, and counting would start again from 0.
    """
    picture = picture.filter("settb", str(1 / rate)).filter("trim", start_pts=first, end_pts=last)
    return picture.filter("setpts", f"PTS-{first}")


def build_check(settings: Settings, info: SourceInfo, source_url: str) -> list[str]:
    """Return the ffmpeg command that decodes a source and writes nothing."""
    most = settings.limits.max_pixels
    source = ffmpeg.input(source_url, f=info.container, protocol_whitelist="file", threads=1, max_pixels=most)
    # Renumber the frames, with large steps, so that no clock rounds two to the same time: the null muxer reports equal
    # times as errors.
    picture = source["V:0"].filter("settb", "1").filter("setpts", "N*1000000")
    command: list[str] = ffmpeg.output(picture, "-", f="null", fps_mode="passthrough").get_args()
    return [settings.build.path, *QUIET, *command]


def input_options(build: FfmpegBuild, info: SourceInfo, limits: Limits, seek: float | None = None) -> dict[str, Any]:
    """Return ffmpeg's input options for a source, decoded from the key frame at or before `seek` seconds."""
    arguments: dict[str, Any] = {
        "f": info.container,
        "protocol_whitelist": "file",
        "threads": 1,
        "max_pixels": limits.max_pixels,
    }
    if info.cropped and crops_by_itself(build):
        arguments["apply_cropping"] = "codec"
    if seek is not None:
        # Seek by the stream's own timestamps, not relative to the start of the file. Filters then drop the frames
        # before the wanted ones by their times.
        return arguments | {"seek_timestamp": 1, "noaccurate_seek": None, "ss": f"{seek:.6f}"}
    if info.timing.input_rate is not None:
        arguments["r"] = str(info.timing.input_rate)
    return arguments


def crops_by_itself(build: FfmpegBuild) -> bool:
    """Return whether a build applies the crop in the container itself, as FFmpeg does since version 7.1."""
    matched = re.match(r"n?(\d+)\.(\d+)", build.version)
    # Builds from a repository have a commit as version, so compare libavfilter: FFmpeg 7.1 has 10.4.
    if matched is None:
        return tuple(map(int, build.libraries.get("libavfilter", "0.0").split(".")[:2])) >= (10, 4)
    return (int(matched[1]), int(matched[2])) >= (7, 1)


def upright_geometry(info: SourceInfo, profile: Profile) -> Geometry:
    """Return the sizes for a source's picture after its rotation, see `plan_geometry`."""
    _, _, height, width = info.part
    aspect = 1 / info.sample_aspect if info.turned else info.sample_aspect
    return plan_geometry(width, height, aspect, profile)


def picture_filters(build: FfmpegBuild, profile: Profile, info: SourceInfo, picture: Any) -> Any:
    """Append the filters that convert decoded frames to a profile to an ffmpeg-python stream."""
    # ffmpeg itself inserts the filters that rotate the picture upright. If they were added here, ffmpeg would copy the
    # display matrix into the output, and players would rotate again.
    geometry = upright_geometry(info, profile)
    timing = info.timing
    step = 1 if timing.input_rate is None else int(timing.input_rate / timing.rate)
    if info.interlaced:
        # send_frame: one output frame per input frame. deint: change only frames that are marked as interlaced.
        picture = picture.filter("bwdif", mode="send_frame", parity="auto", deint="interlaced")
    if step > 1:
        # Not framestep, which counts frames: see `_cut`.
        picture = picture.filter("select", rf"not(mod(round(t*{timing.input_rate}),{step}))")
    if info.cropped:
        top, left, height, width = info.part
        picture = picture.filter("crop", width, height, left, top, exact=1)
    width, height = geometry.scaled
    picture = (
        _tone_map(build, info, picture, width, height)
        if info.hdr and profile.hdr == TONE_MAP
        else _convert(info, picture, width, height)
    )
    if geometry.cropped != geometry.scaled:
        picture = picture.filter("crop", *geometry.cropped)
    picture = picture.filter("setsar", "1").filter("format", "yuv420p")
    levels = "limited"
    if profile.full_range:
        # Last, so that all filters before it are the same for all profiles.
        levels = "full"
        picture = picture.filter(
            "scale",
            flags=SWS_FLAGS,
            in_range="limited",
            out_range="full",
            in_color_matrix="bt601",
            out_color_matrix="bt601",
        ).filter("format", "yuvj420p")
    picture = picture.filter("setparams", range=levels, **COLOUR)
    # Without a forced input rate, the fps filter repeats or drops frames; it is last in the chain, where frames are
    # small. With a forced rate it is left out, because it would repeat the last frame up to the container's duration.
    if profile.fps:
        return picture.filter("fps", profile.fps).filter("trim", end_frame=written_timing(timing, profile).frames)
    return picture if timing.input_rate is not None else picture.filter("fps", str(timing.rate))


def source_matrix(info: SourceInfo) -> str:
    """Return the name of a source's luma coefficients, as the filter scale calls them."""
    return _MATRICES.get(shown_matrix(info.matrix, info.width, info.height), "bt601")


def _convert(info: SourceInfo, picture: Any, width: int, height: int) -> Any:
    return picture.filter(
        "scale",
        width,
        height,
        flags=SWS_FLAGS,
        in_color_matrix=source_matrix(info),
        in_range="full" if info.full_range else "limited",
        out_color_matrix="bt601",
        out_range="limited",
    ).filter("format", "yuv420p")


def _tone_map(build: FfmpegBuild, info: SourceInfo, picture: Any, width: int, height: int) -> Any:
    if not build.zscale:
        raise SourceError(
            f"the picture is HDR ({HDR_TRANSFERS[info.transfer]}) and {build.path} has no zscale filter",
            reason=Reason.HDR,
            hint="use an ffmpeg built with libzimg",
        )
    luma_range = "full" if info.full_range else "limited"
    # Scale first, with the source's transfer function unchanged: tone mapping then processes 256 lines, not 2160.
    picture = picture.filter("scale", width, height, flags=SWS_FLAGS, in_range=luma_range, out_range=luma_range).filter(
        "format", "yuv444p10le"
    )
    picture = picture.filter("crop", width & ~1, height & ~1, 0, 0)  # zscale subsamples even sides only
    # 100 nits is diffuse white of SDR; hable without desaturation keeps the colours of faces and grass.
    picture = picture.filter(
        "zscale",
        transferin=HDR_TRANSFERS[info.transfer],
        matrixin=_HDR_MATRICES.get(info.matrix, "2020_ncl"),
        primariesin=_HDR_PRIMARIES.get(info.primaries, "2020"),
        rangein=luma_range,
        transfer="linear",
        npl=100,
    )
    picture = picture.filter("format", "gbrpf32le").filter("zscale", primaries=709).filter("tonemap", "hable", desat=0)
    return picture.filter("zscale", transfer="709", matrix="170m", range="limited").filter("format", "yuv420p")


def output_options(profile: Profile, size: tuple[int, int], *, frames: int, full_range: bool) -> dict[str, Any]:
    """Return ffmpeg's options by name for one output of a profile.

    `size`: width and height in pixels. `frames`: maximum number of frames. `full_range`: whether luma ranges from 0
    to 255.
    """
    common = {
        "f": "mp4",
        "codec:v": profile.encoder,
        "g": profile.gop,
        "keyint_min": profile.gop,
        "threads": 1,
        "pix_fmt": profile.pix_fmt,
        # The filters have already made the rate constant; other modes drop or repeat frames.
        "fps_mode": "passthrough",
        # Broken timestamps must not make a filter repeat a frame forever.
        "frames:v": frames,
        # Colour tags for the container's box; the encoder and its bitstream filter write them into the stream.
        **COLOUR,
        "color_range": "pc" if full_range else "tv",
        "map_metadata": -1,
        "map_chapters": -1,
        "fflags": "+bitexact",
        "flags:v": "+bitexact",
        "movflags": "+faststart",
    }
    return common | ENCODER_OPTIONS[profile.codec](profile, size, full_range)
