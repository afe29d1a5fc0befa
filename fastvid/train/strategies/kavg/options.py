"""Checks the options of K-step averaging, alone and together."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Final

from fastvid.errors import UsageError
from fastvid.train.strategies.kavg.period import Period

NODE: Final = "node"
INTEGERS: Final = ("int8", "int4")
"""Compressions whose rounding a measurement of the gradient noise, or averages of groups, would notice."""


@dataclass(frozen=True, slots=True)
class Streaming:
    """How averages are spread over a round."""

    fragments: int
    delay: int
    mixing: float

    @property
    def active(self) -> bool:
        """Whether ranks have no common model at the end of a round."""
        return self.fragments > 1 or self.delay > 0


def check_together(streaming: Streaming, period: Period, compress: str, *, group_size: int, moments: str) -> None:
    """Check options that need each other."""
    shortest = min(steps for steps, _ in period.table)
    for name, value, least, most in (
        ("fragments", streaming.fragments, 1, shortest),
        ("delay", streaming.delay, 0, shortest - 1),
    ):
        if not least <= value <= most:
            raise UsageError(
                f"sync option {name} is {value}, expected {least} to {most}, because a round has {shortest} steps",
                hint=f"change sync_options.{name}, or set a larger sync_options.period",
            )
    if not 0 <= streaming.mixing < 1:
        raise UsageError(f"sync option mixing is {streaming.mixing}, expected 0 <= x < 1")
    if streaming.mixing and not streaming.delay:
        raise UsageError("sync option mixing has no effect without a delay", hint="set sync_options.delay")
    for wrong, what in (
        (group_size > 1 and (streaming.active or compress in INTEGERS), "group_size"),
        (moments != "local" and streaming.active, f"moments={moments}"),
        (period.adaptive and streaming.active, "adapt=loss"),
    ):
        if wrong:
            raise UsageError(
                f"sync option {what} cannot be combined with fragments, a delay or compression to integers",
                hint="remove it, or use fragments=1, delay=0 and compress=none",
            )


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
