"""Build the table of a generation's annotations from rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import pyarrow as pa

from fastvid.format.schema import ANNOTATION_FIELDS, FACT_FIELDS


def fact_columns(num_frames: int, fps: Fraction, width: int, height: int) -> dict[str, int | float]:
    """Return the values of a sample's annotations that tell its video: ``num_frames`` and FACT_FIELDS."""
    facts = {"num_frames": num_frames, "fps": float(fps), "width": width, "height": height}
    return facts | {"duration": float(num_frames / fps)}


def annotation_table(rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Build annotations: the columns of fastvid with their types, then all others as first encountered."""
    fixed = ANNOTATION_FIELDS | FACT_FIELDS
    extra = list(dict.fromkeys(name for row in rows for name in row if name not in fixed))
    columns = {name: pa.array([row.get(name) for row in rows], kind) for name, kind in fixed.items()}
    for name in extra:
        values = [row.get(name) for row in rows]
        try:
            columns[name] = pa.array(values)
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
            # Store a column of mixed types as strings: nothing is lost, but a filter on it must quote its values.
            columns[name] = pa.array([None if value is None else str(value) for value in values], pa.string())
    return pa.table(columns)
