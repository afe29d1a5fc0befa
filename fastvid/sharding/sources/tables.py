"""Read tables, CSV with a header or lists of JSON objects, as rows of column values."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Collection, Sequence
from typing import Any, Final

from fastvid.errors import UsageError

FIRST_ROW: Final = 2
"""Line of a CSV's first row; the header is line 1."""

# As JSON writes numbers. Text such as 0022, 1_000 or nan is no number.
_INTEGER: Final = re.compile(r"-?(0|[1-9][0-9]{0,18})")
_NUMBER: Final = re.compile(r"-?(0|[1-9][0-9]*)?(\.[0-9]*)?([eE][+-]?[0-9]+)?")
_INT64: Final = 1 << 63


def read_text_rows(text: str) -> list[dict[str, str]]:
    """Read the rows of a CSV as text; fields missing at the end of a row are empty.

    Raises:
        UsageError: If a row is longer than the header, a column occurs twice, or a field is too long.
    """
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
    """Read the rows of a CSV, see `read_text_rows`.

    Args:
        text: The table.
        text_columns: Columns that stay text. Others become numbers if all their values are, written as in JSON; empty
            fields become None.
    """
    rows: list[dict[str, Any]] = [dict(row) for row in read_text_rows(text)]
    for name in rows[0] if rows else ():
        if name not in text_columns:
            for row, value in zip(rows, _typed([row[name] for row in rows]), strict=True):
                row[name] = value
    return rows


def read_objects(text: str) -> list[dict[str, Any]]:
    """Read a list of JSON objects; nested values and integers of more than 64 bits stay JSON text.

    Raises:
        UsageError: If the text is anything else.
    """
    found = json.loads(text)
    if not isinstance(found, list) or not all(isinstance(record, dict) for record in found):
        raise UsageError("JSON is not a list of objects")
    return [{name: plain_value(value) for name, value in record.items()} for record in found]


def plain_value(value: Any) -> Any:
    """Return a JSON value as one that a column can store: nested values and very large integers as JSON text."""
    if isinstance(value, int) and not -_INT64 <= value < _INT64:
        return str(value)
    is_text_list = isinstance(value, list) and all(isinstance(part, str) for part in value)
    return value if is_text_list or not isinstance(value, list | dict) else json.dumps(value)


def seconds_of(value: Any, name: str, row: int) -> float | None:
    """Return a time of an annotation in seconds; None if it is empty.

    Raises:
        UsageError: If it is not a finite number.
    """
    if value in (None, ""):
        return None
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        seconds = math.nan
    if not math.isfinite(seconds):
        raise UsageError(f"{name} is {value!r}, not a number of seconds", row=row, hint="leave it empty for no bound")
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
