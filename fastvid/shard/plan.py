"""Which source goes into which shard: decided before anything is encoded, so that no failure moves another sample."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Final

from fastvid.shard.sources import Source

SAMPLES_PER_SHARD: Final = 1000
# Twice what shards usually hold in the end: on real footage the compact profile writes half the bytes of its sources.
SOURCE_BYTES_PER_SHARD: Final = 2 << 30


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
