"""Many tensors side by side in one buffer, so that they travel in one message."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


class Flat:
    """A buffer with a place for each of some tensors, and for further numbers behind them.

    The buffer is made once and stays where it is; so do the tensors, which are copied from and into, never rebound.

    Args:
        tensors: Of any shapes, strides and floating types; the buffer lies on the first one's device.
        extra: Further numbers.

    Attributes:
        buffer: [n + extra], float64 where a tensor is, else float32.
        values: [n], the part of the buffer that belongs to the tensors, in their order.
        words: [extra], the part behind it.
    """

    def __init__(self, tensors: Sequence[Tensor], extra: int = 0) -> None:
        self.tensors = tuple(tensors)
        wide = any(tensor.dtype == torch.float64 for tensor in self.tensors)
        sizes = [tensor.numel() for tensor in self.tensors]
        device = self.tensors[0].device if self.tensors else None
        dtype = torch.float64 if wide else torch.float32
        self.buffer = torch.zeros(sum(sizes) + extra, dtype=dtype, device=device)
        self.values, self.words = self.buffer[: sum(sizes)], self.buffer[sum(sizes) :]
        parts = torch.split_with_sizes(self.values, sizes)
        self._views = [part.view(tensor.shape) for part, tensor in zip(parts, self.tensors, strict=True)]

    def holds(self, tensors: Iterable[Tensor]) -> bool:
        """Whether its tensors are these very ones."""
        return [id(tensor) for tensor in tensors] == [id(tensor) for tensor in self.tensors]

    @torch.no_grad()
    def collect(self) -> None:
        """Copies the tensors into the buffer."""
        for view, tensor in zip(self._views, self.tensors, strict=True):
            view.copy_(tensor)

    @torch.no_grad()
    def spread(self) -> None:
        """Copies the buffer into the tensors."""
        for view, tensor in zip(self._views, self.tensors, strict=True):
            tensor.copy_(view)
