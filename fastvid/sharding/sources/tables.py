"""Read tables as rows of column values: CSV with a header, JSON, JSON Lines and Parquet."""

from __future__ import annotations

import csv
import datetime
import decimal
import io
import json
import math
import re
from collections.abc import Collection, Sequence
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from fastvid.errors import UsageError
from fastvid.sharding.sources.columns import ENTRY, NumberedRecord

FIRST_ROW: Final = 2
"""Line of a CSV's first row; the header is line 1."""

# As JSON writes numbers. Text such as 0022, 1_000 or nan is no number.
_INTEGER: Final = re.compile(r"-?(0|[1-9][0-9]{0,18})")
_NUMBER: Final = re.compile(r"-?(0|[1-9][0-9]*)?(\.[0-9]*)?([eE][+-]?[0-9]+)?")
_INT64: Final = 1 << 63
_CLOCK: Final = re.compile(r"(?:(\d+):)?(\d+):([0-5]?\d(?:\.\d*)?)", re.ASCII)


def read_text_rows(text: str) -> list[dict[str, str]]:
    """Read the rows of a CSV as text; fields missing at the end of a row are empty."""
    reader = csv.reader(io.StringIO(text))
    try:
        lines = [(reader.line_num, fields) for fields in reader if fields]
    except csv.Error as error:
        raise UsageError(
            f"CSV does not parse: {error}", row=reader.line_num, hint="check the quotes of its fields"
        ) from error
    if not lines:
        return []
    header = lines[0][1]
    if double := next((name for name in header if header.count(name) > 1), None):
        raise UsageError(f"duplicate column {double!r}", row=1, hint="rename or delete one of the columns")
    rows = []
    for number, fields in lines[1:]:
        if len(fields) > len(header):
            raise UsageError(
                "row has more fields than the header", row=number, hint="quote fields that contain a comma"
            )
        rows.append(dict(zip(header, fields + [""] * (len(header) - len(fields)), strict=True)))
    return rows


def read_rows(text: str, *, text_columns: Collection[str]) -> list[dict[str, Any]]:
    """Read the rows of a CSV, see `read_text_rows`."""
    rows: list[dict[str, Any]] = [dict(row) for row in read_text_rows(text)]
    for name in rows[0] if rows else ():
        if name not in text_columns:
            for row, value in zip(rows, _typed([row[name] for row in rows]), strict=True):
                row[name] = value
    return rows


def read_objects(text: str, inside: str | None = None) -> list[NumberedRecord]:
    """Read the objects of a JSON list, or of a JSON object, whose names become the column ``entry``."""
    found = json.loads(text)
    if inside is not None:
        found = found[inside]
    if isinstance(found, dict) and found and all(isinstance(record, dict) for record in found.values()):
        taken = next((name for name, record in found.items() if ENTRY in record), None)
        if taken is not None:
            raise UsageError(f"object {taken!r} has a field {ENTRY!r}", hint="rename it: objects' names take this name")
        found = [{ENTRY: name, **record} for name, record in found.items()]
    if not isinstance(found, list) or not all(isinstance(record, dict) for record in found):
        raise UsageError("JSON is not a list of objects", hint="use jsonl: for a file with one object per line")
    return list(enumerate(found, 1))


def read_lines(text: str) -> list[NumberedRecord]:
    """Read JSON Lines: one object per line; empty lines are skipped."""
    records = []
    for number, line in enumerate(text.split("\n"), 1):  # splitlines would split at U+2028 too, which JSON may contain
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UsageError(
                f"line is not JSON: {error}", row=number, hint="write one JSON object per line, or use json: for a list"
            ) from error
        if not isinstance(record, dict):
            raise UsageError("line is not a JSON object", row=number, hint="write one JSON object per line")
        records.append((number, record))
    return records


def read_parquet(data: bytes) -> list[NumberedRecord]:
    """Read the rows of a Parquet file."""
    try:
        table = pq.read_table(pa.BufferReader(data))
    except (pa.ArrowException, OSError) as error:
        raise UsageError(f"Parquet does not parse: {error}", hint="check that the file is complete") from error
    if len(set(table.column_names)) < len(table.column_names):
        raise UsageError("duplicate column in the Parquet file", hint="rename or delete one of the columns")
    return list(enumerate(table.to_pylist(), 1))


def plain_value(value: Any) -> Any:
    """Return a value as one that a column and JSON can store.

    Nested values and integers of more than 64 bits become JSON text, times of day and dates ISO 8601, decimals text.
    """
    if isinstance(value, bool) or value is None or isinstance(value, str | float):
        return value
    if isinstance(value, int):
        return value if -_INT64 <= value < _INT64 else str(value)
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, decimal.Decimal):
        return str(value)
    if isinstance(value, bytes):
        raise UsageError("value is binary", hint="delete the column, or store text")
    is_text_list = isinstance(value, list) and all(isinstance(part, str) for part in value)
    return value if is_text_list else json.dumps(value, default=plain_value)


def seconds_of(value: Any, name: str, row: int) -> float | None:
    """Return a time of an annotation in seconds; None if it is empty.

    A time is a number, a duration of Parquet, or text as ``HH:MM:SS.mmm``, ``MM:SS.mmm`` or a number.
    """
    if value in (None, ""):
        return None
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    try:
        clock = _CLOCK.fullmatch(value.strip()) if isinstance(value, str) else None
        if clock is not None:
            # Add in milliseconds and smaller: 8.475 s must be the same number after minutes as without.
            seconds = float(decimal.Decimal(clock[3]) + 60 * int(clock[2]) + 3600 * int(clock[1] or 0))
        else:
            seconds = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        seconds = math.nan
    if not math.isfinite(seconds):
        raise UsageError(
            f"{name} is {value!r}, not a number of seconds",
            row=row,
            column=name,
            hint="give seconds or HH:MM:SS.mmm, and leave it empty for no bound",
        )
    return seconds


def _typed(values: Sequence[str]) -> Sequence[Any]:
    """Convert a column to integers, else to floats, else leave text; empty fields become None."""
    given = [value for value in values if value]
    if all(_INTEGER.fullmatch(value) and -_INT64 <= int(value) < _INT64 for value in given):
        return [int(value) if value else None for value in values]
    # Integers of more than 64 bits are identifiers, which a float would round.
    numbers = all(_NUMBER.fullmatch(value) and any(map(str.isdigit, value)) for value in given)
    if numbers and not any(len(value) > 18 and value.lstrip("-").isdigit() for value in given):
        return [float(value) if value else None for value in values]
    return [value or None for value in values]
