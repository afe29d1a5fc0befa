"""How optical flow lies in a video of 8-bit luma: numbers to levels and back.

Flow number f of a video says where each pixel of frame f is in frame f + 1: pixels to the right (x) and down (y). The
last frame has no next one; it repeats the flow before it, so that both streams have the same frame indices. A video of
one frame has no motion.

A stream of height H is stored as pictures of height 2H: x above, y below, both in luma, chroma neutral. So neither
loses resolution to 4:2:0, and both are cut and decoded like any video. Levels are full range, so that any player shows
what is stored: 128 is no motion, 128 + 127 the bound, and what is beyond the bound is cut to it. Negation is exact:
256 - level.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from fastvid.runtime.arrays import Float32Array, UInt8Array

ZERO: Final = 128
"""Level of no motion."""

STEPS: Final = 127
"""Levels from no motion to the bound, in either direction."""

BOUND: Final = 20.0
"""Largest motion that is kept, in pixels a frame, unless asked otherwise: that of the TSN code (Wang et al. 2016)."""


def to_levels(flow: npt.NDArray[np.floating[Any]], bound: float, out: UInt8Array | None = None) -> UInt8Array:
    """Flow of one frame as a stacked picture.

    Args:
        flow: float32 [H, W, 2], x and y in pixels a frame.
        bound: Pixels a frame at the outermost level.
        out: Where to write, uint8 [2H, W].

    Returns:
        uint8 [2H, W].
    """
    height, width, _ = flow.shape
    out = np.empty((2 * height, width), np.uint8) if out is None else out
    # Every step is exactly rounded (IEEE 754), so the levels are the same on every machine.
    scaled = np.rint(flow * np.float32(STEPS / bound))
    np.clip(scaled, -STEPS, STEPS, out=scaled)
    scaled += ZERO
    out[:height], out[height:] = scaled[..., 0], scaled[..., 1]
    return out


def to_pixels(levels: UInt8Array, bound: float) -> Float32Array:
    """Stacked pictures as flow.

    Args:
        levels: uint8 [..., 2H, W].
        bound: Of the stream.

    Returns:
        float32 [..., H, W, 2], pixels a frame.
    """
    height = levels.shape[-2] // 2
    parts = (levels[..., :height, :], levels[..., height:, :])
    flow = np.stack(parts, axis=-1).astype(np.float32)
    flow -= ZERO
    flow *= np.float32(bound / STEPS)
    return flow
