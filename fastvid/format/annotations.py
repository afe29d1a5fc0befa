"""What a dataset stores about its samples besides packets: a row of annotations each, and signals of their frames.

Small annotations are in each process's memory. From MAPPED_ROWS on, the first process of a node writes them to Arrow
files in the node's cache, named by the SHA-256 in the generation. All processes of the node map these files, so that
their pages are in memory once per node, and pickling a dataset copies no rows. Without a usable cache, each process
reads them into memory.

    an Arrow IPC file, uncompressed
    trailer    the size of the Arrow file in bytes, and its CRC-32

Such a file is written once and never changed. Arrow checks its structure. When it is first mapped on a node, its whole
content is compared with the trailer; a small file beside it records the inode, size and time of what was compared.

Signals are numbers that a dataset has for every frame, such as the actions and the state of a robot.

    data-000000.signals.parquet   one row per frame of each sample of the shard, in the order of the samples

A signal is a column of numbers, or of lists of equally many. The generation lists the signals, and for each the names
of its values and statistics over all frames, with LeRobot's names. Small shards' signals are in each process's memory,
up to `MEMORY` bytes; from `MAPPED_FRAMES` frames on they are mapped like annotations.
"""

from __future__ import annotations

import bisect
import contextlib
import difflib
import logging
import os
import struct
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from fastvid.errors import FormatError, UsageError
from fastvid.format.generations import Generation, ShardRecord, read_annotations
from fastvid.format.packets import Recent
from fastvid.format.schema import ANNOTATION_FIELDS, FACT_FIELDS, SIGNALS, from_parquet, numpy_integers, to_parquet
from fastvid.runtime.arrays import IntArray
from fastvid.runtime.values import sha256
from fastvid.storage import Storage
from fastvid.storage.protocol import node_cache


def fact_columns(num_frames: int, fps: Fraction, width: int, height: int) -> dict[str, int | float]:
    """Return the columns of a sample's annotations that describe its video: ``num_frames`` and FACT_FIELDS."""
    facts = {"num_frames": num_frames, "fps": float(fps), "width": width, "height": height}
    return facts | {"duration": float(num_frames / fps)}


def annotation_table(rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Build annotations from rows: first fastvid's columns with their types, then all others as first encountered."""
    fixed = ANNOTATION_FIELDS | FACT_FIELDS
    extra = list(dict.fromkeys(name for row in rows for name in row if name not in fixed))
    columns = {name: pa.array([row.get(name) for row in rows], kind) for name, kind in fixed.items()}
    for name in extra:
        values = [row.get(name) for row in rows]
        try:
            columns[name] = pa.array(values)
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
            # Store a column of mixed types as strings: nothing is lost, but a filter must quote its values.
            columns[name] = pa.array([None if value is None else str(value) for value in values], pa.string())
    return pa.table(columns)


_TRAILER: Final = struct.Struct("<QI")  # size and CRC-32
_READ: Final = 1 << 20  # bytes of a file that are read at a time for its checksum
_VERIFIED: Final = ".verified"  # suffix of the file that records which version was compared
# Rows of a chunk, as in Parquet's row groups: offsets of strings fit 32 bits up to 2 KiB a row.
_CHUNK: Final = 2**20


def write_table(path: Path, table: pa.Table, *, chunk: int = _CHUNK) -> None:
    """Write a table to a new file that `map_table` can map; `chunk`: maximum rows of a chunk of the table."""
    options = pa.ipc.IpcWriteOptions(unify_dictionaries=True)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=chunk)
    with path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        crc = _checksum(file, size)
        file.seek(size)
        file.write(_TRAILER.pack(size, crc))


