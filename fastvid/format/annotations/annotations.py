"""The rows of a generation's annotations with the arrays that selections and look-ups need.

Small annotations are in each process's memory. From MAPPED_ROWS on, the first process of a node writes them to Arrow
files in the node's cache, named by the SHA-256 in the generation; it and all others map these files, so that their
pages exist once per node, and pickling carries no rows. Without a usable cache, they are in memory as well.
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fastvid.errors import FormatError
from fastvid.format.annotations.mapped_table import map_table, write_table
from fastvid.format.generations import Generation, read_annotations
from fastvid.runtime.arrays import IntArray
from fastvid.runtime.hashing import sha256
from fastvid.storage import Storage
from fastvid.storage.node_cache import node_cache

log = logging.getLogger(__name__)

MAPPED_ROWS: Final = 100_000
"""Number of rows from which annotations are mapped: fewer are read in a tenth of a second and take tens of MB."""

# Change it when the layout of the files changes, so that an older fastvid's files are not used.
_LAYOUT: Final = "1"


def _labels(table: pa.Table) -> IntArray:
    return np.asarray(table["label"].fill_null(-1).to_numpy(), dtype=np.int64)


def _num_frames(table: pa.Table) -> IntArray:
    return np.asarray(table["num_frames"].to_numpy(), dtype=np.int64)


def _rows(table: pa.Table) -> IntArray:
    return np.arange(table.num_rows, dtype=np.int64)


def _by_key(table: pa.Table) -> IntArray:
    return np.asarray(pc.sort_indices(table["key"]).to_numpy(), dtype=np.int64)


_ARRAYS: Final[dict[str, Callable[[pa.Table], IntArray]]] = {
    "labels": _labels, "num_frames": _num_frames, "rows": _rows, "by_key": _by_key,
}  # fmt: skip


class GenerationRows:
    """All rows of a generation, selected or not.

    `table`: the rows, in the order of the shards. `arrays`: A table of one chunk with an int64 column for each of
    the arrays, mapped; None computes them on demand.
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
        """Label of each row, int64 [N]; -1 for none. Like the other arrays, it is shared: do not write to it."""
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
        """Return the row with a key, or None, by bisection: 24 comparisons for ten million rows."""
        order, keys = self._array("by_key"), self.table["key"]
        place = bisect.bisect_left(order, key, key=lambda row: keys[int(row)].as_py())
        if place == len(order) or keys[int(order[place])].as_py() != key:
            return None
        return int(order[place])

    def _array(self, name: str) -> IntArray:
        found = self._arrays.get(name)
        if found is None:
            # Two threads may compute it; both get the first one.
            found = self._arrays.setdefault(name, _ARRAYS[name](self.table))
        return found


def open_annotations(storage: Storage, generation: Generation) -> GenerationRows:
    """Open a generation's annotations, mapped if they are large and the node's cache can be used."""
    if generation.num_samples >= MAPPED_ROWS and generation.annotations_sha256:
        table = _mapped(generation, "rows", lambda path: write_table(path, read_annotations(storage, generation)))
        if table is not None:
            # Its one chunk makes every array a view of the file.
            arrays = _mapped(
                generation, "arrays", lambda path: write_table(path, _all_arrays(table), chunk=table.num_rows)
            )
            if arrays is not None:
                return GenerationRows(storage, generation, table, arrays)
    return GenerationRows(storage, generation, read_annotations(storage, generation), None)


def _all_arrays(table: pa.Table) -> pa.Table:
    whole = "num_frames" in table.column_names and not table["num_frames"].null_count
    names = [name for name in _ARRAYS if name != "num_frames" or whole]
    return pa.table({name: _ARRAYS[name](table) for name in names})


def _mapped(generation: Generation, part: str, write: Callable[[Path], None]) -> pa.Table | None:
    """Map a file of the node's cache, writing it first if it is missing or damaged; None without a usable cache."""
    cache = node_cache()
    name = sha256(f"{generation.annotations_sha256} {part} {_LAYOUT}".encode())
    for _ in range(2):
        path = cache.file(name, write) if cache else None
        if cache is None or path is None:
            return None
        try:
            table = map_table(path)
            if table.num_rows == generation.num_samples:
                return table
            log.warning("mapped annotations have %d rows [file=%s]", table.num_rows, path)
        except (FormatError, OSError) as error:
            log.warning("cannot map annotations, writing them again: %s [file=%s]", error, path)
        cache.discard(name)
    return None
