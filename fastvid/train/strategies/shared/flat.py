"""A buffer that concatenates many tensors, so that one message can transfer them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


class Flat:
    """A buffer with a range for each of some tensors, followed by further values.

    The buffer is allocated once. Tensors are copied from and to it and never rebound.

    `buffer`: [n + extra], float64 if any tensor is float64, else float32. `values`: [n], the part of the buffer
    that belongs to the tensors, in order. `words`: [extra], the part after it.
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

    def consists_of(self, tensors: Iterable[Tensor]) -> bool:
        """Return whether the tensors of this buffer are the same objects as these."""
        return [id(tensor) for tensor in tensors] == [id(tensor) for tensor in self.tensors]

    @torch.no_grad()
    def collect(self) -> None:
        """Copy the tensors into the buffer."""
        for view, tensor in zip(self._views, self.tensors, strict=True):
            view.copy_(tensor)

    @torch.no_grad()
    def spread(self, mixing: float = 0.0) -> None:
        """Copy the buffer into the tensors, which keep a share of their own values, 0 <= mixing < 1."""
        for view, tensor in zip(self._views, self.tensors, strict=True):
            if mixing:
                tensor.lerp_(view.to(tensor.dtype), 1 - mixing)
            else:
                tensor.copy_(view)
