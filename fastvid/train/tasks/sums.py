"""`Sums`: named numbers that add up over clips, steps and ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

LOSS: Final = "loss"
CLIPS: Final = "clips"
"""The names that all sums have: the sum of the clips' losses, and the number of clips."""


class Sums(Mapping[str, Tensor]):
    """Sums over clips by name, in one vector, so that ranks add them in one message. Ordered.

    Args:
        names: Names of the sums; LOSS and CLIPS are among them.
        vector: float64 [names], on the device of the clips.

    Attributes:
        names: Their names.
        vector: The sums in one tensor.
    """

    def __init__(self, names: Sequence[str], vector: Tensor) -> None:
        self.names, self.vector = tuple(names), vector

    @classmethod
    def over(cls, rows: Mapping[str, Tensor], counted: Tensor) -> Sums:
        """Sum numbers of clips.

        Args:
            rows: For each name one number per clip, [b]; LOSS is among them.
            counted: Which clips count, bool [b]; numbers of others may be anything, also NaN.
        """
        numbers = [value.double() for value in rows.values()]
        stacked = torch.stack([*numbers, torch.ones_like(numbers[0])])
        return cls([*rows, CLIPS], torch.where(counted, stacked, 0.0).sum(1))

    def __getitem__(self, name: str) -> Tensor:
        return self.vector[self.names.index(name)] if name in self.names else self._unknown(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __add__(self, other: Sums) -> Sums:
        assert self.names == other.names, (self.names, other.names)
        return Sums(self.names, self.vector + other.vector)

    def select(self, *names: str) -> Tensor:
        """Return some of the sums as a vector, float64 [names]."""
        return torch.stack([self[name] for name in names])

    def numbers(self, vector: Tensor | None = None) -> dict[str, float]:
        """Return the sums as plain numbers by name; `vector` is used instead of the own vector if given."""
        return dict(zip(self.names, (self.vector if vector is None else vector).tolist(), strict=True))

    def _unknown(self, name: str) -> Tensor:
        raise KeyError(f"there is no sum {name!r}; there are {', '.join(self.names)}")
