"""What results of the benchmarks of training and of elastic training show: see `bench.report`."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import mean
from typing import Any

from bench.common.charts import Bars, Chart, Lines, Table


def train(record: Mapping[str, Any]) -> list[Chart]:
    """What a result shows."""
    clocks = {"CPU time": record["ratio"]["cpu"], "wall": record["ratio"]["wall"]}
    return [
        Bars(
            "The trainer over a bare PyTorch loop",
            "x",
            {name: one["median"] for name, one in clocks.items()},
            {name: (one["low"], one["high"]) for name, one in clocks.items()},
            note=f"{record['model']}; medians of {record['rounds']} rounds; the limit is {record['limit']} by CPU time."
            " Before they are timed, both make the same weights.",
        )
    ]


def elastic(record: Mapping[str, Any]) -> list[Chart]:
    """What a result shows."""
    rows = [
        (kind, str(one["count"]), *(_seconds(one.get(what)) for what in ("detection_s", "recovery_s")))
        for kind, one in record["accidents"].items()
    ]
    note = (
        f"{record['passed']} of {len(record['sequences'])} random sequences ended with the samples of an undisturbed"
        f" run and its weights to {record['weights_differ_by_at_most']:.0e}; the time-out is {record['timeout_s']:g} s."
    )
    heads = ("accident", "times", "detected after, s", "training again after, s")
    return [Table("Nodes that join, leave, are killed and are cut off", heads, rows, note)]


def _seconds(found: Mapping[str, float] | None) -> str:
    return "-" if found is None else f"{found['median']:.1f} (worst {found['worst']:.1f})"


def launch(record: Mapping[str, Any]) -> list[Chart]:
    """What a result shows."""
    rows = [(event["at"], f"{event['seconds']:.1f}", str(event["nodes"])) for event in record["events"]]
    ends = "the samples of an undisturbed run" if record["lineage_exact"] else "OTHER SAMPLES than an undisturbed run"
    note = (
        f"{record['script']} on {record['nodes']} hosts joined at {record['network_mbit']:g} Mbit/s ended with {ends}"
        f" and its weights to {record['weights_differ_by']:.0e}; worlds {record['worlds']}."
    )
    world: list[tuple[float, float]] = []
    for start in record["starts"]:
        if world:
            world.append((start["samples"], world[-1][1]))
        world.append((start["samples"], start["world_size"]))
    world.append((record["samples"], world[-1][1]))
    return [
        Table("A cluster's launch script on hosts of one machine", ("event", "s", "nodes"), rows, note),
        Lines("A cluster's launch script: nodes that train", "samples", "nodes", {"nodes": world}),
    ]


def motion(record: Mapping[str, Any]) -> list[Chart]:
    """What a result shows."""
    top1 = record["top1_percent"]
    return [
        Bars(
            "Models of motion: top-1 of held-out videos",
            "%",
            {name: mean(values) for name, values in top1.items()},
            {name: (min(values), max(values)) for name, values in top1.items()},
            note=f"Chance is {record['chance_percent']:g} %.",
        )
    ]


def two_stream(record: Mapping[str, Any]) -> list[Chart]:
    """What a result shows."""
    videos = record["videos"]
    note = (
        f"{videos['train']} videos to train on, {videos['test']} to test on. In xor the class is the exclusive or of"
        " what a picture and what the motion say, so either alone is a coin."
    )
    return [Bars("Pictures, optical flow, and both: top-1", "%", record["top1_percent"], note=note)]
