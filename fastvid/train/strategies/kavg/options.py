"""Checks the options of K-step averaging, alone and together."""

from __future__ import annotations

import os
from typing import Final

from fastvid.errors import UsageError

NODE: Final = "node"
INTEGERS: Final = ("int8", "int4")
"""Compressions whose rounding a measurement of the gradient noise, or averages of groups, would notice."""


def ranks_per_group(size: int | str, world_size: int) -> int:
    """Return the ranks per group."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if size == NODE else size
    if not isinstance(ranks, int) or ranks < 1 or world_size % ranks:
        divisors = [str(number) for number in range(1, world_size + 1) if world_size % number == 0]
        raise UsageError(
            f"sync option group_size is {size!r}, which does not divide the world size {world_size}",
            hint=f"use {', '.join(divisors)}, or {NODE!r}",
        )
    return ranks


def one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    """Raise a UsageError unless an option has one of the known values."""
    if value not in known:
        raise UsageError(f"sync option {name} is {value!r}", hint=f"use one of {', '.join(known)}")
