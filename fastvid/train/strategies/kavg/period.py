"""The number of local steps per round of K-step averaging."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final, Literal, get_args

from fastvid.errors import UsageError

Adapt = Literal["none", "loss"]

_SHAPE: Final = "use a whole number of steps, or STEPS@EPOCH,... such as 1@0,8@5,32@20.5"


class Period:
    """K as a function of the samples seen and, if adaptive, of the training loss.

    With ``adapt="loss"`` K is multiplied by ``sqrt(F / F0)`` and rounded up, where F is the mean training loss of the
    last `adapt_epochs` epochs and F0 that of the first; the factor never increases. Ranks thus communicate rarely while
    the loss decreases fast and the noise of single ranks does not matter, and often at the end. This is the rule of
    AdaComm (Wang and Joshi 2018), without its additional halving when the rule does not shorten a round.

    `table`: K, or ``K@EPOCH,...`` with ascending epochs from 0.
    """

    def __init__(self, table: int | str, adapt: str = "none", adapt_epochs: float = 1.0) -> None:
        if adapt not in get_args(Adapt):
            raise UsageError(f"sync option adapt is {adapt!r}", hint=f"use one of {', '.join(get_args(Adapt))}")
        if not adapt_epochs > 0:
            raise UsageError(f"sync option adapt_epochs is {adapt_epochs}, expected more than 0")
        self.table = parse(table)
        self.adaptive = adapt == "loss"
        self._every = adapt_epochs
        self._first: float | None = None
        self._factor = 1.0
        self._looked = 0.0

    def steps(self, epochs: float) -> int:
        """Return K for the round that starts after `epochs` epochs."""
        steps = [steps for steps, epoch in self.table if epoch <= epochs][-1]
        return max(1, math.ceil(steps * self._factor))

    def due(self, epochs: float) -> bool:
        """Return whether the loss is to be observed now."""
        return self.adaptive and epochs >= self._looked + self._every

    def observe(self, loss: float, epochs: float) -> None:
        """Handle the mean training loss over all ranks since the last observation.

        It must be the same on every rank. A loss that is not finite and positive is ignored.
        """
        self._looked = epochs
        if not 0 < loss < math.inf:
            return
        if self._first is None:
            self._first = loss
        self._factor = min(self._factor, math.sqrt(loss / self._first))

    def state_dict(self) -> dict[str, Any]:
        """Return the observations so far."""
        return {"first": self._first, "factor": self._factor, "looked": self._looked}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state."""
        self._first, self._factor, self._looked = state["first"], float(state["factor"]), float(state["looked"])


def parse(table: int | str) -> tuple[tuple[int, float], ...]:
    """Parse a table into (steps, first epoch) pairs, ascending by epoch."""
    entries = []
    for part in str(table).split(","):
        steps, at, epoch = part.partition("@")
        try:
            entries.append((int(steps), float(epoch) if at else 0.0))
        except ValueError:
            raise UsageError(f"sync option period is {table!r}", hint=_SHAPE) from None
    epochs = [epoch for _, epoch in entries]
    if min(steps for steps, _ in entries) < 1 or epochs[0] != 0 or epochs != sorted(set(epochs)):
        raise UsageError(
            f"sync option period is {table!r}, expected at least 1 step, and ascending epochs from 0", hint=_SHAPE
        )
    return tuple(entries)
