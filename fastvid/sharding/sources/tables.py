"""Tables as people keep them, CSV with a header and JSON lists, as rows of values that a column can hold."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Collection, Sequence
from typing import Any

from fastvid.errors import UsageError


def read_rows(text: str, *, texts: Collection[str]) -> list[dict[str, Any]]:
    """The rows of a CSV; a short row's missing fields are empty.

    Args:
        text: The table.
        texts: Columns that stay texts. Others become numbers where all their values are numbers; empty fields None.

    Raises:
        UsageError: A row is longer than the header.
    """
    rows = [dict(row) for row in csv.DictReader(io.StringIO(text), restval="")]
    long = next((number for number, row in enumerate(rows, start=2) if None in row), None)
    if long is not None:
        raise UsageError("row has more fields than the header", row=long, hint="quote fields that hold a comma")
    for name in rows[0] if rows else ():
        if name not in texts:
            for row, value in zip(rows, _typed([row[name] for row in rows]), strict=True):
                row[name] = value
    return rows


def read_objects(text: str) -> list[dict[str, Any]]:
    """The objects of a JSON list; a value that no column can hold stays JSON text.

    Raises:
        UsageError: It is something else.
    """
    found = json.loads(text)
    if not isinstance(found, list) or not all(isinstance(record, dict) for record in found):
        raise UsageError("JSON is no list of objects")
    return [{name: _plain(value) for name, value in record.items()} for record in found]


def _plain(value: Any) -> Any:
    texts = isinstance(value, list) and all(isinstance(part, str) for part in value)
    return value if texts or not isinstance(value, list | dict) else json.dumps(value)


def _typed(values: Sequence[str]) -> Sequence[Any]:
    """Integers, else numbers, else texts; empty fields are None."""
    for kind in (int, float):
        try:
            return [kind(value) if value else None for value in values]
        except ValueError:
            continue
    return [value or None for value in values]
