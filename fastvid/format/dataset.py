"""A dataset: the commit record, its generations, and a selection of one generation's samples.

    dataset.json                 names the current generation; swapped atomically, last
    generations/000001.json      shards, streams, classes; never changed
    annotations-000001.parquet   one row per sample, in the order of the shards; never changed

A sample's number is its row in the annotations. Rows of a shard are consecutive, so (shard, row) is computed from it.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from fastvid.errors import ConflictError, FormatError, SampleNotFoundError, UsageError
from fastvid.format.filters import matching_rows
from fastvid.format.generations import Generation as Generation
from fastvid.format.generations import ShardRecord as ShardRecord
from fastvid.format.generations import commit_generation as commit_generation
from fastvid.format.generations import history, read_annotations, read_generation, read_head
from fastvid.format.schema import ANNOTATION_FIELDS, FACT_FIELDS
from fastvid.format.shard import Shard
from fastvid.runtime.arrays import BoolArray, IntArray
from fastvid.runtime.hashing import sha256
from fastvid.runtime.near_names import near_names
from fastvid.storage import Storage, open_storage

_LOG = logging.getLogger(__name__)

_SPLIT: Final = "split"
# A writer that commits every few milliseconds is a runaway loop, so give up eventually.
_ATTEMPTS: Final = 10

Edit = Callable[[Generation, pa.Table], tuple[Generation, pa.Table] | None]


class Dataset:
    """The samples of a generation, optionally restricted to a split and a filter.

    Sample numbers 0..len-1 are positions in the selection, in the order of the shards.

    Args:
        url: Folder of the dataset.
        split: Value of the column ``split``, or ``column:value`` for another split column such as ``split2:test``.
        where: Condition in SQL over the annotations' columns and ``class``, the name of the label; see
            `fastvid.format.filters`.
        generation: Number of the generation; the current one by default. A job that pins it sees no later change.

    Raises:
        StorageError: If there is no dataset.
        VersionError: If the dataset has another major version.
        UsageError: If the split or the filter is invalid, or no sample matches.
    """

    def __init__(
        self, url: str, *, split: str | None = None, where: str | None = None, generation: int | None = None
    ) -> None:
        self.storage = open_storage(url)
        self.dataset_id, self.generation = read_generation(self.storage, generation)
        self.split, self.where = split, where
        self.selection = ""  # identifies the samples chosen by `select`
        self._shards: dict[int, Shard] = {}
        counts = [shard.samples for shard in self.generation.shards]
        self._ends = np.cumsum(np.asarray(counts, dtype=np.int64))
        self.rows = self._select()

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        parts = [f"{len(self)} samples", f"generation {self.generation.number}"]
        parts += [f"{name}={value!r}" for name, value in (("split", self.split), ("where", self.where)) if value]
        return f"{type(self).__name__}({self.storage.url!r}, {', '.join(parts)})"

    def __getstate__(self) -> dict[str, Any]:
        # Another process opens the shards that it uses.
        return self.__dict__ | {"_shards": {}}

    @property
    def classes(self) -> tuple[str, ...]:
        """Class names; a label is an index into this tuple."""
        return self.generation.classes

    @property
    def streams(self) -> tuple[str, ...]:
        """Video streams of every sample."""
        return self.generation.streams

    @cached_property
    def annotations(self) -> pa.Table:
        """All rows of the generation's annotations, selected or not."""
        return read_annotations(self.storage, self.generation)

    @property
    def column_names(self) -> tuple[str, ...]:
        """Columns of the annotations."""
        return tuple(self.annotations.column_names)

    def column(self, name: str) -> pa.ChunkedArray:
        """Return a column of the selected rows.

        Raises:
            UsageError: If there is no such column.
        """
        if name not in self.column_names:
            raise UsageError(f"dataset has no column {name!r}", hint=f"use one of {', '.join(self.column_names)}")
        column = self.annotations[name]
        whole = len(self.rows) == len(column) and self.is_in_order
        return column if whole else column.take(pa.array(self.rows))

    @cached_property
    def labels(self) -> IntArray:
        """Label of each selected sample, int64 [N]; -1 for a sample without a label."""
        return np.asarray(self.column("label").fill_null(-1).to_numpy(), dtype=np.int64)

    @cached_property
    def num_frames(self) -> IntArray:
        """Number of frames of each selected sample's first video stream, int64 [N]."""
        return np.asarray(self.column("num_frames").to_numpy(), dtype=np.int64)

    @cached_property
    def keys(self) -> pa.ChunkedArray:
        """Key of each selected sample."""
        return self.column("key")

    def key(self, sample: int) -> str:
        """Return the key of a selected sample."""
        return str(self.keys[sample])

    def find(self, key: str) -> int:
        """Return the number of the selected sample with a key.

        Raises:
            SampleNotFoundError: If no selected sample has the key.
        """
        number = self._by_key.get(key)
        if number is None:
            near = ", ".join(map(repr, near_names(self.keys, key)))
            hint = f"did you mean {near}? " if near else ""
            raise SampleNotFoundError(
                f"no sample has the key {key!r}", file=self.storage.url, hint=f"{hint}list the keys with `dataset.keys`"
            )
        return number

    def select(self, samples: slice | Sequence[int] | list[str] | IntArray | BoolArray) -> Self:
        """Return a dataset of some of the samples, in the order given.

        Args:
            samples: A slice; sample numbers or keys, each at most once; or a boolean for every sample.

        Raises:
            SampleNotFoundError: If a number or key is not in the dataset.
            UsageError: If no sample is selected, one is selected twice, or they are not given in one of these ways.
        """
        numbers = self._numbers(samples)
        if not len(numbers):
            raise UsageError("no sample is selected", file=self.storage.url, hint="select at least one")
        distinct, counts = np.unique(numbers, return_counts=True)
        if len(distinct) < len(numbers):
            twice = int(distinct[counts > 1][0])
            raise UsageError(
                f"sample {twice} is selected {counts[counts > 1][0]} times",
                file=self.storage.url,
                key=self.key(twice),
                hint="drop duplicates: a loader's `clips_per_video` visits every sample several times",
            )
        chosen = copy.copy(self)
        for name in ("labels", "num_frames", "keys", "shard_sizes", "is_in_order", "_by_key"):
            chosen.__dict__.pop(name, None)
        chosen.rows = self.rows[numbers]
        chosen.selection = f"{len(numbers)} samples {sha256(chosen.rows.tobytes())[:16]}"
        return chosen

    def _numbers(self, samples: slice | Sequence[int] | list[str] | IntArray | BoolArray) -> IntArray:
        """Return the numbers of samples given in any of the ways of `select`, int64 [N]."""
        if isinstance(samples, slice):
            return np.arange(len(self))[samples]
        wanted = np.asarray(samples)
        if wanted.ndim == 1 and wanted.dtype.kind in "UT":
            return np.array([self.find(key) for key in wanted.tolist()], dtype=np.int64)
        if wanted.ndim == 1 and wanted.dtype.kind == "b":
            if len(wanted) != len(self):
                raise UsageError(
                    f"mask has {len(wanted)} values for {len(self)} samples",
                    file=self.storage.url,
                    hint="give one boolean for each sample",
                )
            return np.flatnonzero(wanted)
        if wanted.ndim != 1 or (wanted.size and wanted.dtype.kind not in "iu"):
            raise UsageError(
                f"cannot select samples by {wanted.dtype} {list(wanted.shape)}",
                file=self.storage.url,
                hint="give a slice, a list of numbers or keys, or one boolean for each sample",
            )
        outside = wanted[(wanted < 0) | (wanted >= len(self))]
        if len(outside):
            raise SampleNotFoundError(
                f"sample {outside[0]} is outside the selection of {len(self)}",
                file=self.storage.url,
                hint=f"give numbers from 0 to {len(self) - 1}",
            )
        return wanted.astype(np.int64)

    def locate(self, samples: npt.ArrayLike) -> tuple[IntArray, IntArray]:
        """Return the shard index and the row inside the shard of selected samples, both int64 [N]."""
        rows = self.rows[np.asarray(samples, dtype=np.int64)]
        shards = np.searchsorted(self._ends, rows, side="right")
        starts = np.concatenate([[0], self._ends[:-1]])[shards]
        return shards, rows - starts

    @cached_property
    def shard_sizes(self) -> IntArray:
        """Number of selected samples in each shard of the generation, int64 [S]: the samples are numbered through them.

        Raises:
            UsageError: If the samples are not in the dataset's order.
        """
        if not self.is_in_order:
            raise UsageError(
                "the selected samples are not in the order of the shards, so they cannot be read shard by shard",
                file=self.storage.url,
                hint="sort the numbers given to `select`, or use shuffle=True",
            )
        return np.diff(np.searchsorted(self.rows, self._ends), prepend=0)

    @cached_property
    def is_in_order(self) -> bool:
        """Whether the samples are in the order of the shards, as all are unless they were selected in another one."""
        return bool((np.diff(self.rows) > 0).all())

    def shard_name(self, index: int) -> str:
        """Return the stem of a shard's file names."""
        return self.generation.shards[index].name

    def shard(self, index: int) -> Shard:
        """Return a shard of the generation, opening it on first use.

        Raises:
            StorageError: If a file is missing.
            FormatError: If a file is damaged, or not the one that the generation lists.
        """
        shard = self._shards.get(index)
        if shard is None:
            # No lock, so that threads can open shards concurrently; if two open the same one, the first is kept.
            shard = self._shards.setdefault(index, open_shard(self.storage, self.generation, index))
        return shard

    def is_open(self, index: int) -> bool:
        """Return whether a shard has been opened."""
        return index in self._shards

    @cached_property
    def _by_key(self) -> dict[str, int]:
        return {key: number for number, key in enumerate(self.keys.to_pylist())}

    def _select(self) -> IntArray:
        table = self.annotations
        if table.num_rows != self.generation.num_samples:
            raise FormatError(
                f"{table.num_rows} annotations for {self.generation.num_samples} samples",
                file=self.storage.url,
                hint="restore the generation's record and annotations from a copy of the dataset",
            )
        keep = pc.invert(table["removed"])
        if self.split is not None:
            keep = pc.and_(keep, self._in_split(self.split))
        rows = np.flatnonzero(keep.fill_null(False).to_numpy())
        if self.where is not None:
            rows = rows[np.isin(rows, matching_rows(self._with_class(table), self.where), kind="table")]
        if not len(rows):
            raise UsageError("no sample matches", split=self.split, where=self.where, file=self.storage.url)
        return rows

    def _with_class(self, table: pa.Table) -> pa.Table:
        """Add the column ``class``, the name of each label, unless the annotations have one of their own."""
        if "class" in table.column_names or not self.classes:
            return table
        names = pa.DictionaryArray.from_arrays(table["label"].combine_chunks(), pa.array(self.classes, pa.string()))
        return table.append_column("class", names)

    def _in_split(self, split: str) -> pa.ChunkedArray:
        column, colon, value = split.rpartition(":")
        column = column if colon else _SPLIT
        names = self.annotations.column_names
        if column not in names:
            known = [name for name in names if name.startswith(_SPLIT)]
            hint = f"use one of {', '.join(known)}" if known else "omit `split`: the samples have none"
            raise UsageError(f"dataset has no split column {column!r}", file=self.storage.url, hint=hint)
        values = pc.unique(self.annotations[column]).to_pylist()
        if value not in values:
            present = ", ".join(sorted(str(v) for v in values if v is not None))
            raise UsageError(f"no sample has {column} {value!r}", file=self.storage.url, hint=f"use one of {present}")
        return pc.equal(self.annotations[column], value)


