"""Rank and world size of this process."""

from __future__ import annotations

import os
from dataclasses import dataclass

from fastvid.errors import UsageError


@dataclass(frozen=True, slots=True)
class World:
    """One of `size` processes that share every global batch."""

    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise UsageError(f"rank {self.rank} is outside a world of {self.size}")

    @classmethod
    def resolve(cls, rank: int | None, world_size: int | None) -> World:
        """Return the arguments if given, else torch's process group, else torchrun's environment, else rank 0 of 1."""
        if (rank is None) != (world_size is None):
            raise UsageError(f"rank={rank} and world_size={world_size} must be given together")
        if rank is not None and world_size is not None:
            return cls(rank, world_size)
        import torch.distributed as dist

        if dist.is_available() and dist.is_initialized():
            return cls(dist.get_rank(), dist.get_world_size())
        found = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
        if found == (None, None):
            return cls()
        try:
            return cls(int(found[0] or ""), int(found[1] or ""))
        except ValueError:
            raise UsageError(f"environment has RANK={found[0]!r} and WORLD_SIZE={found[1]!r}") from None
