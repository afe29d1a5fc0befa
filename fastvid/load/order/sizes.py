"""The sizes of a dataset's clips, known before anything is read: what batches of varying shape are planned from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Final, Literal

import numpy as np

from fastvid.errors import UsageError
from fastvid.load.order.batches import ClipShape
from fastvid.runtime.arrays import IntArray
from fastvid.runtime.checks import check_integer

Unfit = Literal["raise", "skip"]
"""What to do with samples that no batch can contain: raise an error before the epoch begins, or skip and log them."""

_NAMED: Final = 5
"""Samples that a message about unfit samples names."""


@dataclass(frozen=True, slots=True, eq=False)
class ClipSizes:
    """What sampler and crop make of each sample."""

    frames: IntArray  # frames, int64 [N]
    heights: IntArray  # height in pixels, int64 [N]
    widths: IntArray  # width in pixels, int64 [N]

    def __post_init__(self) -> None:
        shapes = {getattr(self, one.name).shape for one in fields(self)}
        if len(shapes) != 1 or len(shapes.pop()) != 1:
            raise UsageError(
                f"clip sizes have shapes {[getattr(self, one.name).shape for one in fields(self)]}, expected [N]"
            )

    def __len__(self) -> int:
        return len(self.frames)

    def tokens(self, patch: ClipShape, merge: int = 1) -> IntArray:
        """Return the patches that cover each clip, int64 [N].

        `patch`: frames, height and width of a patch.
        """
        count = -(-self.frames // patch[0]) * merge**2
        count *= -(-self.heights // (patch[1] * merge))
        count *= -(-self.widths // (patch[2] * merge))
        return count

    def describe(self, sample: int) -> str:
        """Return a sample's size as text: frames, height and width."""
        return f"{self.frames[sample]} frames of {self.heights[sample]}x{self.widths[sample]}"


def patches(shape: ClipShape, patch: ClipShape) -> int:
    """Return the number of patches that cover a clip."""
    return int(np.prod([-(-side // step) for side, step in zip(shape, patch, strict=True)], dtype=np.int64))


def report_unfit(samples: IntArray, total: int, what: str, describe: Callable[[int], str]) -> str:
    """Return a message about samples that no batch can contain; it names the first few.

    `samples`: the samples, int64 [M], M >= 1. `total`: samples of the dataset.
    """
    named = "; ".join(describe(sample) for sample in samples[:_NAMED].tolist())
    more = f"; and {len(samples) - _NAMED:,} more" if len(samples) > _NAMED else ""
    return f"{len(samples):,} of {total:,} samples {what}: {named}{more}"


def check_shape(name: str, shape: object) -> ClipShape:
    """Return three positive integers as a tuple."""
    if not isinstance(shape, Sequence) or len(shape) != 3:
        raise UsageError(f"{name} is {shape!r}, expected (frames, height, width)", hint="give three integers")
    frames, height, width = (check_integer(name, side, 1) for side in shape)
    return frames, height, width
