"""Signals: numbers that a dataset has for every frame, such as the actions and the state of a robot.

    data-000000.signals.parquet   one row per frame of each sample of the shard, in the order of the samples

A signal is a column of numbers, or of lists of equally many. The generation says which signals there are, with what is
known of each: the names of its values, and statistics over all frames.

Small shards are in each process's memory, up to `MEMORY`. From `MAPPED_FRAMES` on, the first process of a node writes a
shard's signals to a file in the node's cache, which all processes map.
"""

from __future__ import annotations

import difflib
import logging
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from fastvid.errors import FormatError, UsageError
from fastvid.format.annotations.mapped_table import map_table, write_table
from fastvid.format.generations import Generation, ShardRecord
from fastvid.format.parquet import from_parquet, to_parquet
from fastvid.format.schema import SIGNALS
from fastvid.runtime.arrays import IntArray
from fastvid.runtime.hashing import sha256
from fastvid.storage import Storage
from fastvid.storage.node_cache import node_cache

MAPPED_FRAMES: Final = 100_000
"""Frames of a shard from which its signals are mapped."""

MEMORY: Final = 256 * 2**20
"""Bytes of signals that a process keeps of shards that are not mapped."""

_LAYOUT: Final = "1"

_RESTORE: Final = "restore the file from a copy of the dataset"

log = logging.getLogger(__name__)


def signals_file(shard: str) -> str:
    """Return the name of the file of a shard's signals."""
    return f"{shard}.signals.parquet"


def write_signals(storage: Storage, shard: str, table: pa.Table) -> str:
    """Write the signals of a shard; return the SHA-256 of the file for its `ShardRecord`.

    `table`: one row per frame, in the order of the samples; columns of numbers, or of lists of a fixed length.
    """
    for name, column in zip(table.column_names, table.columns, strict=True):
        value = column.type.value_type if pa.types.is_fixed_size_list(column.type) else column.type
        if not (pa.types.is_floating(value) or pa.types.is_integer(value) or pa.types.is_boolean(value)):
            raise FormatError(f"signal {name!r} has type {column.type}", hint="use numbers, or lists of a fixed length")
        if column.null_count:
            raise FormatError(f"signal {name!r} has {column.null_count} nulls")
    content = to_parquet(table)
    storage.write(signals_file(shard), content)
    return sha256(content)


def read_signals(storage: Storage, record: ShardRecord, num_frames: int) -> pa.Table:
    """Read the signals of a shard.

    `num_frames`: frames of all its samples.
    """
    name = signals_file(record.name)
    content = storage.read(name)
    if sha256(content) != record.signals:
        raise FormatError("signals are not those of the generation", file=f"{storage.url}/{name}", hint=_RESTORE)
    table = from_parquet(content, file=name)
    if table.num_rows != num_frames:
        raise FormatError(
            f"signals have {table.num_rows} rows, the samples have {num_frames} frames",
            file=f"{storage.url}/{name}",
            hint=_RESTORE,
        )
    return table


