"""Several datasets combined into one.

Samples and shards are numbered through the datasets, in the order they were given.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from torch.utils.data import Subset

from fastvid.errors import UsageError
from fastvid.format.dataset import Dataset
from fastvid.format.shard import Shard
from fastvid.load.order.subset import resolve_subset
from fastvid.runtime.arrays import IntArray
from fastvid.runtime.checks import check_least


class Mixture:
    """Several datasets combined for a `ClipLoader`.

    Without weights an epoch visits every sample of every dataset once. With weights each dataset gets exactly its share
    of an epoch's positions, in random order. A dataset with more samples than positions continues in the next epoch
    where it stopped; one with fewer starts over.

    Datasets with different classes are merged by class name.

    Args:
        datasets: At least one; a `torch.utils.data.Subset` of one selects samples.
        weights: Share of each dataset, positive; they need not add up to one.
        num_samples: Positions per epoch, by default the samples of all datasets; requires weights.

    Raises:
        UsageError: If an argument is invalid, or if the classes cannot be merged.
    """

    def __init__(
        self,
        datasets: Sequence[Dataset | Subset[Any]],
        *,
        weights: Sequence[float] | None = None,
        num_samples: int | None = None,
    ) -> None:
        if not datasets:
            raise UsageError("a mixture needs at least one dataset")
        if weights is not None:
            if len(weights) != len(datasets):
                raise UsageError(f"{len(weights)} weights for {len(datasets)} datasets")
            if not all(0 < weight < math.inf for weight in weights):
                raise UsageError(f"weights are {list(weights)}, expected positive numbers")
        elif num_samples is not None:
            raise UsageError(
                f"num_samples is {num_samples}, but a mixture without weights visits every sample once",
                hint="give weights=, or leave out num_samples",
            )
        check_least(1, num_samples=num_samples)
        self.datasets: tuple[Dataset, ...] = tuple(resolve_subset(dataset) for dataset in datasets)
        datasets = self.datasets
        self.weights = None if weights is None else tuple(float(weight) for weight in weights)
        lengths = [len(dataset) for dataset in datasets]
        # Lists: most lookups are for one sample, and indexing an array takes ten times as long.
        self._ends = list(accumulate(lengths))
        self._shard_ends = list(accumulate(len(dataset.generation.shards) for dataset in datasets))
        self.starts = (0, *self._ends[:-1])
        self._shard_starts = (0, *self._shard_ends[:-1])
        self.num_samples = num_samples or sum(lengths)
        self.classes = _merged([dataset.classes for dataset in datasets])

    def __len__(self) -> int:
        return self._ends[-1]

    def __repr__(self) -> str:
        return f"Mixture({list(self.datasets)}, weights={self.weights}, {self.num_samples} samples an epoch)"

    @property
    def streams(self) -> tuple[str, ...]:
        """Video streams that every dataset has."""
        first, *others = (dataset.streams for dataset in self.datasets)
        return tuple(name for name in first if all(name in other for other in others))

    @property
    def shard_sizes(self) -> IntArray:
        """Number of samples in each shard, int64 [S]."""
        return np.concatenate([dataset.shard_sizes for dataset in self.datasets])

    @cached_property
    def labels(self) -> IntArray:
        """Label of each sample as an index into `classes`, int64 [N]; -1 if it has none."""
        return np.concatenate([self._renumbered(dataset) for dataset in self.datasets])

    def column(self, name: str) -> pa.ChunkedArray:
        """Return one annotation column of all datasets.

        Raises:
            UsageError: If a dataset lacks the column, or if its type differs between datasets.
        """
        columns = [dataset.column(name) for dataset in self.datasets]
        if any(column.type != columns[0].type for column in columns):
            kinds = ", ".join(dict.fromkeys(str(column.type) for column in columns))
            raise UsageError(f"column {name!r} has different types in the datasets: {kinds}")
        return pa.chunked_array([chunk for column in columns for chunk in column.chunks], columns[0].type)

    def part(self, sample: int) -> tuple[Dataset, int]:
        """Return the dataset that contains a sample, and the number of the sample in it."""
        number = bisect_right(self._ends, sample)
        return self.datasets[number], sample - self.starts[number]

    def key(self, sample: int) -> str:
        """Return the key of a sample."""
        dataset, number = self.part(sample)
        return dataset.key(number)

    def locate(self, samples: npt.ArrayLike) -> tuple[IntArray, IntArray]:
        """Return each sample's shard number and row within the shard, both int64 [N]."""
        wanted = np.asarray(samples, dtype=np.int64)
        numbers = np.searchsorted(self._ends, wanted, side="right")
        shards, rows = np.empty_like(wanted), np.empty_like(wanted)
        for number in np.unique(numbers).tolist():
            inside = numbers == number
            found, rows[inside] = self.datasets[number].locate(wanted[inside] - self.starts[number])
            shards[inside] = found + self._shard_starts[number]
        return shards, rows

    def shard(self, index: int) -> Shard:
        """Return a shard."""
        number = bisect_right(self._shard_ends, index)
        return self.datasets[number].shard(index - self._shard_starts[number])

    def is_open(self, index: int) -> bool:
        """Return whether a shard has been opened."""
        number = bisect_right(self._shard_ends, index)
        return self.datasets[number].is_open(index - self._shard_starts[number])

    def shard_name(self, index: int) -> str:
        """Return the stem of a shard's files, with the dataset's URL because names repeat across datasets."""
        number = bisect_right(self._shard_ends, index)
        dataset = self.datasets[number]
        return f"{dataset.storage.url}/{dataset.shard_name(index - self._shard_starts[number])}"

    def _renumbered(self, dataset: Dataset) -> IntArray:
        if dataset.classes == self.classes:
            return dataset.labels
        index = {name: label for label, name in enumerate(self.classes)}
        table = np.asarray([*(index[name] for name in dataset.classes), -1], dtype=np.int64)
        return table[dataset.labels]


def _merged(classes: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    if len(set(classes)) == 1:
        return classes[0]
    if not all(classes):
        raise UsageError("labels cannot be merged: some datasets of the mixture have class names and some do not")
    return tuple(dict.fromkeys(name for names in classes for name in names))