def map_table(path: Path) -> pa.Table:
    """Map the table in a file. The file may be deleted while it is mapped, but must not be truncated."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END) - _TRAILER.size
        file.seek(max(size, 0))
        trailer = file.read()
        if size < 0 or len(trailer) != _TRAILER.size or trailer[:8] != _TRAILER.pack(size, 0)[:8]:
            raise FormatError("truncated file of mapped annotations", file=str(path), hint="delete the file")
        _verify(path, file, trailer)
    try:
        table: pa.Table = pa.ipc.open_file(pa.memory_map(str(path)), footer_offset=size).read_all()
    except pa.ArrowException as error:
        raise FormatError(f"cannot parse mapped annotations: {error}", file=str(path), hint="delete it") from error
    return table


def _verify(path: Path, file: BinaryIO, trailer: bytes) -> None:
    """Compare a file with its checksum, unless this version of the file was compared before."""
    facts = os.fstat(file.fileno())
    version = f"{facts.st_ino} {facts.st_size} {facts.st_mtime_ns} {trailer.hex()}"
    seen = path.with_name(f"{path.name}{_VERIFIED}")
    with contextlib.suppress(OSError, ValueError):
        if seen.read_text() == version:
            return
    size, crc = _TRAILER.unpack(trailer)
    if _checksum(file, size) != crc:
        raise FormatError("damaged file of mapped annotations", file=str(path), hint="delete the file")
    with contextlib.suppress(OSError):  # without the record, the file is compared again next time
        seen.write_text(version)


def _checksum(file: BinaryIO, size: int) -> int:
    """Return the CRC-32 of the first `size` bytes of a file."""
    file.seek(0)
    crc = 0
    for start in range(0, size, _READ):
        crc = zlib.crc32(file.read(min(_READ, size - start)), crc)
    return crc


log = logging.getLogger(__name__)

MAPPED_ROWS: Final = 100_000
"""Number of rows from which annotations are mapped; fewer are read in a tenth of a second and take tens of MB."""

# Change it when the layout of the files changes, so that files of an older fastvid are not used.
_LAYOUT: Final = "3"


# How each array of `GenerationRows` is computed, int64 [N].
_ARRAYS: Final[dict[str, Callable[[pa.Table], IntArray]]] = {
    "labels": lambda table: numpy_integers(table["label"], null=-1),
    "num_frames": lambda table: np.asarray(table["num_frames"].to_numpy(), dtype=np.int64),
    "rows": lambda table: np.arange(table.num_rows, dtype=np.int64),
    "by_key": lambda table: np.asarray(pc.sort_indices(table["key"]).to_numpy(), dtype=np.int64),
}


class GenerationRows:
    """All rows of a generation, selected or not, and arrays computed from them.

    `table`: the rows, in the order of the shards. `arrays`: a mapped table of one chunk with an int64 column for each
    array; None computes the arrays on demand.
    """

    def __init__(self, storage: Storage, generation: Generation, table: pa.Table, arrays: pa.Table | None) -> None:
        self.table, self.is_mapped = table, arrays is not None
        self._origin = storage, generation
        self._arrays: dict[str, IntArray] = {}
        if arrays is not None:
            columns = zip(arrays.column_names, arrays.columns, strict=True)
            self._arrays = {name: column.chunk(0).to_numpy(zero_copy_only=True) for name, column in columns}

    def __reduce__(self) -> tuple[Any, ...]:
        if self.is_mapped:
            return open_annotations, self._origin
        return GenerationRows, (*self._origin, self.table, None)

    @property
    def labels(self) -> IntArray:
        """Label of each row, int64 [N]; -1 for none. Shared, like the other arrays: do not write to it."""
        return self._array("labels")

    @property
    def num_frames(self) -> IntArray:
        """Number of frames of each row's first video stream, int64 [N]."""
        return self._array("num_frames")

    @property
    def rows(self) -> IntArray:
        """The numbers of all rows, int64 [N]; the same object at every call."""
        return self._array("rows")

    def row(self, key: str) -> int | None:
        """Return the row number of a key, or None, by bisection: 24 comparisons for ten million rows."""
        order, keys = self._array("by_key"), self.table["key"]
        place = bisect.bisect_left(order, key, key=lambda row: keys[int(row)].as_py())
        if place == len(order) or keys[int(order[place])].as_py() != key:
            return None
        return int(order[place])

    def _array(self, name: str) -> IntArray:
        found = self._arrays.get(name)
        if found is None:
            # Two threads may both compute the array; both then return the one stored first.
            found = self._arrays.setdefault(name, _ARRAYS[name](self.table))
        return found


def open_annotations(storage: Storage, generation: Generation) -> GenerationRows:
    """Open a generation's annotations, mapped if they are large and the node's cache can be used."""
    if generation.num_samples >= MAPPED_ROWS and generation.annotations_sha256:
        content, rows = generation.annotations_sha256, generation.num_samples
        table = _mapped(f"{content} rows", rows, lambda path: write_table(path, read_annotations(storage, generation)))
        if table is not None:
            # In one chunk, so that every array is a view of the file.
            arrays = _mapped(
                f"{content} arrays", rows, lambda path: write_table(path, _all_arrays(table), chunk=table.num_rows)
            )
            if arrays is not None:
                return GenerationRows(storage, generation, table, arrays)
    return GenerationRows(storage, generation, read_annotations(storage, generation), None)


def _all_arrays(table: pa.Table) -> pa.Table:
    whole = "num_frames" in table.column_names and not table["num_frames"].null_count
    names = [name for name in _ARRAYS if name != "num_frames" or whole]
    return pa.table({name: _ARRAYS[name](table) for name in names})


def _mapped(what: str, rows: int, write: Callable[[Path], None]) -> pa.Table | None:
    """Map a table in the node's cache, writing it first if it is missing or damaged; None without a usable cache.

    `what`: identifies the content. `rows`: number of rows that it must have.
    """
    cache, name = node_cache(), sha256(f"{what} {_LAYOUT}".encode())
    for _ in range(2):
        path = cache.file(name, write) if cache else None
        if cache is None or path is None:
            return None
        try:
            table = map_table(path)
            if table.num_rows == rows:
                return table
            log.warning("mapped table has %d rows instead of %d [file=%s]", table.num_rows, rows, path)
        except (FormatError, OSError) as error:
            log.warning("cannot map a table, writing it again: %s [file=%s]", error, path)
        cache.discard(name)
    return None


