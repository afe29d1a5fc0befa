"""Select rows of a table by split, or by a condition in SQL such as ``fps >= 24 and class = 'archery'``.

DuckDB parses and evaluates the condition, so its whole expression language works: ``LIKE``, ``IN``, ``BETWEEN``,
``IS NULL``, ``'x' IN labels`` for a list column, arithmetic, ``length(caption)``, regular expressions. A condition
reads the table alone: it sees no file, no network and no variable of the program.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fastvid.errors import UsageError
from fastvid.runtime.arrays import IntArray
from fastvid.runtime.cores import available_cores
from fastvid.runtime.near_names import near_names

_ROW: Final = "__row"
_SPLIT: Final = "split"


def matching_rows(table: pa.Table, condition: str) -> IntArray:
    """Return the rows for which a condition is true, as SQL defines it: a comparison with NULL is not.

    Returns row numbers, ascending, int64 [M].
    """
    import duckdb  # slow to import, and few programs filter

    numbered = table.append_column(_ROW, pa.array(np.arange(table.num_rows, dtype=np.int64)))
    try:
        with duckdb.connect(
            ":memory:", config={"enable_external_access": "false", "threads": available_cores()}
        ) as engine:
            engine.execute("SET python_enable_replacements = false")
            engine.execute("SET lock_configuration = true")
            chosen = engine.from_arrow(numbered).filter(condition).project(_ROW).fetchnumpy()[_ROW]
    except duckdb.Error as error:
        raise _translated(error, condition, table) from error
    return np.sort(np.asarray(chosen, dtype=np.int64))


def with_class(table: pa.Table, classes: Sequence[str]) -> pa.Table:
    """Add the column ``class``, the name of each label, unless the annotations have one of their own."""
    if "class" in table.column_names or not classes:
        return table
    names = pa.DictionaryArray.from_arrays(table["label"].combine_chunks(), pa.array(classes, pa.string()))
    return table.append_column("class", names)


def in_split(table: pa.Table, split: str) -> pa.ChunkedArray:
    """Return for each row whether it is in a split, or null."""
    column, colon, value = split.rpartition(":")
    column = column if colon else _SPLIT
    names = table.column_names
    if column not in names:
        known = [name for name in names if name.startswith(_SPLIT)]
        hint = f"use one of {', '.join(known)}" if known else "omit `split`: the samples have none"
        raise UsageError(f"dataset has no split column {column!r}", hint=hint)
    values = pc.unique(table[column]).to_pylist()
    if value not in values:
        present = ", ".join(sorted(str(v) for v in values if v is not None))
        raise UsageError(f"no sample has {column} {value!r}", hint=f"use one of {present}")
    return pc.equal(table[column], value)


def _translated(error: Exception, condition: str, table: pa.Table) -> UsageError:
    reason = str(error).partition("\n")[0]
    columns = ", ".join(sorted(table.column_names))
    hint = f"use the columns {columns}"
    unknown = re.search(r'Referenced column "([^"]*)" not found', reason)
    if unknown:
        # SQL ignores the case of a column's name, so the hint does, too.
        lower = {name.lower(): name for name in table.column_names}
        near = near_names(pa.chunked_array([list(lower)], pa.string()), unknown[1].lower())
        if near:
            hint = f"did you mean {', '.join(lower[name] for name in near)}? {hint}"
        if f'"{unknown[1]}"' in condition:
            hint = f"write text in single quotes: '{unknown[1]}'; {hint}"
    return UsageError(f"cannot select by where={condition!r}: {reason}", hint=hint)
