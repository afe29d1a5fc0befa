"""A model as one vector on the CPU: parameters by optimizer group, then norm statistics."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fastvid.train.strategies.asgd.weight_shard import WeightRange
from fastvid.train.strategies.shared.averager import statistics
from fastvid.train.strategies.shared.flat import Flat


class Vector:
    """Copies a model to and from a flat vector, which clients and servers exchange.

    Args:
        optimizer: Its groups have ``weight_decay``, and may have ``lr_mult``.
        model: The model whose parameters the optimizer steps.

    Attributes:
        values: [size] on the CPU; float64 if any tensor of the model is float64, else float32.
        sections: Parts with separate settings, which cover the vector.
    """

    def __init__(self, optimizer: Optimizer, model: nn.Module) -> None:
        groups = optimizer.param_groups
        self._parameters: list[nn.Parameter] = [parameter for group in groups for parameter in group["params"]]
        self._flat = Flat(self._parameters)
        kept = statistics(model)
        self._statistics = Flat(kept) if kept else None
        self._split = self._flat.values.numel()
        extra = 0 if self._statistics is None else self._statistics.values.numel()
        dtype = self._flat.values.dtype
        if self._statistics is not None:
            dtype = torch.promote_types(dtype, self._statistics.values.dtype)
        self.values = torch.zeros(self._split + extra, dtype=dtype)
        self.sections: list[WeightRange] = []
        start = 0
        for group in groups:
            stop = start + sum(parameter.numel() for parameter in group["params"])
            self.sections.append(WeightRange(start, stop, group.get("lr_mult", 1.0), group["weight_decay"]))
            start = stop
        if extra:
            self.sections.append(WeightRange(start, start + extra, averaged=True))

    @property
    def size(self) -> int:
        """Length of the vector."""
        return self.values.numel()

    def parameters_of(self, values: Tensor) -> Tensor:
        """Return the part of a vector [size] that belongs to the parameters, as a view."""
        return values[: self._split]

    def collect(self) -> Tensor:
        """Copy the model into `values`, and return `values`."""
        self._flat.collect()
        self.values[: self._split].copy_(self._flat.values)
        self._collect_statistics(self.values)
        return self.values

    def spread(self, *, statistics: bool = True) -> None:
        """Copy `values` into the model, with or without the statistics."""
        self._flat.values.copy_(self.values[: self._split])
        self._flat.spread()
        if statistics and self._statistics is not None:
            self._statistics.values.copy_(self.values[self._split :])
            self._statistics.spread()

    def gradients(self, into: Tensor) -> None:
        """Write gradients (0 for a parameter without one) and statistics into a vector [size], for a push."""
        parts = torch.split_with_sizes(into[: self._split], [parameter.numel() for parameter in self._parameters])
        for part, parameter in zip(parts, self._parameters, strict=True):
            if parameter.grad is None:
                part.zero_()
            else:
                part.view(parameter.shape).copy_(parameter.grad)
        self._collect_statistics(into)

    def _collect_statistics(self, into: Tensor) -> None:
        if self._statistics is not None:
            self._statistics.collect()
            into[self._split :].copy_(self._statistics.values)
