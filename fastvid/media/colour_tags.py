"""The colour tags of encoded pictures, as options of ffmpeg and its filters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

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
