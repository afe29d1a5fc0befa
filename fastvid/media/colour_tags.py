"""The colour that encoded pictures are tagged with, in the words of ffmpeg's filters and options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

COLOUR: Final = {"colorspace": "smpte170m", "color_primaries": "smpte170m", "color_trc": "smpte170m"}
"""The colour that profiles write, BT.601: ffmpeg's options of an output, and of its filter setparams."""


def tagged(full_range: bool) -> str:
    """ffmpeg's filter that tags pictures with that colour and their range.

    Tags belong on the pictures: ffmpeg 9 takes what an encoder writes from them, whatever its options say.
    """
    return f"setparams={pairs({'range': 'full' if full_range else 'limited', **COLOUR})}"


def pairs(values: Mapping[str, object]) -> str:
    """ffmpeg's form of options: ``name=value`` with colons between."""
    return ":".join(f"{name}={value}" for name, value in values.items())
