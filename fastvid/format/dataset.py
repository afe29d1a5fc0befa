"""A dataset: the commit record, its generations, and a selection of one generation's samples.

    dataset.json                 names the current generation; swapped atomically, last
    generations/000001.json      shards, streams, classes; never changed
    annotations-000001.parquet   one row per sample, in the order of the shards; never changed

A sample's number is its row in the annotations. Rows of a shard are consecutive, so (shard, row) is computed from it.
`OpenShards` keeps shards of a generation open within a limit of memory.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import logging
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from operator import attrgetter
from pathlib import PurePosixPath
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from fastvid.errors import ConflictError, FormatError, SampleNotFoundError, StorageError, UsageError
from fastvid.format.annotations import GenerationRows, Signals, open_annotations
from fastvid.format.generations import Generation as Generation
from fastvid.format.generations import ShardRecord as ShardRecord
from fastvid.format.generations import commit_generation as commit_generation
from fastvid.format.generations import history, read_annotations, read_generation, read_head
from fastvid.format.packets import Recent
from fastvid.format.planes import DepthScale
from fastvid.format.schema import DEPTH, StreamFlag, arrow_integers
from fastvid.format.selection import in_split, matching_rows, with_class
from fastvid.format.shard import Shard
from fastvid.runtime.arrays import BoolArray, IntArray
from fastvid.runtime.names import meant
from fastvid.runtime.near_names import near_names
from fastvid.runtime.values import as_type, check_choice, check_kind, sha256
from fastvid.storage import Storage, open_storage

_LOG = logging.getLogger(__name__)

# Commits that a change tolerates before it gives up: a writer that commits every few milliseconds is a runaway loop.
_ATTEMPTS: Final = 10
# From this many keys on, one pass over all keys takes less time than looking up each.
_MANY_KEYS: Final = 1000
_END: Final = "\n"  # follows each key that is hashed, so that the hash does not depend on how the column is chunked
# Attributes that are computed from the rows and the annotations, and computed again after unpickling.
_DERIVED: Final = frozenset(
    {"labels", "num_frames", "keys", "shard_sizes", "is_in_order", "_ascending", "signals", "identity"}
)

Edit = Callable[[Generation, pa.Table], tuple[Generation, pa.Table] | None]


class Dataset:
    """The samples of a generation, optionally restricted to a split and a filter.

    Samples are numbered 0 to len - 1: positions in the selection, in the order of the shards.
    """

    def __init__(
        self,
        url: str,
        *,
        split: str | None = None,
        where: str | None = None,
        generation: int | str | None = None,
        root: str | None = None,
    ) -> None:
        self.storage, self.root = open_storage(url), root
        self.dataset_id, self.generation, self._annotations = _open_generation(self.storage, generation)
        self.split, self.where = split, where
        self.selection = ""  # identifies the samples chosen by `select`
        self._shards = OpenShards()
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
        # Another process opens shards itself, and computes arrays from the annotations, which may be mapped.
        left_out = _DERIVED | {"_shards"} | ({"rows"} if self.rows is self._annotations.rows else set())
        return {name: value for name, value in self.__dict__.items() if name not in left_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        self._shards = OpenShards()
        if "rows" not in state:
            self.rows = self._annotations.rows

    @property
    def classes(self) -> tuple[str, ...]:
        """Class names; a label is an index into this tuple."""
        return self.generation.classes

    @property
    def streams(self) -> tuple[str, ...]:
        """Names of the video streams, which every sample has."""
        return self.generation.streams

    @property
    def annotations(self) -> pa.Table:
        """All rows of the generation's annotations, selected or not; mapped from a file if there are many."""
        return self._annotations.table

    @property
    def column_names(self) -> tuple[str, ...]:
        """Columns of the annotations."""
        return tuple(self.annotations.column_names)

    def column(self, name: str) -> pa.ChunkedArray:
        """Return a column of the selected rows."""
        self._require(name)
        column = self.annotations[name]
        whole = len(self.rows) == len(column) and self.is_in_order
        return column if whole else column.take(arrow_integers(self.rows))

    @cached_property
    def labels(self) -> IntArray:
        """Label of each selected sample, int64 [N]; -1 for a sample without a label. Copy it before writing to it."""
        return self._chosen(self._annotations.labels)

    @cached_property
    def num_frames(self) -> IntArray:
        """Number of frames of each selected sample's first video stream, int64 [N]. Copy it before writing to it."""
        self._require("num_frames")
        return self._chosen(self._annotations.num_frames)

    @cached_property
    def depth(self) -> Mapping[str, DepthScale]:
        """The streams that show depth, by name, and how their levels become distances."""
        known = self.generation.extras.get(DEPTH, {})
        return {stream: as_type(record, DepthScale) for stream, record in known.items()}

    @cached_property
    def signals(self) -> Signals:
        """Numbers that the dataset stores for every frame, by name: ``dataset.signals["action"]["stats"]``."""
        return Signals(self.storage, self.generation, self._annotations.num_frames)

    @cached_property
    def keys(self) -> pa.ChunkedArray:
        """Key of each selected sample."""
        return self.column("key")

    @cached_property
    def identity(self) -> str:
        """Text that identifies the selected samples and their order: their number, and a hash of their keys."""
        keys = hashlib.sha256()
        for chunk in self.keys.chunks:
            every = pa.ListArray.from_arrays(pa.array([0, len(chunk)], pa.int32()), chunk)
            keys.update(f"{pc.binary_join(every, _END)[0]}{_END}".encode() if len(chunk) else b"")
        return f"{len(self)} samples {keys.hexdigest()[:16]}"

    def key(self, sample: int) -> str:
        """Return the key of a selected sample."""
        return str(self.keys[sample])

    def keys_of(self, samples: IntArray) -> list[str]:
        """Return the keys of selected samples, given by their numbers, int64 [N]."""
        keys = self.keys
        return [str(keys[sample]) for sample in samples.tolist()]

    def find(self, key: str) -> int:
        """Return the number of the selected sample with this key."""
        row = self._annotations.row(key)
        number = None if row is None else self._number_of(row)
        if number is None:
            near = ", ".join(map(repr, near_names(self.keys, key)))
            hint = f"did you mean {near}? " if near else ""
            raise SampleNotFoundError(
                f"no sample has the key {key!r}",
                file=self.storage.url,
                hint=f"{hint}list the keys with `dataset.keys`, or `fastvid find DIR --where true`",
            )
        return number

    def __contains__(self, key: object) -> bool:
        """Whether a selected sample has the key."""
        row = self._annotations.row(key) if isinstance(key, str) else None
        return row is not None and self._number_of(row) is not None

    def select(self, samples: slice | Sequence[int] | list[str] | IntArray | BoolArray) -> Self:
        """Return a dataset of some of the samples, in the order given.

        `samples`: a slice; sample numbers or keys, each at most once; or a boolean for every sample.
        """
        numbers = self._numbers(samples)
        if not len(numbers):
            raise self._refusal("no sample is selected", "select at least one")
        distinct, counts = np.unique(numbers, return_counts=True)
        if len(distinct) < len(numbers):
            twice = int(distinct[counts > 1][0])
            raise self._refusal(
                f"sample {twice} is selected {counts[counts > 1][0]} times",
                "drop duplicates: a loader's `clips_per_video` visits every sample several times",
                key=self.key(twice),
            )
        chosen = copy.copy(self)
        chosen.rows = self.rows[numbers]
        chosen.selection = f"{len(numbers)} samples {sha256(chosen.rows.tobytes())[:16]}"
        return chosen

    def _numbers(self, samples: slice | Sequence[int] | list[str] | IntArray | BoolArray) -> IntArray:
        """Return the numbers, int64 [N], of samples that are given in any of the ways that `select` accepts."""
        if isinstance(samples, slice):
            return np.arange(len(self))[samples]
        wanted = np.asarray(samples)
        if wanted.ndim == 1 and wanted.dtype.kind in "UT":
            return self._numbers_of_keys(wanted.tolist())
        if wanted.ndim == 1 and wanted.dtype.kind == "b":
            if len(wanted) != len(self):
                message = f"mask has {len(wanted)} values for {len(self)} samples"
                raise self._refusal(message, "give one boolean for each sample")
            return np.flatnonzero(wanted)
        if wanted.ndim != 1 or (wanted.size and wanted.dtype.kind not in "iu"):
            message = f"cannot select samples by {wanted.dtype} {list(wanted.shape)}"
            raise self._refusal(message, "give a slice, a list of numbers or keys, or one boolean for each sample")
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
        """Number of selected samples in each shard of the generation, int64 [S]. They are numbered shard by shard."""
        if not self.is_in_order:
            message = "the selected samples are not in the order of the shards, so they cannot be read shard by shard"
            raise self._refusal(message, "sort the numbers given to `select`, or use shuffle=True")
        return np.diff(np.searchsorted(self.rows, self._ends), prepend=0)

    @cached_property
    def is_in_order(self) -> bool:
        """Whether the samples are in the order of the shards: always, unless `select` was given another order."""
        return self.rows is self._annotations.rows or bool((self.rows[1:] > self.rows[:-1]).all())

    def shard_name(self, index: int) -> str:
        """Return the stem of a shard's file names."""
        return self.generation.shards[index].name

    def shard(self, index: int) -> Shard:
        """Return a shard of the generation, opening it on first use, or again if it was closed to save memory."""
        return self._shards.get(index, partial(open_shard, self.storage, self.generation, index, self.root))

    def is_open(self, index: int) -> bool:
        """Return whether a shard is open."""
        return index in self._shards

    def _refusal(self, message: str, hint: str, **where: object) -> UsageError:
        return UsageError(message, hint=hint, file=self.storage.url, **where)

    def _require(self, name: str) -> None:
        check_choice("dataset has no column {}", name, self.column_names)

    def _chosen(self, array: IntArray) -> IntArray:
        """Return the selected rows of an array of all rows, without a copy if all are selected."""
        return array if self.rows is self._annotations.rows else array[self.rows]

    def _number_of(self, row: int) -> int | None:
        """Return the number of the sample in a row of the annotations, or None if it is not selected."""
        if self.rows is self._annotations.rows:
            return row
        place = int(np.searchsorted(self.rows, row, sorter=self._ascending))
        if place == len(self.rows):
            return None
        number = place if self._ascending is None else int(self._ascending[place])
        return number if self.rows[number] == row else None

    @cached_property
    def _ascending(self) -> IntArray | None:
        """Numbers of the samples, sorted by their rows; None if the samples are in the order of their rows already."""
        return None if self.is_in_order else np.argsort(self.rows)

    def _numbers_of_keys(self, keys: list[str]) -> IntArray:
        if len(keys) < _MANY_KEYS:
            return np.array([self.find(key) for key in keys], dtype=np.int64)
        wanted = pa.array(keys, self.keys.type)
        numbers = np.flatnonzero(pc.is_in(self.keys, value_set=wanted).to_numpy())
        known = dict(zip(self.keys.take(pa.array(numbers)).to_pylist(), numbers.tolist(), strict=True))
        return np.array([known[key] if key in known else self.find(key) for key in keys], dtype=np.int64)

    def _select(self) -> IntArray:
        table = self.annotations
        keep = pc.invert(table["removed"])
        if self.split is not None:
            keep = pc.and_(keep, in_split(table, self.split))
        keep = pc.and_kleene(keep, pc.is_valid(keep))  # null becomes false; not by `fill_null`, see `arrow_integers`
        is_whole = pc.all(keep, min_count=0).as_py()
        rows = self._annotations.rows if is_whole else np.flatnonzero(keep.to_numpy())
        if self.where is not None:
            check_kind("where", self.where, str, use='a condition, such as "fps >= 24"')
            matching = matching_rows(with_class(table, self.classes), self.where)
            if len(rows) < table.num_rows:
                rows = rows[np.isin(rows, matching, kind="table")]
            elif len(matching) < table.num_rows:
                rows = matching
        if not len(rows):
            words = set(re.findall("'([^']*)'", self.where or "")) - set(self.classes)
            near = next(filter(None, (meant(word, self.classes) for word in sorted(words))), None)
            hint = near or "`fastvid inspect DIR` shows what there is"
            raise UsageError("no sample matches", hint=hint, split=self.split, where=self.where, file=self.storage.url)
        return rows


