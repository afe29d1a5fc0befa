"""Charts of the results of the strategy benchmarks, for `bench.report`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.common.charts import Bars, Chart, Lines, Table
from bench.strategies.contest import interval


def contest(record: Mapping[str, Any]) -> list[Chart]:
    """Return the charts of a contest: seconds to the goal on each network, and what is learnt from the same clips."""
    accuracy, value = record["goal"]["accuracy"], record["goal"]["value"]
    aim = f"an accuracy of {100 * value:g} %" if accuracy else f"a loss of {value:g}"
    found: list[Chart] = []
    bench = record["schema"].removeprefix("fastvid-bench-").partition("/")[0]
    for network in dict.fromkeys(row["network"] for row in record["rows"]):
        rows = [row for row in record["rows"] if row["network"] == network]
        reached = {row["contender"]: interval(row["seconds"]) for row in rows}
        missed = [f"{row['contender']} ({row['reached']} of {len(row['seconds'])})" for row in rows
                  if reached[row["contender"]] is None]  # fmt: skip
        found.append(
            Bars(
                f"Strategies, {bench}: seconds to {aim}, network {network}",
                "s",
                {name: one[0] for name, one in reached.items() if one is not None},
                {name: (one[1], one[2]) for name, one in reached.items() if one is not None},
                note="Mean and 95 % interval." + (f" Not reached by all runs: {', '.join(missed)}." if missed else ""),
            )
        )
    rows = list({row["contender"]: row for row in record["rows"]}.values())
    scale = 100 if accuracy else 1
    ends = {row["contender"]: interval([scale * one for one in row["final"]]) for row in rows}
    found.append(
        Bars(
            f"Strategies, {bench}: held-out {'accuracy' if accuracy else 'loss'} after {record['clips']:,} clips",
            "%" if accuracy else "",
            {name: one[0] for name, one in ends.items() if one is not None},
            {name: (one[1], one[2]) for name, one in ends.items() if one is not None},
        )
    )
    return found


def migration(record: Mapping[str, Any]) -> list[Chart]:
    """Return the charts of a sweep whose models or data move."""
    series: dict[str, list[tuple[float, float]]] = {}
    for row in record["rows"]:
        moved = [a + b for a, b in zip(row["data_wire_mb"], row["state_wire_mb"], strict=True)]
        series.setdefault(row["way"], []).append((row["dataset_mb"], sum(moved) / len(moved)))
    note = "Relay moves less if a model's state is smaller than a worker's part of the dataset."
    network = record["network"]["name"]
    bars = {f"{row['way']}, {row['dataset_mb']:.1f} MB": interval(row["seconds"]) for row in record["rows"]}
    return [
        Lines("A sweep: bytes moved", "MB of the dataset", "MB moved", series, log_x=True, log_y=True, note=note),
        Bars(
            f"A sweep over {network}: seconds",
            "s",
            {name: one[0] for name, one in bars.items() if one is not None},
            {name: (one[1], one[2]) for name, one in bars.items() if one is not None},
        ),
    ]


def server(record: Mapping[str, Any]) -> list[Chart]:
    """Return the table of a result of `bench.strategies.server`."""
    keys = ("push_ms", "push_locked_ms", "fetch_ms", "fetch_locked_ms")
    rows = [(name, *(f"{row[key]:.3g}" for key in keys)) for name, row in record["rows"].items()]
    heads = ("", "a push, ms", "of these locked", "a fetch, ms", "of these locked")
    return [Table("A parameter server: CPU time of a push and a fetch", heads, rows)]


def moments(record: Mapping[str, Any]) -> list[Chart]:
    """Return the chart of a result of `bench.strategies.moments`."""
    rows = record["rows"]
    values = {row["contender"]: row["train_loss"] for row in rows}
    spread = {row["contender"]: (min(row["train_losses"]), max(row["train_losses"])) for row in rows}
    note = "Loss on the training samples after the same number of samples, mean over seeds."
    return [Bars("Adam's moments under K-step averaging: training loss", "", values, spread, note=note)]


def motion(record: Mapping[str, Any]) -> list[Chart]:
    """Return the charts of a result of `bench.strategies.motion_sync`."""
    runs = record.get("runs") or [record]
    sync = record["sync"]
    series: dict[str, list[tuple[float, float]]] = {}
    rows = []
    for run in runs:
        seed = f"{sync}, seed {run['seed']}" if "seed" in run else sync
        for number, model in enumerate(sorted(run["models"], key=lambda model: int(model.get("model", 0)))):
            name = f"{seed}, model {model['model']}" if len(run["models"]) > 1 else seed
            samples = model.get("samples", run.get("samples", 0))
            if "scores" in model:
                scores = model["scores"]
                series[name] = [(samples * (at + 1) / len(scores), score) for at, score in enumerate(scores)]
            elif number == 0:
                series[name] = [(at, score) for at, score in run["curve"]]
            kills = ", ".join(kill["killed"] for kill in run.get("kills", ())) or "nobody"
            once = {True: "yes", False: "NO", None: "-"}[run.get("each_sample_once")]
            rows.append((name, str(record["ranks"]), f"{samples:,}", f"{model['top1_percent']:.2f}", kills, once))
    heads = ("strategy", "ranks", "samples", "top-1 on held-out videos, %", "killed", "each sample once")
    return [
        Lines("Motion dataset: accuracy by strategy", "samples", "top-1 on held-out videos, %", series),
        Table("Motion dataset: final accuracy by strategy", heads, rows),
    ]
