"""What a server does with staleness."""

from __future__ import annotations

from dataclasses import dataclass

from fastvid.errors import UsageError


@dataclass(frozen=True, slots=True)
class Policy:
    """Rules of a server; without any of them, plain asynchronous SGD.

    Attributes:
        staleness_aware: Divides the rate of a push by its staleness (Zhang et al. 2015, arXiv 1511.05950). With a
            constant delay of tau versions plain descent is stable while rate * curvature < 2 sin(pi / (4 tau + 2)),
            which falls as 1 / tau, and so does this rate.
        bound: Most pushes by which a client may be ahead of the slowest, at least 1: stale synchronous parallel (Ho et
            al. 2013). A client that is as far ahead gets its answer when the slowest has caught up. Among P clients a
            gradient that is pushed in the step after its fetch is then stale by at most (2 bound - 1) (P - 1) versions.
        elasticity: In (0, 1): clients exchange weights instead of pushing gradients (EASGD, Zhang et al. 2015): both
            move towards each other by this part of their difference.

    Raises:
        UsageError: A value is out of range, or two do not go together.
    """

    staleness_aware: bool = False
    bound: int | None = None
    elasticity: float | None = None

    def __post_init__(self) -> None:
        if self.bound is not None and self.bound < 1:
            raise UsageError(f"bound is {self.bound}", hint="1 is the least: nobody is more than one push ahead")
        if self.elasticity is not None and not 0 < self.elasticity < 1:
            raise UsageError(f"elasticity is {self.elasticity}", hint="it lies between 0 and 1, both excluded")
        if self.elasticity is not None and self.staleness_aware:
            raise UsageError("staleness_aware and elasticity are both set", hint="an exchange has no staleness")

    def rate(self, rate: float, staleness: int) -> float:
        """The rate that a push of that staleness moves the weights with."""
        return rate / max(1, staleness) if self.staleness_aware else rate

    def may_go_on(self, clock: int, slowest: int) -> bool:
        """Whether a client with so many pushes may compute the next, the slowest having `slowest`."""
        return self.bound is None or clock - slowest < self.bound
