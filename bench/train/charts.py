"""Charts of the results of the training and elastic training benchmarks, for `bench.report`."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import mean
from typing import Any

from bench.common.charts import Bars, Chart, Lines, Table


def train(record: Mapping[str, Any]) -> list[Chart]:
    """Return the chart of the trainer's overhead."""
    clocks = {"CPU time": record["ratio"]["cpu"], "wall": record["ratio"]["wall"]}
    return [
        Bars(
            "Time of the trainer relative to a bare PyTorch loop",
            "x",
            {name: one["median"] for name, one in clocks.items()},
            {name: (one["low"], one["high"]) for name, one in clocks.items()},
            note=f"{record['model']}; medians of {record['rounds']} rounds; the limit is {record['limit']} by CPU time."
            " Both produced the same weights before they were timed.",
        )
    ]


def elastic(record: Mapping[str, Any]) -> list[Chart]:
    """Return the table of accidents in elastic training."""
    rows = [
        (kind, str(one["count"]), *(_seconds(one.get(what)) for what in ("detection_s", "recovery_s")))
        for kind, one in record["accidents"].items()
    ]
    note = (
        f"{record['passed']} of {len(record['sequences'])} random sequences trained on the same samples as an"
        f" undisturbed run and reached its weights within {record['weights_differ_by_at_most']:.0e}; the timeout is"
        f" {record['timeout_s']:g} s."
    )
    heads = ("accident", "count", "detected after, s", "training resumed after, s")
    return [Table("Nodes that join, leave, are killed and are cut off", heads, rows, note)]


def _seconds(found: Mapping[str, float] | None) -> str:
    return "-" if found is None else f"{found['median']:.1f} (worst {found['worst']:.1f})"


def launch(record: Mapping[str, Any]) -> list[Chart]:
    """Return the events and the node count of a launch script's run."""
    rows = [(event["at"], f"{event['seconds']:.1f}", str(event["nodes"])) for event in record["events"]]
    same = "the SAME samples as" if record["lineage_exact"] else "OTHER SAMPLES than"
    note = (
        f"{record['script']} on {record['nodes']} hosts connected at {record['network_mbit']:g} Mbit/s trained on"
        f" {same} an undisturbed run; weights differ by {record['weights_differ_by']:.0e}; world sizes"
        f" {record['worlds']}."
    )
    world: list[tuple[float, float]] = []
    for start in record["starts"]:
        if world:
            world.append((start["samples"], world[-1][1]))
        world.append((start["samples"], start["world_size"]))
    world.append((record["samples"], world[-1][1]))
    return [
        Table("A cluster launch script on simulated hosts", ("event", "s", "nodes"), rows, note),
        Lines("A cluster launch script: number of training nodes", "samples", "nodes", {"nodes": world}),
    ]


def motion(record: Mapping[str, Any]) -> list[Chart]:
    """Return the chart of the motion models' accuracy."""
    top1 = record["top1_percent"]
    return [
        Bars(
            "Motion models: top-1 on held-out videos",
            "%",
            {name: mean(values) for name, values in top1.items()},
            {name: (min(values), max(values)) for name, values in top1.items()},
            note=f"Chance is {record['chance_percent']:g} %.",
        )
    ]


def two_stream(record: Mapping[str, Any]) -> list[Chart]:
    """Return the chart of the two-stream models' accuracy."""
    videos = record["videos"]
    note = (
        f"{videos['train']} training videos, {videos['test']} test videos. The xor class is the exclusive or of colour"
        " and direction of motion, so each stream alone is at chance."
    )
    return [Bars("RGB, optical flow, and both: top-1", "%", record["top1_percent"], note=note)]
