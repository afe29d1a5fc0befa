"""The table of `python -m bench batches` in the report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.common.charts import Chart, Table


def charts(record: Mapping[str, Any]) -> list[Chart]:
    """Return the tables of a result."""
    rows = [
        (
            name,
            f"{one['lost']['median']:.0f}",
            f"{one['doubled']['median']:.0f}",
            f"{one['padding']['median']:.2%}",
            f"{one['imbalance']['median']:.3f}",
            f"{one['resume_seconds']['median']:.2f}",
            f"{one['lines']['median']:.0f}",
        )
        for name, one in record["contenders"].items()
    ]
    heads = ("plan", "lost", "doubled", "padding", "cost, max / mean of ranks", "resume, s", "lines of code")
    settings = record["settings"]
    title = f"Batches of varying shape: {settings['samples']:,} clips, {settings['world']} ranks"
    return [Table(title, heads, rows, "medians of the rounds")]
