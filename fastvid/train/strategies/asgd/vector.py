"""A model as one vector on the CPU: parameters by optimizer group, then norm statistics."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fastvid.train.strategies.asgd.weight_shard import WeightRange
from fastvid.train.strategies.shared.average import statistics


class Vector:
    """Copies a model to and from flat vectors, which clients and servers exchange.

    On the CPU a tensor is copied to its place in the vector. On another device the tensors are first joined there, by
    one kernel, and the joined buffer is copied at once; vectors are then in pinned memory, which the device reads and
    writes without a further copy.

    `dtype`: float64 if any tensor is float64, else float32.
    """

    def __init__(self, optimizer: Optimizer, model: nn.Module) -> None:
        groups = optimizer.param_groups
        self._parameters: list[nn.Parameter] = [parameter for group in groups for parameter in group["params"]]
        self._statistics = statistics(model)
        tensors: list[Tensor] = [*self._parameters, *self._statistics]
        self._sizes = [tensor.numel() for tensor in tensors]
        self._split, self.size = sum(self._sizes[: len(self._parameters)]), sum(self._sizes)
        wide = any(tensor.dtype == torch.float64 for tensor in tensors)
        self.dtype = torch.float64 if wide else torch.float32
        device = tensors[0].device
        # On another device, what is joined there.
        self._joined = None if device.type == "cpu" else torch.empty(self.size, dtype=self.dtype, device=device)
        self._pinned = device.type == "cuda"
        self.sections: list[WeightRange] = []
        start = 0
        for group in groups:
            stop = start + sum(parameter.numel() for parameter in group["params"])
            self.sections.append(WeightRange(start, stop, group.get("lr_mult", 1.0), group["weight_decay"]))
            start = stop
        if start < self.size:
            self.sections.append(WeightRange(start, self.size, averaged=True))

    def buffer(self) -> Tensor:
        """Return a new vector [size] of zeros on the CPU, in pinned memory if the model is on a GPU."""
        return torch.zeros(self.size, dtype=self.dtype, pin_memory=self._pinned)

    def parameters_of(self, values: Tensor) -> Tensor:
        """Return the part of a vector [size] that belongs to the parameters, as a view."""
        return values[: self._split]

    def collect(self, into: Tensor) -> Tensor:
        """Copy the model into a vector [size], and return it."""
        return self._join([*self._parameters, *self._statistics], into)

    def gradients(self, into: Tensor) -> Tensor:
        """Copy gradients (0 for a parameter without one) and statistics into a vector [size], and return it."""
        found = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._parameters]
        return self._join([*found, *self._statistics], into)

    @torch.no_grad()
    def spread(self, values: Tensor, *, statistics: bool = True) -> None:
        """Copy a vector [size] into the model, with or without the statistics."""
        source = values if self._joined is None else self._joined.copy_(values)
        tensors: list[Tensor] = [*self._parameters, *(self._statistics if statistics else [])]
        torch._foreach_copy_([tensor.detach() for tensor in tensors], self._views(source, tensors))

    @torch.no_grad()
    def _join(self, tensors: list[Tensor], into: Tensor) -> Tensor:
        target = into if self._joined is None else self._joined
        torch._foreach_copy_(self._views(target, tensors), [tensor.detach() for tensor in tensors])
        return into if self._joined is None else into.copy_(self._joined)

    def _views(self, values: Tensor, tensors: list[Tensor]) -> list[Tensor]:
        """Return the places of the first tensors in a vector."""
        parts = torch.split_with_sizes(values, self._sizes)
        return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=False)]
