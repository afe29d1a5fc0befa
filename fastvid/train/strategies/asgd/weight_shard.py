"""A range of the weights, with its optimiser: every change makes a new version, whole or not at all.

A snapshot is never written to after it is published, and publishing is one assignment; so a reader that holds one
sends one committed version, whatever is pushed meanwhile.
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

Rule = Callable[[list[dict[str, Any]]], Optimizer]
"""Makes the optimiser from its groups, such as ``functools.partial(torch.optim.SGD, lr=0.0, momentum=0.9)``."""


@dataclass(frozen=True, slots=True)
class Section:
    """Part of the flat weights with settings of its own.

    Attributes:
        start: First number.
        stop: Behind the last.
        lr_mult: Factor of the rate.
        weight_decay: As the optimiser understands it.
        averaged: Whether these are no weights but norm statistics: what a client sends is its own value, and the shard
            keeps the running average of what it is sent.
    """

    start: int
    stop: int
    lr_mult: float = 1.0
    weight_decay: float = 0.0
    averaged: bool = False


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A committed version.

    Attributes:
        version: Counted from 0, the first weights.
        values: [n]; not to be written to.
        checksum: CRC-32 of the values.
    """

    version: int
    values: Tensor
    checksum: int


@dataclass(frozen=True, slots=True)
class Commit:
    """What a push did.

    Attributes:
        version: The version that it made.
        staleness: Versions committed between the weights that the gradient is of and this one.
    """

    version: int
    staleness: int


def ranges(size: int, shards: int) -> list[tuple[int, int]]:
    """Contiguous ranges of ``size // shards`` numbers each; the last takes the rest.

    Raises:
        UsageError: There are more shards than numbers.
    """
    if not 1 <= shards <= size:
        raise UsageError(f"{shards} shards of {size} numbers", hint="from 1 to the number of weights")
    step = size // shards
    return [(step * index, size if index == shards - 1 else step * (index + 1)) for index in range(shards)]


class Shard:
    """Numbers [start, stop) of the flat weights.

    Args:
        start: First number.
        stop: Behind the last.
        rule: Makes the optimiser.
        sections: Cover the flat weights; None for one section.
        dtype: Of the weights.
        device: Where weights and the optimiser's state live; messages travel through the CPU.
    """

    def __init__(
        self,
        start: int,
        stop: int,
        rule: Rule,
        sections: Sequence[Section] | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.start, self.stop = start, stop
        self._values = torch.zeros(stop - start, dtype=dtype, device=device)
        self._parts: list[tuple[int, int, nn.Parameter]] = []
        self._averaged: list[slice] = []
        groups, covered = [], 0
        for section in sections if sections is not None else [Section(start, stop)]:
            low, high = max(section.start, start) - start, min(section.stop, stop) - start
            if low >= high:
                continue
            covered += high - low
            if section.averaged:
                self._averaged.append(slice(low, high))
                continue
            # A view: the optimiser steps the very numbers that snapshots are copied from.
            parameter = nn.Parameter(self._values[low:high])
            self._parts.append((low, high, parameter))
            groups.append({"params": [parameter], "lr_mult": section.lr_mult, "weight_decay": section.weight_decay})
        if covered != stop - start:
            raise UsageError(f"sections do not cover numbers {start} to {stop} of the weights once")
        self.optimizer = rule(groups) if groups else None
        self._lock = threading.Lock()
        self._snapshot: Snapshot | None = None

    @property
    def numel(self) -> int:
        """Numbers of this range."""
        return self.stop - self.start

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return self._values.dtype

    @property
    def snapshot(self) -> Snapshot:
        """The newest version."""
        assert self._snapshot is not None
        return self._snapshot

    @property
    def initialised(self) -> bool:
        """Whether there are weights."""
        return self._snapshot is not None

    @torch.no_grad()
    def initialise(self, values: Tensor) -> None:
        """Takes the first weights: version 0."""
        with self._lock:
            self._values.copy_(values)
            self._publish(0)

    @torch.no_grad()
    def push(self, gradient: Tensor, since: int, rate: float, policy: Policy, share: float = 1.0) -> Commit:
        """Moves the weights by a gradient.

        Args:
            gradient: [n]; where sections are averaged, the client's own values.
            since: Version that it was computed from.
            rate: Learning rate before the policy.
            policy: What staleness does to the rate.
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
        """Moves the weights towards a client's by a part of the difference, and writes that part into `values`, which
        the client subtracts from its own. In averaged sections the client's values stay. `share` is that of `push`."""
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
        """Weights, version and optimiser, of one moment."""
        with self._lock:
            return {
                "start": self.start,
                "stop": self.stop,
                "version": self.snapshot.version,
                "values": self.snapshot.values,
                "optimizer": None if self.optimizer is None else _copied(self.optimizer.state_dict()),
            }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes a state over.

        Raises:
            StateError: It is of another range.
        """
        if (state["start"], state["stop"]) != (self.start, self.stop):
            raise StateError(
                f"checkpoint holds weights {state['start']} to {state['stop']}, this shard {self.start} to {self.stop}",
                hint="start as many servers as the run was begun with",
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
    """The same with tensors of its own: the optimiser goes on writing into its state."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_copied(item) for item in value]
    return value
