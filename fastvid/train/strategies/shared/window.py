"""Numbers that each rank adds up by itself and that all ranks bring together now and then."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor


class Window:
    """Sums over ranks and over some stretch of the run. What is decided from `gather` is decided alike on every rank.

    Args:
        size: Numbers.
        device: Where they are added up, so that adding waits for nothing.
        total: Sums a CPU tensor over the ranks.
    """

    def __init__(self, size: int, device: torch.device, total: Callable[[Tensor], Callable[[], Tensor]]) -> None:
        self._own = torch.zeros(size, dtype=torch.float64, device=device)
        self._gathered = torch.zeros(size, dtype=torch.float64)
        self._total = total
        self._added = False

    def add(self, values: Tensor) -> None:
        """Adds this rank's numbers, [size]."""
        self._own += values
        self._added = True

    def gather(self) -> list[float]:
        """The sums over all ranks since `clear`. Every rank must call it at the same place."""
        if self._added:
            self._gathered += self._total(self._own.cpu())()
            self._own.zero_()
            self._added = False
        return [float(value) for value in self._gathered]

    def clear(self) -> None:
        """Begins a new stretch."""
        self._own.zero_()
        self._gathered.zero_()
        self._added = False

    def state_dict(self) -> dict[str, Any]:
        """The sums as last gathered."""
        return {"gathered": self._gathered.tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes a state over."""
        self.clear()
        self._gathered += torch.tensor(state["gathered"], dtype=torch.float64)
