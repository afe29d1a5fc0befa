"""What results of `bench.shard.shard`, of the long tests of sharding, and of tuning show: see `bench.report`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.common.charts import Bars, Chart, Table


def throughput(record: Mapping[str, Any]) -> list[Chart]:
    """What a result shows."""
    names = {"fastvid": "fastvid shard", "xargs": f"xargs -P {record['workers']} ffmpeg"}
    ratio, checked = record["throughput_of_xargs"], record["verification"]
    return [
        Bars(
            f"Sharding as {record['profile']}, beside the same ffmpeg commands run by xargs",
            "s",
            {name: record[key]["wall"] for key, name in names.items()},
            {name: (record[key]["wall_min"], record[key]["wall_max"]) for key, name in names.items()},
            [names["xargs"]],
            f"{record['files']} files, {record['megabytes']} MB; fastvid has {ratio['wall']:.1%} of the throughput"
            f" ({ratio['cpu']:.1%} by CPU time), and of its CPU time verification takes"
            f" {checked['part_of_cpu']:.1%}.",
        )
    ]


def corpus(record: Mapping[str, Any]) -> list[Chart]:
    """What a result shows."""
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
    heads = ("profile", "packed", "rejected wrongly", "frames", "MB in", "MB out")
    note = "Clean, odd, damaged and hostile files; each that was not packed has its reason in the ledger."
    return [Table("Real and hostile videos through every profile", heads, rows, note)]


def mutations(record: Mapping[str, Any]) -> list[Chart]:
    """What a result shows."""
    kinds = list(record["verdicts"])
    reasons = sorted({reason for verdicts in record["verdicts"].values() for reason in verdicts})
    rows = [(reason, *(str(record["verdicts"][kind].get(reason, "")) for kind in kinds)) for reason in reasons]
    note = (
        f"{len(record['undecodable_samples'])} samples that were packed do not decode;"
        f" peak memory {record['peak_memory_mb']['job_and_all_children']} MB, with all children."
    )
    return [Table("Videos damaged at random, by what became of them", ("verdict", *kinds), rows, note)]


def ray_kills(record: Mapping[str, Any]) -> list[Chart]:
    """What a result shows."""
    rows = []
    for kind in ("node", "head"):
        if kind in record:
            kills = record[kind]["kills"]
            equal = sum(kill.get("equal", kill.get("equal_after_resuming", False)) for kill in kills)
            during = sum(kill["job_ran"] for kill in kills)
            rows.append((kind, str(len(kills)), str(during), f"{equal} of {len(kills)}"))
    heads = ("killed", "jobs", "while the job ran", "bytes equal to those of a quiet job")
    return [Table("Ray clusters that lose a node or their head", heads, rows)]


def tune(record: Mapping[str, Any]) -> list[Chart]:
    """What a result shows."""
    rows = [
        (name, f"{one['predicted']:.2f}", f"{one['measured']:.2f}", f"{one['off']:+.1%}")
        for name, one in record["clips_a_second_against_compact_by_cpu_time"].items()
    ]
    heads = ("profile", "from the sample", "on other videos", "off by")
    note = f"Clips/s over those of compact, by CPU time: {record['sampling']}, {record['product']}."
    return [Table("What fastvid tune says holds for other videos", heads, rows, note)]
