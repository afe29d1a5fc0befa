"""Which source goes into which shard: decided before anything is encoded, so that no failure moves another sample."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from fastvid.errors import UsageError
from fastvid.sharding.sources.sources import Source

SAMPLES_PER_SHARD: Final = 1000
# Twice what shards usually hold in the end: on real footage the compact profile writes half the bytes of its sources.
SOURCE_BYTES_PER_SHARD: Final = 2 << 30


@dataclass(frozen=True, slots=True)
class JobPart:
    """One of several jobs that share the shards of a plan.

    Attributes:
        index: Which one, from 0.
        of: How many there are.
    """

    index: int
    of: int

    @classmethod
    def parse(cls, text: str) -> JobPart:
        """The part behind ``3/8``.

        Raises:
            UsageError: It is none.
        """
        found = re.fullmatch(r"(\d+)/(\d+)", text, re.ASCII)
        if not found or int(found[1]) >= int(found[2]):
            raise UsageError(f"part {text!r} is none", hint="I/N with I from 0 to N - 1, such as 0/8 to 7/8")
        return cls(int(found[1]), int(found[2]))

    def __str__(self) -> str:
        return f"{self.index}/{self.of}"

    def has(self, shard: int) -> bool:
        """Whether this part does the shard; shards are mixed, so every N-th makes parts of equal weight."""
        return shard % self.of == self.index


def plan_shards(
    sources: Sequence[Source],
    *,
    seed: int = 0,
    samples: int = SAMPLES_PER_SHARD,
    source_bytes: int = SOURCE_BYTES_PER_SHARD,
) -> list[list[Source]]:
    """Assigns sources to shards, classes mixed, each shard bounded by a number of sources and of their bytes.

    The order is that of a keyed hash of the key: it depends on the sources and the seed, not on how they were listed.

    Args:
        sources: Sources that can be tried.
        seed: Another seed mixes differently.
        samples: Most sources in a shard.
        source_bytes: Most bytes of sources in a shard that holds more than one.
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
