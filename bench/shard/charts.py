"""Charts of the results of `bench.shard.shard`, the sharding soak tests, and `fastvid tune`, for `bench.report`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.common.charts import Bars, Chart, Table


def throughput(record: Mapping[str, Any]) -> list[Chart]:
    """Return the chart of sharding against xargs."""
    names = {"fastvid": "fastvid shard", "xargs": f"xargs -P {record['workers']} ffmpeg"}
    ratio, checked = record["throughput_of_xargs"], record["verification"]
    return [
        Bars(
            f"Sharding as {record['profile']}, against the same ffmpeg commands run by xargs",
            "s",
            {name: record[key]["wall"] for key, name in names.items()},
            {name: (record[key]["wall_min"], record[key]["wall_max"]) for key, name in names.items()},
            [names["xargs"]],
            f"{record['files']} files, {record['megabytes']} MB; fastvid reaches {ratio['wall']:.1%} of xargs'"
            f" throughput ({ratio['cpu']:.1%} by CPU time); verification takes {checked['part_of_cpu']:.1%} of its"
            " CPU time.",
        )
    ]


def corpus(record: Mapping[str, Any]) -> list[Chart]:
    """Return the table of a mixed corpus sharded with every profile."""
    profiles = record["profiles"]
    rows = [
        (
            name,
            f"{one['packed']} of {one['files']}",
            str(one["false_rejections"]),
            f"{one['frames']:,}",
            f"{one['bytes_in'] / 1e6:.1f}",
            f"{one['bytes_out'] / 1e6:.1f}",
        )
        for name, one in profiles.items()
    ]
    heads = ("profile", "packed", "wrongly rejected", "frames", "MB in", "MB out")
    note = "Clean, odd, damaged and hostile files; the ledger gives the reason for each rejected file."
    return [Table("Real and hostile videos through every profile", heads, rows, note)]


def mutations(record: Mapping[str, Any]) -> list[Chart]:
    """Return the table of randomly damaged videos."""
    kinds = list(record["verdicts"])
    reasons = sorted({reason for verdicts in record["verdicts"].values() for reason in verdicts})
    rows = [(reason, *(str(record["verdicts"][kind].get(reason, "")) for kind in kinds)) for reason in reasons]
    note = (
        f"{len(record['undecodable_samples'])} packed samples cannot be decoded;"
        f" peak memory including child processes: {record['peak_memory_mb']['job_and_all_children']} MB."
    )
    return [Table("Randomly damaged videos, by outcome", ("outcome", *kinds), rows, note)]


def ray_kills(record: Mapping[str, Any]) -> list[Chart]:
    """Return the table of Ray clusters that lost a node or their head."""
    rows = []
    for kind in ("node", "head"):
        if kind in record:
            kills = record[kind]["kills"]
            equal = sum(kill.get("equal", kill.get("equal_after_resuming", False)) for kill in kills)
            during = sum(kill["job_ran"] for kill in kills)
            rows.append((kind, str(len(kills)), str(during), f"{equal} of {len(kills)}"))
    heads = ("killed", "jobs", "killed during the job", "same bytes as an undisturbed job")
    return [Table("Ray clusters that lose a node or their head", heads, rows)]


def tune(record: Mapping[str, Any]) -> list[Chart]:
    """Return the table of `fastvid tune`'s predictions against measurements."""
    rows = [
        (name, f"{one['predicted']:.2f}", f"{one['measured']:.2f}", f"{one['off']:+.1%}")
        for name, one in record["clips_a_second_against_compact_by_cpu_time"].items()
    ]
    heads = ("profile", "predicted from the sample", "measured on other videos", "error")
    note = f"Clips/s relative to compact, by CPU time: {record['sampling']}, {record['product']}."
    return [Table("Predictions of fastvid tune for other videos", heads, rows, note)]
