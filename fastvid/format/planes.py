"""Store optical flow and depth as the luma of videos.

Flow f of a video is the displacement of each pixel from frame f to frame f + 1, in pixels to the right (x) and down
(y). The last frame has no next one; it repeats the previous flow, so that both streams have the same frame indices. The
flow of a one-frame video is zero.

Flow of height H is stored as pictures of height 2H: x in the upper half, y in the lower, both in luma, with neutral
chroma. So neither loses resolution to 4:2:0, and both are cropped and decoded like any video. Levels are full range, so
that every player shows the stored values. Level 128 is no motion, and 128 + 127 is the bound; flow beyond the bound is
clipped. The negative of a level's flow is exactly that of level 256 - level.

Depth is a video whose luma has 12 bits: levels 0 to 4095, which stand for distances. A generation's `extras` have a
record for each such stream under ``depth``: ``min`` and ``max`` are the distances of levels 0 and 4095 in metres. With
``log``, levels are spaced evenly in the logarithm of the distance plus ``shift``. This is how LeRobot stores depth.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from fastvid.runtime.arrays import Float32Array, UInt8Array

ZERO: Final = 128
"""Level of no motion."""

STEPS: Final = 127
"""Number of levels from no motion to the bound, in either direction."""

BOUND: Final = 20.0
"""Default bound in pixels per frame, as in the code of TSN (Wang et al. 2016); larger motion is clipped."""


def to_levels(flow: npt.NDArray[np.floating[Any]], bound: float) -> UInt8Array:
    """Convert the flow of one frame to a picture with x in its upper half and y in its lower half.

    `flow`: float32 [H, W, 2], x and y in pixels per frame. `bound`: pixels per frame at the outermost level.
    Returns uint8 [2H, W].
    """
    # IEEE 754 rounds each of these operations correctly, so the levels are the same on every machine.
    scaled = np.rint(flow * np.float32(STEPS / bound))
    np.clip(scaled, -STEPS, STEPS, out=scaled)
    scaled += ZERO
    return np.concatenate([scaled[..., 0], scaled[..., 1]]).astype(np.uint8)


def to_pixels(levels: UInt8Array, bound: float) -> Float32Array:
    """Convert pictures, see `to_levels`, back to flow.

    `levels`: uint8 [..., 2H, W]. `bound`: the stream's bound in pixels per frame. Returns float32 [..., H, W, 2],
    pixels per frame.
    """
    height = levels.shape[-2] // 2
    parts = (levels[..., :height, :], levels[..., height:, :])
    flow = np.stack(parts, axis=-1).astype(np.float32)
    flow -= ZERO
    flow *= np.float32(bound / STEPS)
    return flow


LEVELS: Final = 4096  # of depth
_MILLIMETRES: Final = 1000.0
_MOST: Final = 65535.0  # millimetres, the largest depth of LeRobot


@dataclass(frozen=True, slots=True)
class DepthScale:
    """How the levels of a depth stream become distances, as the record in `extras` says, see the top of this file."""

    min: float = 0.01  # distance of level 0, in metres
    max: float = 10.0  # distance of level 4095, in metres
    shift: float = 3.5  # metres
    log: bool = True

    def millimetres(self) -> npt.NDArray[np.float32]:
        """Return the distance of each level in whole millimetres, float32 [4096]."""
        levels = np.arange(LEVELS, dtype=np.float32)
        low, high = self.min, self.max
        if self.log:
            low, high = math.log(self.min + self.shift), math.log(self.max + self.shift)
        # In float32 at every step, as LeRobot computes it.
        metres = levels * np.float32((high - low) / (LEVELS - 1)) + np.float32(low)
        if self.log:
            metres = np.exp(metres) - np.float32(self.shift)
        metres = np.clip(metres, np.float32(self.min), np.float32(self.max))
        found: npt.NDArray[np.float32] = np.clip(np.rint(metres * np.float32(_MILLIMETRES)), 0, _MOST)
        return found
