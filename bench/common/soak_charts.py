"""Charts of the results of ``make soak``, for `bench.report`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.common.charts import Chart, Lines, Table


def decoding(record: Mapping[str, Any]) -> list[Chart]:
    """Return the charts of a decoder's memory over many clips."""
    memory = record["rss_mb"]
    step = record["clips"] / len(memory)
    return [
        Lines(
            "Memory of a decoding process",
            "clips",
            "MB",
            {"resident": [(step * (number + 1), size) for number, size in enumerate(memory)]},
            note=f"Growth of {record['mb_per_100000_clips']:.2g} MB per 100,000 clips; file handles:"
            f" {record['file_handles'][0]} at the start, {record['file_handles'][-1]} at the end.",
        )
    ]


def loading(record: Mapping[str, Any]) -> list[Chart]:
    """Return the table of a loader's memory over many clips."""
    rows = [
        ("clips", f"{record['clips']:,}"),
        ("memory growth, bytes per clip", f"{record['bytes_a_clip']:.2g}"),
        ("resident memory, early", f"{record['first_bytes'] / 1e6:.1f} MB"),
        ("resident memory, at the end", f"{record['last_bytes'] / 1e6:.1f} MB"),
    ]
    return [Table("Memory of a loader", ("what", ""), rows)]


def audio(record: Mapping[str, Any]) -> list[Chart]:
    """Return the table of random windows of sound."""
    rows = [
        (
            row["track"],
            str(row["rate"]),
            f"{row['windows']:,}",
            f"{row['clicks']:,}",
            str(row["samples_off"]),
            str(row["differing"]),
        )
        for row in record["results"]
    ]
    heads = ("track", "rate", "windows", "clicks", "samples off", "windows that differ from the whole track")
    return [Table("Random windows of sound", heads, rows)]


def shard_kills(record: Mapping[str, Any]) -> list[Chart]:
    """Return the table of killed sharding jobs."""
    states = ", ".join(f"{count} while {state}" for state, count in record["job_was_killed_while"].items())
    rows = []
    for kind, note in (("job", states), ("worker", "")):
        equal = sum(kill["same_bytes_and_tables"] for kill in record[kind])
        rows.append((kind, str(len(record[kind])), f"{equal} of {len(record[kind])}", note))
    heads = ("killed", "times", "same bytes and tables", "")
    return [Table("Sharding jobs and their workers killed at random moments", heads, rows)]


def rank_kills(record: Mapping[str, Any]) -> list[Chart]:
    """Return the table of killed training ranks."""
    runs = record["runs"]
    facts = {"same_ids": "the same samples", "same_clips": "the same clips", "same_lineage": "the same lineage"}
    rows = [(f"runs with {name}", f"{sum(run[key] for run in runs)} of {len(runs)}") for key, name in facts.items()]
    rows += [
        ("ranks killed", str(sum(len(kill["ranks"]) for run in runs for kill in run["killed"]))),
        ("weights differ by at most", f"{max(run['weights_differ_by'] for run in runs):.1e}"),
        ("control: a state that counts prefetched samples loses some", "yes" if record["control_differs"] else "NO"),
    ]
    return [Table("Ranks killed at random moments, and restarted with another world size", ("what", ""), rows)]


def tampering(record: Mapping[str, Any]) -> list[Chart]:
    """Return the table of what came of random damage to the files of a dataset."""
    heads = ("file and workers", "errors", "clips masked", "same clips and labels", "wrong clips or labels")
    kinds = ("error", "masked", "same", "wrong")
    rows = [(name, *(str(found.get(kind, 0)) for kind in kinds)) for name, found in record["outcomes"].items()]
    return [Table(f"{record['tampers']:,} random tampers of the files of a dataset", heads, rows)]
