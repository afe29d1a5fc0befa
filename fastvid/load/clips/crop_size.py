"""The size of a crop's clips: fixed, or given by a bucket."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np

from fastvid.errors import UsageError
from fastvid.runtime.arrays import IntArray

Size = tuple[int, int]
"""Height and width in pixels."""


@dataclass(frozen=True)
class Sized:
    """A crop with a size, or with none until it is given that of a bucket."""

    size: int | Size | None = None  # (height, width) in pixels; None if it comes from a bucket
    from_bucket: bool = field(default=False, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.size is None:
            return
        # Normalise, so that 224 and (224, 224) have the same fingerprint.
        object.__setattr__(self, "size", check_size(self.size))

    @property
    def output(self) -> Size | None:
        """Height and width of every clip in pixels; None if they come from a bucket."""
        assert not isinstance(self.size, int)
        return self.size

    def output_of(self, _height: int, _width: int, /) -> Size:
        """Return the height and width of a clip in pixels."""
        if self.output is None:
            raise UsageError(
                f"{self!r} has no size, which only a bucket can give it", hint="set size=, or use batches=Buckets(...)"
            )
        return self.output

    def sizes(self, heights: IntArray, widths: IntArray) -> tuple[IntArray, IntArray]:
        """Return the heights and widths of the clips of videos with these sides, both int64 [N]. With size None, the
        even part of the video, out of which a bucket takes its region."""
        if self.output is None:
            return heights & ~1, widths & ~1
        return np.full_like(heights, self.output[0]), np.full_like(widths, self.output[1])

    def of_size(self, size: Size) -> Self:
        """Return this crop with the size of a bucket."""
        if self.output == tuple(size):
            return self
        if self.output is not None:
            raise UsageError(
                f"{self!r} cannot make clips of {size[0]}x{size[1]} pixels for a bucket",
                hint="set size=None: the size then comes from the bucket",
            )
        made = replace(self, size=size)
        object.__setattr__(made, "from_bucket", True)
        return made

    def largest(self, height: int, width: int) -> tuple[float, float]:
        """Return the sides of the largest region of a video with the output's aspect ratio, in pixels."""
        out = self.output_of(height, width)
        scale = min(height / out[0], width / out[1])
        return out[0] * scale, out[1] * scale


def check_size(size: int | Size) -> Size:
    """Return a size as (height, width)."""
    pair = (size, size) if isinstance(size, int) else tuple(size)
    if len(pair) != 2 or min(pair) < 1:
        raise UsageError(f"size is {size!r}, expected one positive number of pixels or (height, width)")
    return pair
