"""A range of the weights with its optimizer; every step atomically creates a new version.

A reader gets the memory of the newest version itself, without a copy. A step in place would tear what is being sent, so
a step that finds readers first moves to another buffer, and the last reader of the former one returns it. Thus a reader
delays a step at most by a copy, never by the time that sending takes, and buffers are reused, because the pages of a
new one cost more than the copy.
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

from fastvid.errors import StateError, UsageError
from fastvid.train.strategies.shared.link import crc32

OptimizerFactory = Callable[[list[dict[str, Any]]], Optimizer]
"""Builds an optimizer from its groups, for example ``functools.partial(torch.optim.SGD, lr=0.0, momentum=0.9)``."""


@dataclass(frozen=True, slots=True)
class WeightRange:
    """A range of the flat weights with separate settings."""

    start: int
    stop: int
    lr_mult: float = 1.0
    weight_decay: float = 0.0
    averaged: bool = False


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


def ranges(size: int, shards: int) -> list[tuple[int, int]]:
    """Return contiguous ranges of ``size // shards`` elements each; the last one also takes the remainder."""
    if not 1 <= shards <= size:
        raise UsageError(f"{shards} shards for {size} weights", hint="use 1 shard up to the number of weights")
    step = size // shards
    return [(step * index, size if index == shards - 1 else step * (index + 1)) for index in range(shards)]


class WeightShard:
    """The range [start, stop) of the flat weights, with its optimizer."""

    def __init__(
        self,
        start: int,
        stop: int,
        rule: OptimizerFactory,
        sections: Sequence[WeightRange] | None = None,
        *,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.start, self.stop = start, stop
        self._values = torch.zeros(stop - start, dtype=dtype)
        self._parts: list[tuple[int, int, nn.Parameter]] = []
        self.averaged: list[slice] = []
        groups, covered = [], 0
        for section in sections if sections is not None else [WeightRange(start, stop)]:
            low, high = max(section.start, start) - start, min(section.stop, stop) - start
            if low >= high:
                continue
            covered += high - low
            if section.averaged:
                self.averaged.append(slice(low, high))
                continue
            # A view, so that the optimizer updates the memory that readers get.
            parameter = nn.Parameter(self._values[low:high])
            self._parts.append((low, high, parameter))
            groups.append({"params": [parameter], "lr_mult": section.lr_mult, "weight_decay": section.weight_decay})
        if covered != stop - start:
            raise UsageError(f"sections do not cover weights {start} to {stop} exactly once")
        self.optimizer = rule(groups) if groups else None
        self._lock = threading.Lock()
        self._version = -1  # before the weights are initialized
        self._snapshot: Snapshot | None = None  # of the newest version, once it was read
        self._readers: dict[Snapshot, int] = {}
        self._spare: list[Tensor] = []

    @property
    def numel(self) -> int:
        """Length of the range."""
        return self.stop - self.start

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

        `gradient`: [n]; in averaged sections, values instead.
        """
        with self._lock:
            self._leave_to_readers()
            if self.optimizer is not None:
                for group in self.optimizer.param_groups:
                    group["lr"] = rate * group["lr_mult"]
                for low, high, parameter in self._parts:
                    parameter.grad = gradient[low:high].to(parameter)
                self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=True)  # the caller reuses its buffer
            for part in self.averaged:
                self._values[part].lerp_(gradient[part].to(self._values), share)
            self._version, self._snapshot = self._version + 1, None
            return self._version

    @contextlib.contextmanager
    def reading(self) -> Iterator[Snapshot]:
        """Return the newest version, which is not modified during the block."""
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
                "start": self.start,
                "stop": self.stop,
                "version": self._version,
                "values": self._values.clone(),
                "optimizer": None if self.optimizer is None else _copied(self.optimizer.state_dict()),
            }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state."""
        if (state["start"], state["stop"]) != (self.start, self.stop):
            raise StateError(
                f"checkpoint has weights {state['start']} to {state['stop']}, this shard {self.start} to {self.stop}",
                hint="use the number of shards that the run was started with",
            )
        with self._lock, torch.no_grad():
            self._leave_to_readers()
            self._values.copy_(state["values"])
            if self.optimizer is not None:
                self.optimizer.load_state_dict(_copied(state["optimizer"]))
            self._version, self._snapshot = int(state["version"]), None


def _copied(value: Any) -> Any:
    """Return a copy with cloned tensors, because the optimizer modifies its state in place."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_copied(item) for item in value]
    return value
