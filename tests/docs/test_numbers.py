"""Sentences of the documentation that state a measurement say what its result file says."""

from __future__ import annotations

import json
import statistics
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


def test_indexing_over_a_network():
    record = result("index.json")
    assert (record["files"]["none"], record["latency_ms"], record["megabits"]) == (10_000, 20.0, 1000.0)
    assert (min(record["video_seconds"]), max(record["video_seconds"])) == (12, 95)
    none, sample = record["none"], record["sample"]
    sentence = (
        f"were indexed in {10_000 * statistics.median(none['seconds_a_file']):.0f} s on "
        f"{'two' if record['machine']['cores'] == 2 else '?'} cores, which took "
        f"{record['times_faster']['none']['median']:.1f} times as long to download, with "
        f"{none['requests_a_file']:.0f} requests and {none['bytes_a_file'] / 1000:.0f} kB a file; `sample` took "
        f"{statistics.median(sample['seconds_a_file']):.2f} s a file"
    )
    assert sentence in " ".join((ROOT / "docs/tutorials/in-place.md").read_text().split())