def join_stats(parts: Sequence[Mapping[str, Any] | None]) -> dict[str, Any] | None:
    """Return statistics over all frames of several datasets, computed from those of each; None if one has none.

    Quantiles cannot be computed in this way and are omitted. ``std`` is the standard deviation of the population.
    """
    names = ("min", "max", "mean", "std", "count")
    if not all(part is not None and all(name in part for name in names) for part in parts):
        return None
    low, high, means, stds, counts = (np.array([part[name] for part in parts if part], np.float64) for name in names)
    counts = counts.reshape(len(parts), *[1] * (means.ndim - 1))
    total = counts.sum(axis=0)
    mean = (means * counts).sum(axis=0) / total
    variance = ((stds**2 + (means - mean) ** 2) * counts).sum(axis=0) / total
    return {
        "min": low.min(axis=0).tolist(),
        "max": high.max(axis=0).tolist(),
        "mean": mean.tolist(),
        "std": np.sqrt(variance).tolist(),
        "count": [int(total.item() if total.size == 1 else total.flat[0])],
    }


MAPPED_FRAMES: Final = 100_000
"""Number of frames of a shard from which its signals are mapped."""

MEMORY: Final = 256 * 2**20
"""Bytes of signals that a process keeps in memory, of shards whose signals are not mapped."""


_RESTORE: Final = "restore the file from a copy of the dataset"


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
    """Read the signals of a shard, and check their SHA-256; `num_frames`: total frames of its samples."""
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
    """The signals of a dataset by name, and their values. Thread-safe; unpickled in another process, reads them again.

    `num_frames`: frames of each sample of the generation, int64 [N].
    """

    def __init__(self, storage: Storage, generation: Generation, num_frames: IntArray) -> None:
        self._storage, self._generation, self._num_frames = storage, generation, num_frames
        self._known: Mapping[str, Mapping[str, Any]] = generation.extras.get(SIGNALS, {})
        stops = np.cumsum([shard.samples for shard in generation.shards])
        self._samples: list[int] = [0, *stops.tolist()]
        # First frame of each sample, counted over all samples.
        self._starts: IntArray = np.concatenate([[0], np.cumsum(num_frames, dtype=np.int64)])
        self._lock = threading.Lock()
        self._arrays = Recent[tuple[int, str], npt.NDArray[Any]](MEMORY, _in_memory)

    def __getitem__(self, name: str) -> Mapping[str, Any]:
        """Return ``names`` of a signal's values and ``stats`` over all frames, as far as the dataset has them."""
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
        """Return a signal's values at frames of samples, [B, T] or [B, T, A].

        `rows`: row of each sample in the generation, int64 [B]. `frames`: frame indices in each sample, int64 [B, T].
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
        with self._lock:  # so that two threads do not read the same signals
            found = self._arrays.get((shard, name))
            if found is None:
                found = self._arrays.add((shard, name), _as_array(self._column(shard, name)))
            return found

    def _count(self, shard: int) -> int:
        """Return the number of frames of a shard."""
        return int(self._starts[self._samples[shard + 1]] - self._starts[self._samples[shard]])

    def _column(self, shard: int, name: str) -> pa.ChunkedArray:
        self[name]  # raises UsageError if there is no such signal
        record, count = self._generation.shards[shard], self._count(shard)
        read = partial(read_signals, self._storage, record, count)
        table = None
        if count >= MAPPED_FRAMES:
            table = _mapped(f"{record.signals} signals", count, lambda path: write_table(path, read(), chunk=count))
        table = read() if table is None else table
        if name not in table.column_names:
            raise FormatError(f"shard has no signal {name!r}", shard=record.name, hint=_RESTORE)
        return table[name]


def _in_memory(array: npt.NDArray[Any]) -> int:
    """Return the bytes of memory that an array of a shard takes, 0 if it is mapped."""
    return 0 if len(array) >= MAPPED_FRAMES else array.nbytes


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
    """Signals of those samples of a shard that are kept when a new shard is made."""

    storage: Storage
    shard: ShardRecord
    num_frames: Sequence[int]  # frames of each sample of the shard
    keep: npt.NDArray[np.bool_]  # whether each sample is kept, bool [samples]

    def read(self) -> pa.Table:
        """Return one row per frame of the kept samples; raises the errors of `read_signals`."""
        table = read_signals(self.storage, self.shard, sum(self.num_frames))
        return table.filter(pa.array(np.repeat(self.keep, np.asarray(self.num_frames, np.int64))))


def join_signals(storage: Storage, shard: str, parts: Sequence[KeptSignals]) -> str:
    """Write the signals of a shard made of samples of other shards; return the file's SHA-256, "" without signals.

    `parts`: the kept samples of each shard, in order.
    """
    if not any(part.shard.signals for part in parts):
        return ""
    return write_signals(storage, shard, pa.concat_tables([part.read() for part in parts]))
