"""Read tables, CSV with a header or lists of JSON objects, as rows of column values."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Collection, Sequence
from typing import Any

from fastvid.errors import UsageError


def read_rows(text: str, *, text_columns: Collection[str]) -> list[dict[str, Any]]:
    """Read the rows of a CSV; fields missing at the end of a row are empty.

    Args:
        text: The table.
        text_columns: Columns that stay text. Others become numbers if all their values are; empty fields become None.

    Raises:
        UsageError: If a row is longer than the header.
    """
    rows = [dict(row) for row in csv.DictReader(io.StringIO(text), restval="")]
    long = next((number for number, row in enumerate(rows, start=2) if None in row), None)
    if long is not None:
        raise UsageError("row has more fields than the header", row=long, hint="quote fields that contain a comma")
    for name in rows[0] if rows else ():
        if name not in text_columns:
            for row, value in zip(rows, _typed([row[name] for row in rows]), strict=True):
                row[name] = value
    return rows


def read_objects(text: str) -> list[dict[str, Any]]:
    """Read a list of JSON objects; nested values stay JSON text.

    Raises:
        UsageError: If the text is anything else.
    """
    found = json.loads(text)
    if not isinstance(found, list) or not all(isinstance(record, dict) for record in found):
        raise UsageError("JSON is not a list of objects")
    return [{name: _plain(value) for name, value in record.items()} for record in found]


def _plain(value: Any) -> Any:
    is_text_list = isinstance(value, list) and all(isinstance(part, str) for part in value)
    return value if is_text_list or not isinstance(value, list | dict) else json.dumps(value)


def _typed(values: Sequence[str]) -> Sequence[Any]:
    """Convert a column to integers, else to floats, else leave text; empty fields become None."""
    for kind in (int, float):
        try:
            return [kind(value) if value else None for value in values]
        except ValueError:
            continue
    return [value or None for value in values]
