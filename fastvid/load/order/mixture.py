"""Several datasets combined into one.

Samples and shards are numbered through the datasets, in the order they were given.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from fastvid.errors import UsageError
from fastvid.format.dataset import Dataset
from fastvid.format.shard import Shard
from fastvid.load.order.draws import resolve_subset
from fastvid.runtime.arrays import IntArray
from fastvid.runtime.values import check_choice, check_integers, check_kind, check_numbers

if TYPE_CHECKING:
    from torch.utils.data import Subset

T = TypeVar("T")


class Mixture:
    """Several datasets combined for a `ClipLoader`.

    Without weights an epoch visits every sample of every dataset once. With weights each dataset gets exactly its share
    of an epoch's positions, in random order. A dataset with more samples than positions continues in the next epoch
    where it stopped; one with fewer starts over.

    `Batch.dataset` has the name of each row's dataset. Datasets with different classes are merged by class name. An
    annotation column that a dataset lacks is None in its samples.

    Args:
        datasets: At least one, by name; a list names them "0", "1", and so on. A `torch.utils.data.Subset` of one
            selects samples.
        weights: Share of each dataset, positive, by name or in the order of the datasets; they need not add up to one.
        num_samples: Positions per epoch, by default the samples of all datasets; requires weights.

    Raises:
        UsageError: If an argument is invalid, or if the classes cannot be merged.

    Attributes:
        names: Name of each dataset.
        starts: First sample of each dataset.
        ends: One past the last sample of each dataset.
    """

    def __init__(
        self,
        datasets: Mapping[str, Dataset | Subset[Any]] | Sequence[Dataset | Subset[Any]],
        *,
        weights: Mapping[str, float] | Sequence[float] | None = None,
        num_samples: int | None = None,
    ) -> None:
        check_kind("datasets", datasets, Mapping, Sequence, use="a list of datasets, or a dictionary of them by name")
        if not datasets:
            raise UsageError("a mixture needs at least one dataset", hint="give datasets by name, or a list of them")
        if not isinstance(datasets, Mapping):
            datasets = {str(number): dataset for number, dataset in enumerate(datasets)}
        for name, dataset in cast("Mapping[object, object]", datasets).items():
            if not isinstance(name, str) or not name:
                raise UsageError(f"{name!r} is not the name of a dataset", hint="give each dataset a non-empty name")
            if isinstance(dataset, Mixture):
                hint = "name all datasets in one mixture, with the products of the weights"
                raise UsageError(f"dataset {name!r} is a mixture itself", hint=hint)
        self.names = tuple(datasets)
        self.datasets: tuple[Dataset, ...] = tuple(resolve_subset(dataset) for dataset in datasets.values())
        self.weights: tuple[float, ...] | None = None
        if weights is not None:
            given = self.by_name("weights", weights) if isinstance(weights, Mapping) else weights
            shares = check_numbers("weights", given)
            if len(shares) != len(datasets):
                raise UsageError(f"{len(shares)} weights for {len(datasets)} datasets", hint="give one for each")
            if not all(0 < weight < math.inf for weight in shares):
                hint = "leave out a dataset that is not to be used"
                raise UsageError(f"weights are {list(shares)}, expected positive numbers", hint=hint)
            self.weights = shares
        elif num_samples is not None:
            told = f"num_samples is {num_samples}, but a mixture without weights visits every sample once"
            raise UsageError(told, hint="give weights=, or leave out num_samples")
        check_integers(1, num_samples=num_samples)
        lengths = [len(dataset) for dataset in self.datasets]
        # Tuples: most lookups are for one sample, and indexing an array takes ten times as long.
        self.ends = tuple(accumulate(lengths))
        self._shard_ends = tuple(accumulate(len(dataset.generation.shards) for dataset in self.datasets))
        self.starts = (0, *self.ends[:-1])
        self._shard_starts = (0, *self._shard_ends[:-1])
        self.num_samples = num_samples or sum(lengths)
        self.classes = _merged(self.datasets)

    def __len__(self) -> int:
        return self.ends[-1]

    def __repr__(self) -> str:
        named = dict(zip(self.names, self.datasets, strict=True))
        return f"Mixture({named}, weights={self.weights}, {self.num_samples} samples an epoch)"

    @property
    def streams(self) -> tuple[str, ...]:
        """Video streams that every dataset has."""
        first, *others = every = [dataset.streams for dataset in self.datasets]
        common = tuple(name for name in first if all(name in other for other in others))
        if not common:
            raise UsageError(f"datasets of a mixture have no stream in common: {every}", hint="load each alone")
        return common

    @property
    def shard_sizes(self) -> IntArray:
        """Number of samples in each shard, int64 [S]."""
        return np.concatenate([dataset.shard_sizes for dataset in self.datasets])

    @cached_property
    def labels(self) -> IntArray:
        """Label of each sample as an index into `classes`, int64 [N]; -1 if it has none."""
        return np.concatenate([self._renumbered(dataset) for dataset in self.datasets])

    def by_name(self, argument: str, given: Mapping[str, T]) -> tuple[T, ...]:
        """Return the values of a mapping from dataset names, in the order of the datasets.

        Args:
            argument: Name of the mapping, for messages.
            given: A value for the name of each dataset.

        Raises:
            UsageError: If the mapping lacks a dataset, or has one that the mixture lacks; names it.
        """
        missing = [name for name in self.names if name not in given]
        unknown = [str(name) for name in given if name not in self.names]
        if missing or unknown:
            parts = [f"no entry for {', '.join(missing)}"] * bool(missing)
            parts += [f"an entry for {', '.join(unknown)}, no dataset of the mixture"] * bool(unknown)
            hint = f"give an entry for each of {', '.join(self.names)}"
            raise UsageError(f"{argument} has {' and '.join(parts)}", hint=hint)
        return tuple(given[name] for name in self.names)

    @property
    def column_names(self) -> tuple[str, ...]:
        """Annotation columns that at least one dataset has."""
        return tuple(dict.fromkeys(name for dataset in self.datasets for name in dataset.column_names))

    def column(self, name: str) -> pa.ChunkedArray:
        """Return one annotation column of all datasets, with nulls for those that lack it.

        Raises:
            UsageError: If every dataset lacks the column, or if its type differs between datasets.
        """
        check_choice("no dataset of the mixture has a column {}", name, self.column_names)
        columns = [
            dataset.column(name) if name in dataset.column_names else pa.chunked_array([pa.nulls(len(dataset))])
            for dataset in self.datasets
        ]
        kinds = list(dict.fromkeys(column.type for column in columns if not pa.types.is_null(column.type)))
        if len(kinds) > 1:
            told = f"column {name!r} has different types in the datasets: {', '.join(map(str, kinds))}"
            raise UsageError(told, hint="give the column one type in all datasets")
        kind = kinds[0] if kinds else pa.null()
        return pa.chunked_array([chunk for column in columns for chunk in column.cast(kind).chunks], kind)

    def part(self, sample: int) -> tuple[Dataset, int]:
        """Return the dataset that contains a sample, and the number of the sample in it."""
        number = bisect_right(self.ends, sample)
        return self.datasets[number], sample - self.starts[number]

    def name_of(self, sample: int) -> str:
        """Return the name of the dataset that contains a sample."""
        return self.names[bisect_right(self.ends, sample)]

    def key(self, sample: int) -> str:
        """Return the key of a sample."""
        dataset, number = self.part(sample)
        return dataset.key(number)

    def keys_of(self, samples: IntArray) -> list[str]:
        """Return the keys of samples, given by their numbers, int64 [N]."""
        return [self.key(sample) for sample in samples.tolist()]

    def locate(self, samples: npt.ArrayLike) -> tuple[IntArray, IntArray]:
        """Return each sample's shard number and row within the shard, both int64 [N]."""
        wanted = np.asarray(samples, dtype=np.int64)
        numbers = np.searchsorted(self.ends, wanted, side="right")
        shards, rows = np.empty_like(wanted), np.empty_like(wanted)
        for number in np.unique(numbers).tolist():
            inside = numbers == number
            found, rows[inside] = self.datasets[number].locate(wanted[inside] - self.starts[number])
            shards[inside] = found + self._shard_starts[number]
        return shards, rows

    def shard(self, index: int) -> Shard:
        """Return a shard."""
        dataset, number = self._shard_part(index)
        return dataset.shard(number)

    def is_open(self, index: int) -> bool:
        """Return whether a shard has been opened."""
        dataset, number = self._shard_part(index)
        return dataset.is_open(number)

    def shard_name(self, index: int) -> str:
        """Return the stem of a shard's files, with the dataset's URL because names repeat across datasets."""
        dataset, number = self._shard_part(index)
        return f"{dataset.storage.url}/{dataset.shard_name(number)}"

    def _shard_part(self, index: int) -> tuple[Dataset, int]:
        number = bisect_right(self._shard_ends, index)
        return self.datasets[number], index - self._shard_starts[number]

    def _renumbered(self, dataset: Dataset) -> IntArray:
        if dataset.classes == self.classes:
            return dataset.labels
        index = {name: label for label, name in enumerate(self.classes)}
        table = np.asarray([*(index[name] for name in dataset.classes), -1], dtype=np.int64)
        return table[dataset.labels]


def parts_of(dataset: Dataset | Mixture) -> tuple[Dataset, ...]:
    """Return the datasets of a mixture; a dataset alone is its only part."""
    return dataset.datasets if isinstance(dataset, Mixture) else (dataset,)


def part_of(dataset: Dataset | Mixture, sample: int) -> tuple[Dataset, int]:
    """Return the dataset that contains a sample, and the number of the sample in it."""
    return dataset.part(sample) if isinstance(dataset, Mixture) else (dataset, sample)


def _merged(datasets: Sequence[Dataset]) -> tuple[str, ...]:
    if len({dataset.classes for dataset in datasets}) == 1:
        return datasets[0].classes
    # A dataset without any label, for instance one of captions, can be merged with any other.
    classes = [dataset.classes for dataset in datasets if dataset.classes or (dataset.labels >= 0).any()]
    if not all(classes):
        told = "labels cannot be merged: some labelled datasets of the mixture have class names and some do not"
        raise UsageError(told, hint="give every dataset class names")
    return tuple(dict.fromkeys(name for names in classes for name in names))
