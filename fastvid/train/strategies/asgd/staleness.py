"""How a parameter server treats stale gradients."""

from __future__ import annotations

from dataclasses import dataclass

from fastvid.errors import UsageError


@dataclass(frozen=True, slots=True)
class Policy:
    """Options of a server; the defaults are plain asynchronous SGD.

    Attributes:
        staleness_aware: Divide the rate of a push by its staleness (Zhang et al. 2015, arXiv 1511.05950). With a
            constant delay of tau versions, gradient descent is stable if rate * curvature < 2 sin(pi / (4 tau + 2)),
            which decreases as 1 / tau, as this rate does.
        bound: Maximum number of pushes by which a client may be ahead of the slowest, at least 1: stale synchronous
            parallel (Ho et al. 2013). The reply to a client at the bound is delayed until the slowest has caught up.
            With P clients, a gradient pushed in the step after its fetch is then stale by at most
            (2 bound - 1) (P - 1) versions.
        elasticity: In (0, 1): clients exchange weights instead of pushing gradients (EASGD, Zhang et al. 2015); both
            sides move towards each other by this fraction of their difference.

    Raises:
        UsageError: If a value is out of range or two options conflict.
    """

    staleness_aware: bool = False
    bound: int | None = None
    elasticity: float | None = None

    def __post_init__(self) -> None:
        if self.bound is not None and self.bound < 1:
            raise UsageError(f"bound is {self.bound}", hint="set it to at least 1")
        if self.elasticity is not None and not 0 < self.elasticity < 1:
            raise UsageError(f"elasticity is {self.elasticity}", hint="set it between 0 and 1, both excluded")
        if self.elasticity is not None and self.staleness_aware:
            raise UsageError(
                "staleness_aware and elasticity are both set", hint="remove one: exchanged weights are never stale"
            )

    def rate(self, rate: float, staleness: int) -> float:
        """Return the learning rate for a push of that staleness."""
        return rate / max(1, staleness) if self.staleness_aware else rate

    def may_continue(self, clock: int, slowest: int) -> bool:
        """Return whether a client with `clock` pushes may compute the next if the slowest has `slowest`."""
        return self.bound is None or clock - slowest < self.bound