def change(storage: Storage, edit: Edit) -> Generation:
    """Commit the result of `edit` on the current generation and its annotations; retry if another change came first.

    Args:
        storage: The dataset's folder.
        edit: Returns the new state, or None if there is nothing to change; may be called more than once.

    Returns:
        The generation that is current afterwards.

    Raises:
        StorageError: If there is no dataset.
        ConflictError: If other changes kept winning the race to commit.
    """
    for attempt in range(_ATTEMPTS):
        head = read_head(storage)
        generation = next(history(storage, head))
        made = edit(generation, read_annotations(storage, generation))
        if made is None:
            return generation
        try:
            new = replace(made[0], number=generation.number + 1)
            return commit_generation(storage, head.dataset_id, new, made[1], head=head)
        except ConflictError:
            if attempt + 1 == _ATTEMPTS:
                raise
            _LOG.info("the dataset was changed by someone else; retrying on the new generation")
    raise AssertionError("unreachable")


def open_shard(storage: Storage, generation: Generation, index: int) -> Shard:
    """Open a shard after checking that its files are those that the generation lists.

    Raises:
        StorageError: If a file is missing.
        FormatError: If a file is damaged, or not the one that the generation lists.
    """
    record = generation.shards[index]
    shard = Shard(storage, record.name, record.sha256)
    found, expected = (shard.num_samples, shard.num_streams), (record.samples, len(generation.streams))
    if found != expected:
        raise FormatError(
            f"packet sidecar contains {found[0]} samples of {found[1]} streams, the generation lists {expected[0]} of"
            f" {expected[1]}",
            shard=record.name,
            hint="run `fastvid index DIR` to rebuild the sidecars of the dataset in DIR",
        )
    if (size := storage.size(shard.tar)) != record.bytes:
        raise FormatError(
            f"tar has {size} bytes, the generation lists {record.bytes}",
            shard=record.name,
            hint="restore the tar from a copy of the dataset; `fastvid verify DIR` finds all damage",
        )
    return shard


def annotation_table(rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Build annotations: the columns of fastvid with their types, then all others as first encountered."""
    fixed = ANNOTATION_FIELDS | FACT_FIELDS
    extra = list(dict.fromkeys(name for row in rows for name in row if name not in fixed))
    columns = {name: pa.array([row.get(name) for row in rows], kind) for name, kind in fixed.items()}
    for name in extra:
        values = [row.get(name) for row in rows]
        try:
            columns[name] = pa.array(values)
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
            # Store a column of mixed types as strings: nothing is lost, but a filter on it must quote its values.
            columns[name] = pa.array([None if value is None else str(value) for value in values], pa.string())
    return pa.table(columns)
