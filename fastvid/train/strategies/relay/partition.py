"""Which shards belong to which partition, and a dataset that shows one partition from a cache that is read once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fastvid.errors import UsageError
from fastvid.format.dataset import Dataset
from fastvid.train.strategies.relay.resident_storage import Resident


def deal_shards(samples: Sequence[int], num_partitions: int) -> list[tuple[int, ...]]:
    """Shards of each partition, dealt so that partitions are of nearly equal size, as the slowest sets the pace.

    Largest shard first, each to the partition with fewest samples so far: at most 4/3 of the best possible largest
    partition (Graham 1969).

    Args:
        samples: Samples of each shard that are trained on; shards without any belong to nobody.
        num_partitions: S.

    Raises:
        UsageError: There are fewer shards than partitions.
    """
    useful = [shard for shard, count in enumerate(samples) if count]
    if len(useful) < num_partitions:
        raise UsageError(
            f"{len(useful)} shards hold the split, fewer than {num_partitions} partitions",
            hint="use fewer stages, or shard the videos into more files (--samples-per-shard)",
        )
    dealt: list[list[int]] = [[] for _ in range(num_partitions)]
    sizes = [0] * num_partitions
    for shard in sorted(useful, key=lambda shard: (-samples[shard], shard)):
        smallest = sizes.index(min(sizes))
        dealt[smallest].append(shard)
        sizes[smallest] += samples[shard]
    return [tuple(sorted(shards)) for shards in dealt]


def samples_by_shard(dataset: Dataset) -> list[int]:
    """Selected samples of each shard of the generation."""
    shards, _ = dataset.locate(np.arange(len(dataset)))
    return [int(count) for count in np.bincount(shards, minlength=len(dataset.generation.shards))]


class Partition(Dataset):
    """The samples of some shards, read through a cache.

    Args:
        whole: The selection that is partitioned.
        shards: Shards that are shown.
        cache: Where their bytes come from; shared by all datasets of a stage at one address.
    """

    def __init__(self, whole: Dataset, shards: Sequence[int], cache: Resident) -> None:
        super().__init__(
            whole.storage.url, split=whole.split, where=whole.where, generation=whole.generation.number
        )  # fmt: skip
        # Only now: annotations are no training data.
        self.storage = cache
        self.shards = tuple(shards)
        owner, _ = self.locate(np.arange(len(self)))
        self.rows = self.rows[np.isin(owner, self.shards)]

    @property
    def files(self) -> list[str]:
        """Files that training on the partition needs."""
        stems = [self.generation.shards[shard].name for shard in self.shards]
        return [f"{stem}.{suffix}" for stem in stems for suffix in ("pkt", "tar")]

    def load(self) -> None:
        """Reads them all."""
        for name in self.files:
            self.storage.map(name)
