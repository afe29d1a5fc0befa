"""Numbers that each rank sums locally and that are occasionally summed over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor


class RankSums:
    """Sums over ranks and over a part of the run. `gather` returns the same values on every rank."""

    def __init__(self, size: int, device: torch.device, total: Callable[[Tensor], Callable[[], Tensor]]) -> None:
        self._own = torch.zeros(size, dtype=torch.float64, device=device)
        self._gathered = torch.zeros(size, dtype=torch.float64)
        self._total = total
        self._added = False

    def add(self, values: Tensor) -> None:
        """Add this rank's values, [size]."""
        self._own += values
        self._added = True

    def gather(self) -> list[float]:
        """Return the sums over all ranks since `clear`. Every rank must call it at the same point."""
        if self._added:
            self._gathered += self._total(self._own.cpu())()
            self._own.zero_()
            self._added = False
        return [float(value) for value in self._gathered]

    def clear(self) -> None:
        """Reset the sums."""
        self._own.zero_()
        self._gathered.zero_()
        self._added = False

    def state_dict(self) -> dict[str, Any]:
        """Return the sums as last gathered."""
        return {"gathered": self._gathered.tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state."""
        self.clear()
        self._gathered += torch.tensor(state["gathered"], dtype=torch.float64)
