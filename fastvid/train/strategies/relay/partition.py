"""Assigns shards to partitions, each a dataset that reads its files only once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fastvid.errors import UsageError
from fastvid.format.dataset import Dataset
from fastvid.train.strategies.relay.resident_storage import ResidentStorage


def deal_shards(samples: Sequence[int], num_partitions: int) -> list[tuple[int, ...]]:
    """Return the shards of each partition, balanced by samples: the largest one sets the pace.

    Shards are assigned largest first, each to the partition with the fewest samples so far. The largest partition is
    then at most 4/3 of the optimum (Graham 1969).

    `samples`: training samples per shard; shards without any are not assigned.
    """
    useful = [shard for shard, count in enumerate(samples) if count]
    if len(useful) < num_partitions:
        raise UsageError(
            f"only {len(useful)} shards contain samples of the split, fewer than {num_partitions} partitions",
            hint="use fewer stages, or shard the videos again with a smaller --samples-per-shard",
        )
    dealt: list[list[int]] = [[] for _ in range(num_partitions)]
    sizes = [0] * num_partitions
    for shard in sorted(useful, key=lambda shard: (-samples[shard], shard)):
        smallest = sizes.index(min(sizes))
        dealt[smallest].append(shard)
        sizes[smallest] += samples[shard]
    return [tuple(sorted(shards)) for shards in dealt]


def samples_by_shard(dataset: Dataset) -> list[int]:
    """Return the number of selected samples in each shard of the generation."""
    shards, _ = dataset.locate(np.arange(len(dataset)))
    return [int(count) for count in np.bincount(shards, minlength=len(dataset.generation.shards))]


class Partition(Dataset):
    """A dataset with the samples of some shards, read through a cache."""

    def __init__(self, whole: Dataset, shards: Sequence[int], cache: ResidentStorage) -> None:
        super().__init__(
            whole.storage.url, split=whole.split, where=whole.where, generation=whole.generation.number
        )  # fmt: skip
        # Set after the annotations are read, which the cache does not need to keep.
        self.storage = cache
        self.shards = tuple(shards)
        owner, _ = self.locate(np.arange(len(self)))
        self.rows = self.rows[np.isin(owner, self.shards)]

    @property
    def files(self) -> list[str]:
        """Names of the files that training on the partition reads."""
        stems = [self.generation.shards[shard].name for shard in self.shards]
        return [f"{stem}.{suffix}" for stem in stems for suffix in ("pkt", "tar")]

    def load(self) -> None:
        """Read all files into the cache."""
        for name in self.files:
            self.storage.map(name)
