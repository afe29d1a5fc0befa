"""Streams of depth: videos whose luma has 12 bits, levels that stand for distances.

A generation's `extras` have a record for each under ``depth``: ``min`` and ``max`` are the distances, in metres, of
levels 0 and 4095; with ``log`` levels are spaced evenly in the logarithm of the distance plus ``shift``. This is how
LeRobot stores depth.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

LEVELS: Final = 4096
_MILLIMETRES: Final = 1000.0
_MOST: Final = 65535.0  # millimetres, LeRobot's largest


@dataclass(frozen=True, slots=True)
class DepthScale:
    """How the levels of a stream become distances."""

    min: float = 0.01
    max: float = 10.0
    shift: float = 3.5
    log: bool = True

    def to_json(self) -> dict[str, Any]:
        """Return it as a record of `extras`."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> DepthScale:
        """Create it from a record of `extras`."""
        return cls(float(record["min"]), float(record["max"]), float(record["shift"]), bool(record["log"]))

    def millimetres(self) -> npt.NDArray[np.float32]:
        """Return the distance of each level in whole millimetres, float32 [4096]."""
        levels = np.arange(LEVELS, dtype=np.float32)
        low, high = self.min, self.max
        if self.log:
            low, high = math.log(self.min + self.shift), math.log(self.max + self.shift)
        # In float32 step by step, as LeRobot computes it.
        metres = levels * np.float32((high - low) / (LEVELS - 1)) + np.float32(low)
        if self.log:
            metres = np.exp(metres) - np.float32(self.shift)
        metres = np.clip(metres, np.float32(self.min), np.float32(self.max))
        found: npt.NDArray[np.float32] = np.clip(np.rint(metres * np.float32(_MILLIMETRES)), 0, _MOST)
        return found