MEMORY: Final = 256 * 2**20
"""Bytes of open shards in a process: the indexes of about 2,500 shards of 1,000 videos, or about 40 whole packet
sidecars, which a process keeps if storage is remote and the node has no cache."""


def _open_generation(storage: Storage, which: int | str | None) -> tuple[str, Generation, GenerationRows]:
    """Open a generation. If `fastvid gc` deletes the current one meanwhile, open the one that is current then."""
    head = read_head(storage)
    try:
        identity, generation = read_generation(storage, which, head)
        return identity, generation, open_annotations(storage, generation)
    except StorageError:
        if which is not None or read_head(storage).generation == head.generation:
            raise
    return _open_generation(storage, which)


class OpenShards:
    """Opens shards when they are first used, and closes the least recently used ones. Thread-safe.

    Once the limit was reached, shards are opened without a copy of the whole sidecar, so that their packet tables are
    requested one by one.

    `limit`: total memory in bytes; at least one shard stays open.
    """

    def __init__(self, limit: int = MEMORY) -> None:
        self._shards = Recent[Hashable, Shard](limit, attrgetter("nbytes"))

    def __contains__(self, key: Hashable) -> bool:
        return key in self._shards

    def __len__(self) -> int:
        return len(self._shards)

    def get(self, key: Hashable, make: Callable[[bool], Shard]) -> Shard:
        """Return the shard of a key; `make` opens it, and gets whether the whole sidecar may be kept in memory.

        Several threads can open shards at once; if two open the same one, the first is kept. The memory of a shard
        grows when it reads its list of files.
        """
        known = self._shards.get(key)
        return self._shards.add(key, make(not self._shards.was_full) if known is None else known)


