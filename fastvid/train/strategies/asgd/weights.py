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
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fastvid.errors import StateError
from fastvid.train.parts.optim import load_optimizer
from fastvid.train.records.checkpoint import snapshot
from fastvid.train.strategies.average import statistics
from fastvid.train.strategies.link import crc32

OptimizerFactory = Callable[[list[dict[str, Any]]], Optimizer]
"""Builds an optimizer from its groups, for example ``functools.partial(torch.optim.SGD, lr=0.0, momentum=0.9)``."""


class Snapshot:
    """A committed version of the weights.

    `version`: counted from 0, the initial weights. `values`: [n], on the CPU; must not be modified. `readers`: number
    of threads that read them now.
    """

    def __init__(self, version: int, values: Tensor) -> None:
        self.version, self.values, self.readers = version, values, 0

    @cached_property
    def checksum(self) -> int:
        """CRC-32 of the values."""
        return crc32(self.values)


class Weights:
    """Flat weights [size] on the CPU, with their optimizer. Thread-safe.

    `groups`: settings of the optimizer's parameter groups, and the ``size`` of each, in the order of the weights; the
    weights after them are norm statistics, whose pushed values steps average instead of applying a gradient. `rule`:
    builds the optimizer. `version`: number of steps since the weights were initialized; -1 before that.
    """

    def __init__(
        self, size: int, rule: OptimizerFactory, groups: Sequence[Mapping[str, Any]], *, dtype: torch.dtype
    ) -> None:
        self._values = torch.zeros(size, dtype=dtype)
        sizes = [group["size"] for group in groups]
        self._sizes = [*sizes, size - sum(sizes)]
        # Views, so that the optimizer updates the memory that readers get.
        self._parameters = [nn.Parameter(part) for part in self._split(self._values)[:-1]]
        self.optimizer = rule([{**group, "params": [own]} for group, own in zip(groups, self._parameters, strict=True)])
        self._lock = threading.Lock()
        self.version = -1
        self._snapshot: Snapshot | None = None  # of the newest version, once it was read
        self._spare: list[Tensor] = []

    def _split(self, values: Tensor) -> tuple[Tensor, ...]:
        """Return views of a vector [size]: one for each group, and the norm statistics."""
        return torch.split_with_sizes(values, self._sizes)

    def buffer(self) -> Tensor:
        """Return a new vector [size] for weights or a gradient, uninitialized."""
        return torch.empty_like(self._values)

    @property
    def initialized(self) -> bool:
        """Whether the weights are initialized."""
        return self.version >= 0

    @torch.no_grad()
    def initialize(self, values: Tensor) -> None:
        """Set the initial weights [n], version 0."""
        with self._lock:
            self._values.copy_(values)
            self.version, self._snapshot = 0, None

    @torch.no_grad()
    def step(self, gradient: Tensor, rate: float, share: float = 1.0) -> int:
        """Update the weights with a gradient, and return the version that this creates.

        `gradient`: [n]; for the norm statistics it contains values, which enter their average with the weight `share`,
        0 to 1. `rate`: learning rate.
        """
        with self._lock:
            self._leave_to_readers()
            for group in self.optimizer.param_groups:
                group["lr"] = rate * group["lr_mult"]
            *gradients, statistics = self._split(gradient.to(self._values))
            for parameter, own in zip(self._parameters, gradients, strict=True):
                parameter.grad = own
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)  # the caller reuses its buffer
            self._split(self._values)[-1].lerp_(statistics, share)
            self.version, self._snapshot = self.version + 1, None
            return self.version

    @contextlib.contextmanager
    def reading(self) -> Iterator[Snapshot]:
        """Return the newest version of the weights, whose memory does not change during the block."""
        with self._lock:
            snapshot = self._snapshot = self._snapshot or Snapshot(self.version, self._values)
            snapshot.readers += 1
        try:
            yield snapshot
        finally:
            with self._lock:
                snapshot.readers -= 1
                if not snapshot.readers and snapshot.values is not self._values:
                    self._spare.append(snapshot.values)

    def _leave_to_readers(self) -> None:
        """Move to another buffer if this one is being read."""
        if self._snapshot is None or not self._snapshot.readers:
            return
        values = self._spare.pop() if self._spare else torch.empty_like(self._values)
        self._values = values.copy_(self._values)
        for parameter, part in zip(self._parameters, self._split(self._values), strict=False):
            parameter.data = part

    def state_dict(self) -> dict[str, Any]:
        """Return a consistent state of weights, version and optimizer."""
        with self._lock:
            return {
                "version": self.version,
                "values": self._values.clone(),
                "optimizer": snapshot(self.optimizer.state_dict()),
            }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state."""
        if len(state["values"]) != len(self._values):
            raise StateError(
                f"checkpoint has {len(state['values'])} weights, the model {len(self._values)}",
                hint="use the model that wrote it, or another run.out",
            )
        with self._lock, torch.no_grad():
            self._leave_to_readers()
            self._values.copy_(state["values"])
            load_optimizer(self.optimizer, snapshot(state["optimizer"]))
            self.version, self._snapshot = int(state["version"]), None


class Vector:
    """Copies a model to and from flat vectors, which clients and servers exchange.

    A vector has the parameters in the order of the optimizer's groups, then the norm statistics. On the CPU each tensor
    is copied to its range of the vector. On another device the tensors are first joined there, by one kernel, and the
    joined buffer is copied at once; vectors are then in pinned memory, to avoid a further copy.

    `dtype`: float64 if any tensor is float64, else float32. `groups`: the settings of the optimizer's groups, and the
    ``size`` of each, see `Weights`.
    """

    def __init__(self, optimizer: Optimizer, model: nn.Module) -> None:
        groups = optimizer.param_groups
        self.groups = [
            {
                "size": sum(parameter.numel() for parameter in group["params"]),
                "lr_mult": group.get("lr_mult", 1.0),
                "weight_decay": group["weight_decay"],
            }
            for group in groups
        ]
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
