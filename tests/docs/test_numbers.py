"""Sentences of the documentation that state a measurement say what its result file says."""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]


def result(name: str) -> dict:
    return json.loads((ROOT / "bench" / "results" / name).read_text())


def test_opening_ten_million_rows():
    record = result("annotations.json")
    assert record["rows"] == 10_000_000
    plain = record["plain"]
    sentence = (
        f"{plain['first_open_s']:.0f} s for the first process, {plain['later_open_s']:.1f} s for later ones, and "
        f"{plain['node_pss_mb'] / 1000:.1f} GB for {'eight' if plain['node_processes'] == 8 else '?'} processes "
        f"together, instead of {plain['memory_pss_mb'] / 1000:.1f} GB for each"
    )
    assert sentence in " ".join((ROOT / "docs/tutorials/select.md").read_text().split())
