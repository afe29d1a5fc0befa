"""How a parameter server treats clients of different speed."""

from __future__ import annotations

from dataclasses import dataclass

from fastvid.errors import UsageError


@dataclass(frozen=True, slots=True)
class Policy:
    """Options of a server; the defaults are plain asynchronous SGD."""

    staleness_aware: bool = False
    # maximum number of pushes by which a client may be ahead of the slowest, at least 1: stale synchronous
    # parallel (Ho et al. 2013). The reply to a client at the bound is delayed until the slowest has caught up.
    # With P clients, a gradient pushed in the step after its fetch is then stale by at most (2 bound - 1) (P - 1)
    # versions.
    bound: int | None = None

    def __post_init__(self) -> None:
        if self.bound is not None and self.bound < 1:
            raise UsageError(f"bound is {self.bound}", hint="set it to at least 1")

    def rate(self, rate: float, staleness: int) -> float:
        """Return the learning rate for a push of that staleness."""
        return rate / max(1, staleness) if self.staleness_aware else rate

    def may_continue(self, clock: int, slowest: int) -> bool:
        """Return whether a client with `clock` pushes may compute the next if the slowest has `slowest`."""
        return self.bound is None or clock - slowest < self.bound
