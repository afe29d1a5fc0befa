"""Layout of a clip in a batch on the host: axes, dtype, and conversion from pixel values.

Does not import torch, because worker processes write batches too.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fastvid.runtime.arrays import UInt8Array


@dataclass(frozen=True, slots=True)
class RowLayout:
    """Layout of one row of a batch."""

    num_frames: int
    size: tuple[int, int]  # height and width in pixels
    order: str = "CTHW"
    # scale and bias of each channel, for float32 ``value * scale + bias``; None keeps uint8 values.
    channels: tuple[tuple[float, float], ...] | None = None

    @property
    def dtype(self) -> np.dtype[np.float32] | np.dtype[np.uint8]:
        """Data type of the row."""
        return np.dtype(np.uint8) if self.channels is None else np.dtype(np.float32)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Shape of the row in memory."""
        sizes = dict(zip("CTHW", self.levels_shape, strict=True))
        one, two, three, four = (sizes[axis] for axis in self.order)
        return one, two, three, four

    @property
    def levels_shape(self) -> tuple[int, int, int, int]:
        """Shape that decoders write: [3, T, H, W]."""
        return (3, self.num_frames, *self.size)

    @property
    def nbytes(self) -> int:
        """Size of the row in bytes."""
        return 3 * self.num_frames * self.size[0] * self.size[1] * self.dtype.itemsize

    @property
    def as_decoded(self) -> bool:
        """Whether decoders can write the row directly: they write values, and planes as a whole."""
        return self.channels is None and self.order.endswith("HW")

    def decoded(self, memory: UInt8Array) -> UInt8Array:
        """Return `nbytes` bytes of memory as a row that decoders write directly, viewed as [3, T, H, W]."""
        return memory.reshape(self.shape).transpose([self.order.index(axis) for axis in "CTHW"])

    def view(self, memory: UInt8Array) -> npt.NDArray[np.float32] | UInt8Array:
        """Return `nbytes` bytes of memory as a row viewed as [3, T, H, W]."""
        return self.channels_first(memory.view(self.dtype).reshape(self.shape))

    def channels_first(self, row: npt.NDArray[np.float32] | UInt8Array) -> npt.NDArray[np.float32] | UInt8Array:
        """Return the row viewed as [3, T, H, W]."""
        return row.transpose([self.order.index(axis) for axis in "CTHW"])

    def fill(self, row: npt.NDArray[np.float32] | UInt8Array, levels: UInt8Array) -> None:
        """Convert decoded values and write them to the row.

        `row`: viewed as [3, T, H, W]. `levels`: decoded values, uint8 [3, T, H, W].
        """
        if self.channels is None:
            row[...] = levels
            return
        # Plane by plane, so that the three passes over a plane stay in the CPU cache. With numpy, because torch would
        # start a team of OpenMP threads per decode thread, which compete for cores.
        for channel, (scale, bias) in enumerate(self.channels):
            by, plus = np.float32(scale), np.float32(bias)
            for source, plane in zip(levels[channel], row[channel], strict=True):
                plane[...] = source
                plane *= by
                plane += plus


@dataclass(frozen=True, slots=True)
class SharedRow:
    """A row in memory shared between processes."""

    offset: int  # offset of its first byte
    layout: RowLayout