@functools.cache
def _warn_of_undescribed(url: str) -> None:
    """Warn, once per dataset, that videos in place were indexed by fastvid 0.2, which stored no description."""
    _LOG.warning(
        "%s was indexed by fastvid 0.2: its videos are shown as they are coded, not turned, cut or stretched, and at a"
        " constant rate; run `fastvid index DIR` to learn how they are shown",
        url,
    )


def open_shard(
    storage: Storage, generation: Generation, index: int, root: str | None = None, whole: bool = True
) -> Shard:
    """Open a shard after checking that its files have the sizes and numbers that the generation lists."""
    record, streams = generation.shards[index], generation.streams
    place = generation.root_of(record, root)
    shard = Shard(storage, record.name, record.sha256, streams=streams, root=place, whole=whole)
    found, expected = (shard.num_samples, shard.num_streams), (record.samples, len(streams))
    if found != expected:
        raise FormatError(
            f"packet sidecar contains {found[0]} samples of {found[1]} streams, the generation lists {expected[0]} of"
            f" {expected[1]}",
            shard=record.name,
            hint="run `fastvid index DIR` to rebuild the sidecars of the dataset in DIR",
        )
    if place is not None and not shard.is_described:
        _warn_of_undescribed(storage.url)
    if (size := storage.size(shard.data)) != record.bytes:
        raise FormatError(
            f"{record.data} has {size} bytes, the generation lists {record.bytes}",
            shard=record.name,
            hint="restore the file from a copy of the dataset; `fastvid verify DIR` finds all damage",
        )
    return shard


def change(storage: Storage, edit: Edit) -> Generation:
    """Apply `edit` to the current generation and its annotations and commit the result; retry after a conflict.

    `edit` returns None if there is nothing to change. Returns the generation that is current afterwards.
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


def whole_file(shard: Shard, row: int, stream: str = "") -> tuple[str, bytes]:
    """Return the file suffix, such as ``mp4``, and all bytes of a sample in place that is a whole file."""
    if shard.info(row, stream).flags & StreamFlag.PART:
        raise UsageError(
            "the sample is a part of a file that others share",
            shard=shard.stem,
            file=shard.file(row, stream).file,
            hint="write its frames with `fastvid get --seconds`, or encode the dataset with `fastvid transcode` first",
        )
    suffix = PurePosixPath(shard.file(row, stream).file).suffix.lower().lstrip(".")
    return suffix or "mp4", shard.reader(row, stream).whole()
