"""Assigns sources to shards before anything is encoded, so that a failed source never moves another sample."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from fastvid.errors import UsageError
from fastvid.sharding.sources.sources import Source

SAMPLES_PER_SHARD: Final = 1000
# Twice the usual size of a shard: on real footage the compact profile writes half the bytes of its sources.
SOURCE_BYTES_PER_SHARD: Final = 2 << 30


@dataclass(frozen=True, slots=True)
class JobPart:
    """One of several jobs that divide the shards of a plan among them.

    Attributes:
        index: Number of the part, from 0.
        of: Number of parts.
    """

    index: int
    of: int

    @classmethod
    def parse(cls, text: str) -> JobPart:
        """Parse a part such as ``3/8``.

        Raises:
            UsageError: If the text is no part.
        """
        found = re.fullmatch(r"(\d+)/(\d+)", text, re.ASCII)
        if not found or int(found[1]) >= int(found[2]):
            raise UsageError(f"invalid part {text!r}", hint="use I/N with I from 0 to N - 1, such as 0/8 to 7/8")
        return cls(int(found[1]), int(found[2]))

    def __str__(self) -> str:
        return f"{self.index}/{self.of}"

    def has(self, shard: int) -> bool:
        """Return whether this part includes the shard: every N-th, because classes are mixed in every shard."""
        return shard % self.of == self.index


def plan_shards(
    sources: Sequence[Source],
    *,
    seed: int = 0,
    samples: int = SAMPLES_PER_SHARD,
    source_bytes: int = SOURCE_BYTES_PER_SHARD,
) -> list[list[Source]]:
    """Assign sources to shards, classes mixed, each shard limited in its number of sources and their bytes.

    The order is that of a keyed hash of the key: it depends on the sources and the seed, not on how they were listed.

    Args:
        sources: Sources without problems.
        seed: Seed of the order.
        samples: Maximum number of sources in a shard.
        source_bytes: Maximum total bytes of the sources of a shard; a single source may exceed it.
    """
    shards: list[list[Source]] = []
    room, weight = 0, 0
    for source in sorted(sources, key=lambda source: (_rank(source.key, seed), source.key)):
        if room == 0 or weight + source.size > source_bytes:
            shards.append([])
            room, weight = samples, 0
        shards[-1].append(source)
        room -= 1
        weight += source.size
    return shards


def _rank(key: str, seed: int) -> bytes:
    return hashlib.blake2b(f"fastvid-shards-1:{seed}:{key}".encode(), digest_size=8).digest()
