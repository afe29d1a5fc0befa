"""A range of the weights with its optimizer; every change atomically creates a new version.

A snapshot is never modified after it is published, and publishing is a single assignment. A reader with a snapshot
therefore sends one committed version, whatever is pushed in the meantime.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fastvid.errors import StateError, UsageError
from fastvid.train.strategies.asgd.staleness import Policy
from fastvid.train.strategies.shared.link import crc32

OptimizerFactory = Callable[[list[dict[str, Any]]], Optimizer]
"""Builds an optimizer from its groups, for example ``functools.partial(torch.optim.SGD, lr=0.0, momentum=0.9)``."""


@dataclass(frozen=True, slots=True)
class WeightRange:
    """A range of the flat weights with separate settings.

    Attributes:
        start: First index.
        stop: End of the range, exclusive.
        lr_mult: Learning rate multiplier.
        weight_decay: Weight decay of the optimizer.
        averaged: Whether these are norm statistics instead of weights: a client sends its own values, and the shard
            keeps a running average of them.
    """

    start: int
    stop: int
    lr_mult: float = 1.0
    weight_decay: float = 0.0
    averaged: bool = False


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A committed version of the weights.

    Attributes:
        version: Counted from 0, the initial weights.
        values: [n]; must not be modified.
        checksum: CRC-32 of the values.
    """

    version: int
    values: Tensor
    checksum: int


@dataclass(frozen=True, slots=True)
class Commit:
    """The result of a push or an exchange.

    Attributes:
        version: The version that it created.
        staleness: Versions committed between the weights that the gradient was computed from and this one.
    """

    version: int
    staleness: int


def ranges(size: int, shards: int) -> list[tuple[int, int]]:
    """Return contiguous ranges of ``size // shards`` elements each; the last one also takes the remainder.

    Raises:
        UsageError: If there are more shards than elements.
    """
    if not 1 <= shards <= size:
        raise UsageError(f"{shards} shards for {size} weights", hint="use 1 shard up to the number of weights")
    step = size // shards
    return [(step * index, size if index == shards - 1 else step * (index + 1)) for index in range(shards)]


class WeightShard:
    """The range [start, stop) of the flat weights, with its optimizer.

    Args:
        start: First index.
        stop: End of the range, exclusive.
        rule: Builds the optimizer.
        sections: Sections that cover the flat weights; None for a single section.
        dtype: Dtype of the weights.
        device: Device of the weights and the optimizer state; messages go through the CPU.
    """

    def __init__(
        self,
        start: int,
        stop: int,
        rule: OptimizerFactory,
        sections: Sequence[WeightRange] | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.start, self.stop = start, stop
        self._values = torch.zeros(stop - start, dtype=dtype, device=device)
        self._parts: list[tuple[int, int, nn.Parameter]] = []
        self._averaged: list[slice] = []
        groups, covered = [], 0
        for section in sections if sections is not None else [WeightRange(start, stop)]:
            low, high = max(section.start, start) - start, min(section.stop, stop) - start
            if low >= high:
                continue
            covered += high - low
            if section.averaged:
                self._averaged.append(slice(low, high))
                continue
            # A view, so that the optimizer updates the memory that snapshots are copied from.
            parameter = nn.Parameter(self._values[low:high])
            self._parts.append((low, high, parameter))
            groups.append({"params": [parameter], "lr_mult": section.lr_mult, "weight_decay": section.weight_decay})
        if covered != stop - start:
            raise UsageError(f"sections do not cover weights {start} to {stop} exactly once")
        self.optimizer = rule(groups) if groups else None
        self._lock = threading.Lock()
        self._snapshot: Snapshot | None = None

    @property
    def numel(self) -> int:
        """Length of the range."""
        return self.stop - self.start

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights."""
        return self._values.dtype

    @property
    def snapshot(self) -> Snapshot:
        """The newest version."""
        assert self._snapshot is not None
        return self._snapshot

    @property
    def initialised(self) -> bool:
        """Whether the weights are initialized."""
        return self._snapshot is not None

    @torch.no_grad()
    def initialise(self, values: Tensor) -> None:
        """Set the initial weights, version 0."""
        with self._lock:
            self._values.copy_(values)
            self._publish(0)

    @torch.no_grad()
    def push(self, gradient: Tensor, since: int, rate: float, policy: Policy, share: float = 1.0) -> Commit:
        """Update the weights with a gradient.

        Args:
            gradient: [n]; in averaged sections, the client's own values.
            since: Version that it was computed from.
            rate: Learning rate before the policy is applied.
            policy: Adapts the rate to the staleness.
            share: Weight of this client's values in averaged sections: one over the number of clients.
        """
        with self._lock:
            version = self.snapshot.version
            staleness = version - since
            rate = policy.rate(rate, staleness)
            if self.optimizer is not None:
                for group in self.optimizer.param_groups:
                    group["lr"] = rate * group["lr_mult"]
                for low, high, parameter in self._parts:
                    parameter.grad = gradient[low:high].to(parameter)
                self.optimizer.step()
            for part in self._averaged:
                self._values[part].lerp_(gradient[part].to(self._values), share)
            self._publish(version + 1)
            return Commit(version + 1, staleness)

    @torch.no_grad()
    def exchange(self, values: Tensor, elasticity: float, share: float = 1.0) -> Commit:
        """Move the weights towards a client's by `elasticity` times the difference.

        Args:
            values: [n], the client's weights; overwritten with the scaled difference, which the client subtracts from
                its own. In averaged sections it is 0.
            elasticity: Fraction of the difference.
            share: See `push`.
        """
        with self._lock:
            version = self.snapshot.version
            given = values.to(self._values)
            difference = (given - self._values).mul_(elasticity)
            for part in self._averaged:
                self._values[part].lerp_(given[part], share)
                difference[part] = 0
            for low, high, _ in self._parts:
                self._values[low:high] += difference[low:high]
            values.copy_(difference)
            self._publish(version + 1)
            return Commit(version + 1, 0)

    def state_dict(self) -> dict[str, Any]:
        """Return a consistent state of weights, version and optimizer."""
        with self._lock:
            return {
                "start": self.start,
                "stop": self.stop,
                "version": self.snapshot.version,
                "values": self.snapshot.values,
                "optimizer": None if self.optimizer is None else _copied(self.optimizer.state_dict()),
            }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state.

        Raises:
            StateError: If it is of another range.
        """
        if (state["start"], state["stop"]) != (self.start, self.stop):
            raise StateError(
                f"checkpoint has weights {state['start']} to {state['stop']}, this shard {self.start} to {self.stop}",
                hint="use the number of shards that the run was started with",
            )
        with self._lock, torch.no_grad():
            self._values.copy_(state["values"])
            if self.optimizer is not None:
                self.optimizer.load_state_dict(_copied(state["optimizer"]))
            self._publish(int(state["version"]))

    def _publish(self, version: int) -> None:
        values = self._values.to("cpu", copy=True)
        self._snapshot = Snapshot(version, values, crc32(values))


def _copied(value: Any) -> Any:
    """Return a copy with cloned tensors, because the optimizer modifies its state in place."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_copied(item) for item in value]
    return value
