"""Select samples by split or by a condition in SQL.

A condition is, for example, ``fps >= 24 and class = 'archery'``. DuckDB parses and evaluates it, so DuckDB's whole
expression language works: ``LIKE``, ``IN``, ``BETWEEN``, ``IS NULL``, ``'x' IN labels`` for a list column, arithmetic,
``length(caption)``, regular expressions. A condition can read only the table: no files, no network and no variables of
the program. It must be a function of the sample's row.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fastvid.errors import UsageError, naming_extras
from fastvid.runtime.arrays import IntArray
from fastvid.runtime.near_names import near_names
from fastvid.runtime.processes import available_cores
from fastvid.runtime.values import check_choice, check_kind

_ROW: Final = "__row"
_MEMORY: Final = "4GB"
_TIMEOUT_SECONDS: Final = 120.0
"""Seconds after which a filter is interrupted; ten million rows take half a second."""
_LONGEST: Final = 100_000  # characters of a condition
_CLOCKS: Final = ("current_", "local", "session_", "user")  # names that begin so depend on time or session
# Deterministic functions without side effects, and macros that call only those; DuckDB itself rejects aggregates here.
_PURE: Final = """
    SELECT function_name FROM duckdb_functions() WHERE function_type IN ('scalar', 'aggregate')
    GROUP BY 1 HAVING bool_and(stability = 'CONSISTENT')
    UNION SELECT function_name FROM duckdb_functions() WHERE function_type = 'macro'
        AND regexp_matches(function_name, '^(list|array|map|json|date|round)_')
"""
_SPLIT: Final = "split"


def matching_rows(table: pa.Table, condition: str) -> IntArray:
    """Return the rows for which a condition is true, int64 [M], ascending. In SQL a comparison with NULL is not true.

    A condition must be a function of the row: with ``random()``, for example, every process would select other rows.
    """
    with naming_extras():
        import duckdb  # slow to import, and few programs filter

    numbered = table.append_column(_ROW, pa.array(np.arange(table.num_rows, dtype=np.int64)))
    limits: dict[str, Any] = {"threads": available_cores(), "memory_limit": _MEMORY, "temp_directory": ""}
    try:
        with duckdb.connect(":memory:", config=limits) as engine:
            # Not by connect(), which sets what it is given in no certain order: without access to files DuckDB refuses
            # to set the folder of temporary ones.
            engine.execute("SET enable_external_access = false")
            engine.execute("SET python_enable_replacements = false")
            engine.execute("SET lock_configuration = true")
            _check_pure(engine, condition, table.column_names)
            alarm = threading.Timer(_TIMEOUT_SECONDS, engine.interrupt)
            alarm.daemon = True
            alarm.start()
            try:
                chosen = engine.from_arrow(numbered).filter(condition).project(_ROW).fetchnumpy()[_ROW]
            finally:
                alarm.cancel()
    except (duckdb.Error, MemoryError, pa.ArrowException) as error:
        raise _translated(error, condition, table) from None  # it has the engine's message
    return np.sort(np.asarray(chosen, dtype=np.int64))


def _check_pure(engine: Any, condition: str, columns: Sequence[str]) -> None:
    """Raise UsageError for a condition that depends on anything but the row."""
    if len(condition) > _LONGEST:
        raise UsageError(
            f"condition of {len(condition):,} characters, at most {_LONGEST:,} are allowed",
            hint="put what it lists into a column with `fastvid relabel`",
        )
    statement = f"SELECT 1 FROM rows WHERE {condition}"  # noqa: S608 - it is parsed, not run
    ((text,),) = engine.execute("SELECT json_serialize_sql(?)", [statement]).fetchall()
    try:
        parsed = json.loads(text)
    except RecursionError as error:
        raise UsageError("condition is nested too deeply") from error
    if parsed["error"]:
        return  # DuckDB reports what is wrong when the filter runs
    known = {name.lower() for name in columns}
    query = parsed["statements"][0]["node"]
    parts = list(_parts(query.get("where_clause", {"class": "SUBQUERY"})))
    # Most conditions only compare columns, and listing the functions takes longer than that.
    called = any(kind == "FUNCTION" for kind, _ in parts)
    pure = {name for (name,) in engine.execute(_PURE).fetchall()} if called else set[str]()
    for kind, name in parts:
        # Words such as current_date look like columns. DuckDB of earlier versions calls current_setting deterministic.
        is_own = kind == "COLUMN_REF" and name in known
        impure = kind in ("COLUMN_REF", "FUNCTION") and not is_own and name.startswith(_CLOCKS)
        if impure or kind in ("SUBQUERY", "WINDOW") or (kind == "FUNCTION" and name not in pure):
            what = {"SUBQUERY": "a query", "WINDOW": "a window"}.get(kind, name)
            raise UsageError(
                f"cannot select by where={condition!r}: {what} depends on more than the row of a sample",
                hint="compare columns and constants; in place of a list in a query use IN ('a', 'b') or list_contains",
            )


def _parts(node: object) -> Iterator[tuple[str, str]]:
    """Yield the kind and the name of each part of a condition that DuckDB parsed to JSON."""
    waiting = [node]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            kind, names = part.get("class", ""), part.get("column_names") or [part.get("function_name", "")]
            yield kind, str(names[0]).lower()
            waiting += part.values()
        elif isinstance(part, list):
            waiting += part


def with_class(table: pa.Table, classes: Sequence[str]) -> pa.Table:
    """Add the column ``class``, the class name of each label."""
    if not classes:
        return table
    names = pa.DictionaryArray.from_arrays(table["label"].combine_chunks(), pa.array(classes, pa.string()))
    return table.append_column("class", names)


def in_split(table: pa.Table, split: str) -> pa.ChunkedArray:
    """Return for each row whether it is in a split; null if its split is null."""
    check_kind("split", split, str, use="a name, or where=\"split in ('a', 'b')\"")
    column, colon, value = split.rpartition(":")
    column = column if colon else _SPLIT
    names = table.column_names
    if column not in names:
        known = [name for name in names if name.startswith(_SPLIT)]
        hint = f"use one of {', '.join(known)}" if known else "omit `split`, or run `fastvid split DIR 0.9,0.1`"
        raise UsageError(f"dataset has no split column {column!r}", hint=hint)
    values = pc.unique(table[column]).to_pylist()
    check_choice(f"no sample has {column} {{}}", value, sorted(str(v) for v in values if v is not None))
    return pc.equal(table[column], value)


def _translated(error: Exception, condition: str, table: pa.Table) -> UsageError:
    reason = str(error).partition("\n")[0]
    columns = ", ".join(sorted(table.column_names))
    hint = f"use the columns {columns}"
    if "Could not convert string" in reason and re.search(r"\blabel\b", condition):
        hint = "labels are numbers: compare the column class with a name"
    unknown = re.search(r'Referenced column "([^"]*)" not found', reason)
    if unknown:
        # SQL ignores the case of column names, so the hint does too.
        lower = {name.lower(): name for name in table.column_names}
        near = near_names(pa.chunked_array([list(lower)], pa.string()), unknown[1].lower())
        if near:
            hint = f"did you mean {', '.join(lower[name] for name in near)}? {hint}"
        quoted = f"write text in single quotes: '{unknown[1]}'"
        hint = f"{quoted}; {hint}" if f'"{unknown[1]}"' in condition else f"{hint}; {quoted}"
    return UsageError(f"cannot select by where={condition!r}: {reason}", hint=hint)
