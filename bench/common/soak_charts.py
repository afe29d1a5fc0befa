"""What results of the long tests of ``make soak`` show: see `bench.report`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.common.charts import Chart, Lines, Table


def decoding(record: Mapping[str, Any]) -> list[Chart]:
    """What a result shows."""
    memory = record["rss_mb"]
    step = record["clips"] / len(memory)
    return [
        Lines(
            "Memory of a process that decodes",
            "clips",
            "MB",
            {"resident": [(step * (number + 1), size) for number, size in enumerate(memory)]},
            note=f"{record['mb_per_100000_clips']:.2g} MB for 100,000 clips; file handles from"
            f" {record['file_handles'][0]} to {record['file_handles'][-1]}.",
        )
    ]


def loading(record: Mapping[str, Any]) -> list[Chart]:
    """What a result shows."""
    rows = [
        ("clips", f"{record['clips']:,}"),
        ("bytes a clip, the slope of memory", f"{record['bytes_a_clip']:.2g}"),
        ("resident, early", f"{record['first_bytes'] / 1e6:.1f} MB"),
        ("resident, at the end", f"{record['last_bytes'] / 1e6:.1f} MB"),
    ]
    return [Table("Memory of a loader", ("what", ""), rows)]


def shard_kills(record: Mapping[str, Any]) -> list[Chart]:
    """What a result shows."""
    states = ", ".join(f"{count} while {state}" for state, count in record["job_was_killed_while"].items())
    rows = []
    for kind, note in (("job", states), ("worker", "")):
        equal = sum(kill["same_bytes_and_tables"] for kill in record[kind])
        rows.append((kind, str(len(record[kind])), f"{equal} of {len(record[kind])}", note))
    heads = ("killed", "times", "same bytes and tables", "")
    return [Table("Sharding jobs and their workers killed at random moments", heads, rows)]


def rank_kills(record: Mapping[str, Any]) -> list[Chart]:
    """What a result shows."""
    runs = record["runs"]
    facts = {"same_ids": "the same samples", "same_clips": "the same clips", "same_lineage": "the same lineage"}
    rows = [(f"runs with {name}", f"{sum(run[key] for run in runs)} of {len(runs)}") for key, name in facts.items()]
    rows += [
        ("ranks killed", str(sum(len(kill["ranks"]) for run in runs for kill in run["killed"]))),
        ("weights differ by at most", f"{max(run['weights_differ_by'] for run in runs):.1e}"),
        ("control: state of what was read ahead loses samples", "yes" if record["control_differs"] else "NO"),
    ]
    return [Table("Ranks killed at random moments, and started again in other numbers", ("what", ""), rows)]
