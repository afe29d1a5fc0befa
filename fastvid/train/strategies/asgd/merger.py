"""Collects the differences that clients push, and merges those of a quorum into the weights.

A difference (a delta) is what a client's weights were minus what they are after some local steps of its own optimizer.
With c_i clips and the delta d_i of each client i that has pushed since the last merge, a merge is a step of the outer
optimizer on the gradient ``sum c_i d_i / sum c_i``. A client that pushes twice before a merge has one delta, the sum of
both. Merges add in the order of client numbers, so they do not depend on who was first.

This is the update of DiLoCo (Douillard et al. 2023, arXiv 2311.08105), with the quorum and the weights of Decoupled
DiLoCo (2026, arXiv 2604.21428).
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import SGD

from fastvid.errors import UsageError
from fastvid.train.strategies.asgd.weight_shard import OptimizerFactory, WeightShard
from fastvid.train.strategies.shared.outer_options import outer_options

ALL: Final = "all"


@dataclass(frozen=True, slots=True)
class Quorum:
    """When the deltas of some clients are merged."""

    clients: int | float | str = ALL
    # seconds from then on in which further clients are awaited; none are once all that work are in.
    grace_s: float = 0.0

    def __post_init__(self) -> None:
        number = isinstance(self.clients, int) and not isinstance(self.clients, bool) and self.clients >= 1
        if not (number or self.clients == ALL or (isinstance(self.clients, float) and 0 < self.clients < 1)):
            raise UsageError(
                f"sync option quorum is {self.clients!r}",
                hint=f"use a number of clients from 1, a fraction of them between 0 and 1, or {ALL}",
            )
        if not 0 <= self.grace_s < math.inf:
            raise UsageError(f"sync option grace_s is {self.grace_s}, expected at least 0 seconds")

    def needed(self, working: int) -> int:
        """Return the clients needed while `working` clients work."""
        if isinstance(self.clients, str):
            return max(1, working)
        if isinstance(self.clients, float):
            # The product of 0.6 and 5 is above 3.
            return max(1, math.ceil(self.clients * working - 1e-9))
        return max(1, min(self.clients, working))


@dataclass(frozen=True, slots=True)
class OuterStep:
    """The optimizer of merges, named as in ``sync=kavg``."""

    kind: str = "nesterov"
    momentum: float | None = None
    lr: float | None = None

    def __post_init__(self) -> None:
        self._resolved()
        if self.kind == "none" and (self.momentum, self.lr) != (None, None):
            raise UsageError(
                "sync options outer_momentum and outer_lr have no effect with outer=none",
                hint="set sync_options.outer to nesterov or block",
            )

    def _resolved(self) -> tuple[float, float]:
        return outer_options(self.kind, self.momentum, self.lr, ("nesterov", "block", "none"))

    @property
    def rate(self) -> float:
        """The learning rate."""
        return self._resolved()[1]

    @property
    def rule(self) -> OptimizerFactory:
        """Builds the optimizer."""
        momentum, _ = self._resolved()
        # Fused, a step is one pass over memory instead of several, whose temporaries would cost more than the step.
        return functools.partial(
            SGD, lr=0.0, momentum=momentum, nesterov=self.kind == "nesterov" and momentum > 0, fused=True
        )


@dataclass(slots=True)
class Contribution:
    """What a client has pushed since the last merge."""

    delta: Tensor  # [n], the sum of its deltas; in averaged sections its latest values
    clips: int


class Merger:
    """Merges deltas into a shard. Not thread-safe.

    `clock`: returns seconds.
    """

    def __init__(
        self, shard: WeightShard, quorum: Quorum, rate: float, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._shard, self._quorum, self._rate, self._clock = shard, quorum, rate, clock
        self._pending: dict[int, Contribution] = {}  # by client
        self._complete_since: float | None = None  # when the quorum was there
        self._spare: list[Tensor] = []

    @torch.no_grad()
    def add(self, client: int, delta: Tensor, clips: int) -> Tensor:
        """Add a client's delta to the next merge.

        `delta`: [n]; kept, so it must not be used afterwards. Returns [n], a buffer that the caller may use
        instead.
        """
        found = self._pending.get(client)
        if found is None:
            self._pending[client] = Contribution(delta, clips)
            return self._spare.pop() if self._spare else torch.empty_like(delta)
        for part in self._shard.averaged:
            found.delta[part] = 0
        found.delta += delta
        found.clips += clips
        return delta

    def due(self, working: int) -> bool:
        """Return whether to merge now, while `working` clients work; call it whenever either may have changed."""
        brought = len(self._pending)
        if not brought or brought < self._quorum.needed(working):
            self._complete_since = None
            return False
        now = self._clock()
        if self._complete_since is None:
            self._complete_since = now
        return brought >= working or now - self._complete_since >= self._quorum.grace_s

    @torch.no_grad()
    def merge(self, working: int) -> list[int]:
        """Merge what is pending, and return the clients that it is from."""
        clients = sorted(self._pending)
        parts = [self._pending[client] for client in clients]
        total = sum(part.clips for part in parts)
        mean = parts[0].delta
        if len(parts) > 1:
            mean.mul_(parts[0].clips / total)
            for part in parts[1:]:
                mean.add_(part.delta, alpha=part.clips / total)
        self._shard.step(mean, self._rate, min(1.0, len(parts) / max(1, working)))
        self._spare += [part.delta for part in parts]
        self._pending.clear()
        self._complete_since = None
        return clients

    def state_dict(self) -> dict[str, Any]:
        """Return what is pending, by client."""
        return {
            "pending": {
                client: {"delta": part.delta.clone(), "clips": part.clips} for client, part in self._pending.items()
            }
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state; the clients that pushed what is pending need not be there any more."""
        self._pending = {
            int(client): Contribution(part["delta"].clone(), int(part["clips"]))
            for client, part in state["pending"].items()
        }
        self._complete_since = None
