"""A model as one vector on the CPU, and the server's copy of it with its optimizer.

Every step atomically creates a new version. A reader, such as a thread that sends weights to a client, gets the memory
of the newest version, without a copy. A step in place would change weights while they are sent. So a step that finds
readers first copies the weights to another buffer and updates them there; the last reader of the old buffer returns it
for reuse. A reader thus delays a step at most by a copy, never by the time that sending takes. Buffers are reused,
because allocating the pages of a new buffer costs more than the copy.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fastvid.errors import StateError
from fastvid.train.records.checkpoint import snapshot
from fastvid.train.strategies.average import statistics
from fastvid.train.strategies.link import crc32

OptimizerFactory = Callable[[list[dict[str, Any]]], Optimizer]
"""Builds an optimizer from its groups, for example ``functools.partial(torch.optim.SGD, lr=0.0, momentum=0.9)``."""


@dataclass(frozen=True, slots=True)
class WeightRange:
    """A range [start, stop) of the flat weights with its own settings."""

    start: int
    stop: int
    lr_mult: float = 1.0
    weight_decay: float = 0.0
    averaged: bool = False  # a range of norm statistics: steps average pushed values instead of applying a gradient


class Snapshot:
    """A committed version of the weights.

    `version`: counted from 0, the initial weights. `values`: [n], on the CPU; must not be modified.
    """

    def __init__(self, version: int, values: Tensor) -> None:
        self.version, self.values = version, values

    @cached_property
    def checksum(self) -> int:
        """CRC-32 of the values."""
        return crc32(self.values)


class Weights:
    """Flat weights [size] on the CPU, with their optimizer. Thread-safe.

    `rule`: builds the optimizer. `sections`: ranges that cover all weights, each with its own settings; None for one
    range of all weights.
    """

    def __init__(
        self,
        size: int,
        rule: OptimizerFactory,
        sections: Sequence[WeightRange] | None = None,
        *,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self._values = torch.zeros(size, dtype=dtype)
        self._parts: list[tuple[int, int, nn.Parameter]] = []
        self._averaged: list[slice] = []
        groups, covered = [], 0
        for section in sections if sections is not None else [WeightRange(0, size)]:
            low, high = section.start, section.stop
            covered += high - low
            if section.averaged:
                self._averaged.append(slice(low, high))
                continue
            # A view, so that the optimizer updates the memory that readers get.
            parameter = nn.Parameter(self._values[low:high])
            self._parts.append((low, high, parameter))
            groups.append({"params": [parameter], "lr_mult": section.lr_mult, "weight_decay": section.weight_decay})
        assert covered == size, (covered, size)
        self.optimizer = rule(groups)
        self._lock = threading.Lock()
        self._version = -1  # before the weights are initialized
        self._snapshot: Snapshot | None = None  # of the newest version, once it was read
        self._readers: dict[Snapshot, int] = {}
        self._spare: list[Tensor] = []

    @property
    def numel(self) -> int:
        """Number of weights."""
        return len(self._values)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights."""
        return self._values.dtype

    @property
    def version(self) -> int:
        """Number of steps since the weights were initialized; -1 before that."""
        return self._version

    @property
    def initialized(self) -> bool:
        """Whether the weights are initialized."""
        return self._version >= 0

    @torch.no_grad()
    def initialize(self, values: Tensor) -> None:
        """Set the initial weights [n], version 0."""
        with self._lock:
            self._values.copy_(values)
            self._version, self._snapshot = 0, None

    @torch.no_grad()
    def step(self, gradient: Tensor, rate: float, share: float = 1.0) -> int:
        """Update the weights with a gradient, and return the version that this creates.

        `gradient`: [n]; in averaged sections it contains values, which enter the average with the weight `share`, 0 to
        1. `rate`: learning rate.
        """
        with self._lock:
            self._leave_to_readers()
            for group in self.optimizer.param_groups:
                group["lr"] = rate * group["lr_mult"]
            for low, high, parameter in self._parts:
                parameter.grad = gradient[low:high].to(parameter)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)  # the caller reuses its buffer
            for part in self._averaged:
                self._values[part].lerp_(gradient[part].to(self._values), share)
            self._version, self._snapshot = self._version + 1, None
            return self._version

    @contextlib.contextmanager
    def reading(self) -> Iterator[Snapshot]:
        """Return the newest version of the weights, whose memory does not change during the block."""
        with self._lock:
            snapshot = self._snapshot = self._snapshot or Snapshot(self._version, self._values)
            self._readers[snapshot] = self._readers.get(snapshot, 0) + 1
        try:
            yield snapshot
        finally:
            with self._lock:
                self._readers[snapshot] -= 1
                if not self._readers[snapshot]:
                    del self._readers[snapshot]
                    if snapshot.values is not self._values:
                        self._spare.append(snapshot.values)

    def _leave_to_readers(self) -> None:
        """Move to another buffer if this one is being read."""
        if self._snapshot not in self._readers:
            return
        values = self._spare.pop() if self._spare else torch.empty_like(self._values)
        self._values = values.copy_(self._values)
        for low, high, parameter in self._parts:
            parameter.data = self._values[low:high]

    def state_dict(self) -> dict[str, Any]:
        """Return a consistent state of weights, version and optimizer."""
        with self._lock:
            return {
                "version": self._version,
                "values": self._values.clone(),
                "optimizer": snapshot(self.optimizer.state_dict()),
            }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state."""
        if len(state["values"]) != self.numel:
            raise StateError(
                f"checkpoint has {len(state['values'])} weights, the model {self.numel}",
                hint="use the model that wrote it, or another run.out",
            )
        with self._lock, torch.no_grad():
            self._leave_to_readers()
            self._values.copy_(state["values"])
            self.optimizer.load_state_dict(snapshot(state["optimizer"]))
            self._version, self._snapshot = int(state["version"]), None


class Vector:
    """Copies a model to and from flat vectors, which clients and servers exchange.

    A vector has the parameters in the order of the optimizer's groups, then the norm statistics. On the CPU each tensor
    is copied to its range of the vector. On another device the tensors are first joined there, by one kernel, and the
    joined buffer is copied at once; vectors are then in pinned memory, to avoid a further copy.

    `dtype`: float64 if any tensor is float64, else float32.
    """

    def __init__(self, optimizer: Optimizer, model: nn.Module) -> None:
        groups = optimizer.param_groups
        self._parameters: list[nn.Parameter] = [parameter for group in groups for parameter in group["params"]]
        self._statistics = statistics(model)
        tensors: list[Tensor] = [*self._parameters, *self._statistics]
        self._sizes = [tensor.numel() for tensor in tensors]
        self.size = sum(self._sizes)
        wide = any(tensor.dtype == torch.float64 for tensor in tensors)
        self.dtype = torch.float64 if wide else torch.float32
        device = tensors[0].device
        # The joined buffer on a device other than the CPU.
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
        """Return views of a vector with the shapes of `tensors`, which are the vector's first ones, in order."""
        parts = torch.split_with_sizes(values, self._sizes)
        return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=False)]
