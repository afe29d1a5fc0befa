"""Counts the collective operations of a rank and their bytes."""

from __future__ import annotations

from collections import Counter

from torch import Tensor


class Traffic:
    """Collective operations of one rank and the bytes passed to them, by purpose.

    A ring all-reduce over P ranks transfers 2 (P - 1) / P times these bytes over each rank's link, in each direction.

    `bytes`: bytes by purpose.
    """

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def count(self, purpose: str, message: Tensor) -> None:
        """Count a tensor passed to a collective operation."""
        self.calls[purpose] += 1
        self.bytes[purpose] += message.numel() * message.element_size()

    def as_dict(self) -> dict[str, dict[str, int]]:
        """Return ``{purpose: {"calls": ..., "bytes": ...}}``."""
        return {purpose: {"calls": self.calls[purpose], "bytes": self.bytes[purpose]} for purpose in sorted(self.calls)}