class Signals(Mapping[str, Mapping[str, Any]]):
    """The signals of a dataset by name, and their values. Thread-safe; another process reads them again.

    `num_frames`: frames of each sample of the generation, int64 [N].
    """

    def __init__(self, storage: Storage, generation: Generation, num_frames: IntArray) -> None:
        self._storage, self._generation, self._num_frames = storage, generation, num_frames
        self._known: Mapping[str, Mapping[str, Any]] = generation.extras.get(SIGNALS, {})
        stops = np.cumsum([shard.samples for shard in generation.shards])
        self._samples: list[int] = [0, *stops.tolist()]
        # First frame of each sample, counted from the first of all.
        self._starts: IntArray = np.concatenate([[0], np.cumsum(num_frames, dtype=np.int64)])
        self._lock = threading.Lock()
        self._arrays: OrderedDict[tuple[int, str], npt.NDArray[Any]] = OrderedDict()
        self._bytes = 0

    def __getitem__(self, name: str) -> Mapping[str, Any]:
        """Return what is known of a signal: ``names`` of its values, ``stats``."""
        if name not in self._known:
            near = ", ".join(difflib.get_close_matches(name, self._known) or self._known) or "none"
            raise UsageError(f"dataset has no signal {name!r}", file=self._storage.url, hint=f"it has {near}")
        return self._known[name]

    def __contains__(self, name: object) -> bool:
        return name in self._known

    def __iter__(self) -> Any:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)

    def __reduce__(self) -> tuple[object, ...]:
        return Signals, (self._storage, self._generation, self._num_frames)

    def values(self, name: str, rows: IntArray, frames: IntArray) -> npt.NDArray[Any]:  # type: ignore[override]
        """Return a signal at frames of samples, [B, T] or [B, T, A].

        `rows`: row of each sample in the generation, int64 [B]. `frames`: frames of each, int64 [B, T], inside
        the sample.
        """
        shards = np.searchsorted(self._samples, rows, side="right") - 1
        at = self._starts[rows][:, None] + frames
        parts = {shard: self._array(shard, name) for shard in np.unique(shards).tolist()}
        first = next(iter(parts.values()))
        found = np.empty((*frames.shape, *first.shape[1:]), first.dtype)
        for shard, array in parts.items():
            mine = shards == shard
            found[mine] = array[at[mine] - self._starts[self._samples[shard]]]
        return found

    def _array(self, shard: int, name: str) -> npt.NDArray[Any]:
        with self._lock:
            found = self._arrays.get((shard, name))
            if found is not None:
                self._arrays.move_to_end((shard, name))
                return found
            found = self._arrays[shard, name] = _as_array(self._column(shard, name))
            self._bytes += self._size(shard, found)
            while self._bytes > MEMORY and len(self._arrays) > 1:
                (other, _), array = self._arrays.popitem(last=False)
                self._bytes -= self._size(other, array)
            return found

    def _size(self, shard: int, array: npt.NDArray[Any]) -> int:
        """Return the bytes of memory that an array of a shard takes."""
        return 0 if self._count(shard) >= MAPPED_FRAMES else array.nbytes

    def _count(self, shard: int) -> int:
        """Return the number of frames of a shard."""
        return int(self._starts[self._samples[shard + 1]] - self._starts[self._samples[shard]])

    def _column(self, shard: int, name: str) -> pa.ChunkedArray:
        self[name]  # an error if there is none
        record, count = self._generation.shards[shard], self._count(shard)
        table = _mapped(self._storage, record, count) if count >= MAPPED_FRAMES else None
        table = read_signals(self._storage, record, count) if table is None else table
        if name not in table.column_names:
            raise FormatError(f"shard has no signal {name!r}", shard=record.name, hint=_RESTORE)
        return table[name]


def _mapped(storage: Storage, record: ShardRecord, count: int) -> pa.Table | None:
    """Map a file of the node's cache, writing it first if it is missing or damaged; None without a usable cache."""
    cache, name = node_cache(), sha256(f"{record.signals} signals {_LAYOUT}".encode())

    def write(path: Path) -> None:
        write_table(path, read_signals(storage, record, count), chunk=count)

    for _ in range(2):
        path = cache.file(name, write) if cache else None
        if cache is None or path is None:
            return None
        try:
            return map_table(path)
        except (FormatError, OSError) as error:
            log.warning("cannot map signals, writing them again: %s [file=%s]", error, path)
        cache.discard(name)
    return None


def _as_array(column: pa.ChunkedArray) -> npt.NDArray[Any]:
    """Return a column as an array [N] or [N, A], a view of its memory if it has one chunk of numbers."""
    whole = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    if isinstance(whole, pa.ChunkedArray):  # of an empty column
        whole = pa.concat_arrays(whole.chunks) if whole.num_chunks else pa.array([], column.type)
    if pa.types.is_fixed_size_list(column.type):
        flat: npt.NDArray[Any] = whole.flatten().to_numpy(zero_copy_only=False)
        return flat.reshape(-1, column.type.list_size)
    found: npt.NDArray[Any] = whole.to_numpy(zero_copy_only=False)
    return found


@dataclass(frozen=True, slots=True)
class KeptSignals:
    """The signals of some samples of a shard."""

    storage: Storage
    shard: ShardRecord
    num_frames: Sequence[int]  # frames of each of its samples
    keep: npt.NDArray[np.bool_]  # whether each is kept, bool [samples]

    def read(self) -> pa.Table:
        """Return one row per frame of the kept samples; errors as of `read_signals`."""
        table = read_signals(self.storage, self.shard, sum(self.num_frames))
        return table.filter(pa.array(np.repeat(self.keep, np.asarray(self.num_frames, np.int64))))


def join_signals(storage: Storage, shard: str, parts: Sequence[KeptSignals]) -> str:
    """Write the signals of a shard that is made of samples of others; return their SHA-256, "" if they have none.

    `parts`: the samples, in order.
    """
    if not any(part.shard.signals for part in parts):
        return ""
    return write_signals(storage, shard, pa.concat_tables([part.read() for part in parts]))
