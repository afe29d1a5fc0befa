"""Options of each encoder: GOP structure, determinism, and equal headers for equal sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from fastvid.media.colour_tags import pairs
from fastvid.sharding.encode.profile import Profile

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
