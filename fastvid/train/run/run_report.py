"""Renders training runs as one HTML page: curves, time per step, and scaling."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from fastvid.errors import UsageError
from fastvid.report.charts import bars, lines, number
from fastvid.report.page import Section, card, document, figures, grid, table
from fastvid.train.records import records as metrics

_PERCENT = "_percent"
_METRIC = "metric"  # placeholder in `_CHARTS` for the metric of the first run's task
# Charts of each section: kind of row, column, and title.
_CHARTS = {
    "Learning": (("eval", _METRIC, ""), ("train", "loss", "training loss"), ("eval", "loss", "held-out loss")),
    "Optimiser": (("train", "lr", "learning rate"), ("train", "grad_norm", "norm of the gradient")),
    "Speed": (("train", "clips_per_s", "clips/s"), ("train", "wait_percent", "waiting for data, % of the time")),
}
_FACTS = (
    ("clips_per_s", "clips/s", ""),
    ("clips_per_s_per_gpu", "clips/s per rank", ""),
    ("wait_percent", "waiting for data", " %"),
    ("exposed_percent", "waiting for other ranks", " %"),
    ("mfu_percent", "used of the device's peak (MFU)", " %"),
    ("tflops_per_gpu", "TFLOP/s per rank", ""),
    ("memory_gib", "peak memory", " GiB"),
)

Point = tuple[float, float]


@dataclass(frozen=True, eq=False)
class RunMetrics:
    """The metrics in a run's folder."""

    name: str
    rows: Sequence[dict[str, Any]]  # rows of metrics, as written
    epoch: int  # samples per epoch; 1 if unknown, so that curves are over samples
    metric: str = "top1_percent"  # the metric by which the run compares models, a column of its "eval" rows
    higher_is_better: bool = True

    @classmethod
    def read(cls, folder: Path) -> RunMetrics:
        """Read the metrics of a run."""
        file = folder / metrics.METRICS_FILE
        if not file.is_file():
            raise UsageError(
                "folder does not contain a run", file=folder, hint=f"name a folder that contains {metrics.METRICS_FILE}"
            )
        rows = metrics.read(file)
        if any("samples" not in row for row in rows):
            raise UsageError("there is no report of a sweep", file=folder, hint="read its results.json")
        ends = [row["samples"] / (row["epoch"] + 1) for row in rows if row["kind"] == "eval"]
        compared = next((row for row in rows if row["kind"] == "start" and "metric" in row), {})
        return cls(
            folder.name,
            rows,
            compared.get("samples_per_epoch") or (round(ends[0]) if ends else 1),
            compared.get("metric", cls.metric),
            compared.get("higher_is_better", cls.higher_is_better),
        )

    def curve(self, kind: str, name: str) -> list[Point]:
        """Return a column as points (epochs, value), without the steps that a resumed run repeated."""
        return [
            (row["samples"] / self.epoch, row[name])
            for row in metrics.curve(list(self.rows), kind)
            if row.get(name) is not None
        ]

    def median(self, name: str) -> float | None:
        """Return the median of a column of the training rows; None if it is missing."""
        values = [row[name] for row in self.rows if row["kind"] == "train" and row.get(name) is not None]
        return median(values) if values else None


def efficiency(runs: Sequence[RunMetrics]) -> list[tuple[int, float, float, float]]:
    """Return how throughput scales with the world size, over several runs or within one.

    Returns one row per world size: ranks, median clips/s, clips/s per rank, and efficiency: clips/s per rank in percent
    of the value at the smallest world size.
    """
    speeds: dict[int, list[float]] = {}
    for run in runs:
        world = 1
        for row in run.rows:
            if row["kind"] == "start":
                world = int(row.get("world_size", 1))
            elif row["kind"] == "train":
                speeds.setdefault(world, []).append(row["clips_per_s"])
    if not speeds:
        return []
    least = min(speeds)
    base = median(speeds[least]) / least
    return [
        (world, speed, speed / world, 100 * speed / world / base)
        for world, speed in sorted((world, median(values)) for world, values in speeds.items())
    ]


def page(folders: Sequence[Path]) -> str:
    """Return the HTML page of one run, or of several for comparison."""
    runs = [RunMetrics.read(folder) for folder in folders]
    if any(run.epoch == 1 for run in runs):
        runs = [replace(run, epoch=1) for run in runs]
    first, single = runs[0], len(runs) == 1
    metric = first.metric
    sections = [] if single else [Section("Runs", card("Last evaluation and medians over steps", _comparison(runs)))]
    for title, pair in _CHARTS.items():
        drawn = [card("", chart) for chart in (_chart(runs, *what, metric) for what in pair) if chart]
        sections += [Section(title, grid(*drawn))] if drawn else []
    parts = _parts(first)
    if parts and single:
        split = bars(parts, unit="ms", quiet=[name for name in parts if name != "computing"])
        sections.append(Section("Step time", card("Time per step", split, "Median of the run, rank 0.")))
    rows = efficiency(runs)
    if len(rows) > 1:
        cells = [(str(w), f"{speed:.1f}", f"{each:.2f}", f"{share:.0f} %") for w, speed, each, share in rows]
        heads = ("ranks", "clips/s", "clips/s per rank", "efficiency")
        note = "Relative to the smallest number of ranks."
        sections.append(Section("Scaling", card("Clips per second by number of ranks", table(heads, cells), note)))
    if single and (starts := _starts(first)):
        heads = ("process group", "ranks", "at clip", "from checkpoint")
        note = "A run that was killed, or whose number of ranks changed, resumes from its newest checkpoint."
        sections.append(Section("Starts", card("Process groups", table(heads, starts), note)))
    config = _config(folders[0])
    lead = f"{config['model']} on {config['data']}. " if single and config else ""
    lead += "No step is recorded yet." * all(row["kind"] == "start" for run in runs for row in run.rows)
    return document(
        ", ".join(run.name for run in runs) if len(runs) < 4 else f"{len(runs)} runs",
        sections,
        command="report",
        lead=lead,
        chips={name: value for name, value in config.items() if name not in ("model", "data")} if single else {},
        top=figures(_figures(first)) if single else "",
    )


def _config(folder: Path) -> dict[str, str]:
    """Return a run's main settings by label; empty if its configuration cannot be read."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        model, data, epochs = config["model"]["name"], config["data"], config["run"]["epochs"]
        batch, how = f"{data['global_batch_size']:,}", config["sync"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}
    return {"model": model, "data": data["path"], "clips per step": batch, "epochs": str(epochs), "strategy": how}


def _chart(runs: Sequence[RunMetrics], kind: str, name: str, title: str, metric: str) -> str:
    if name == _METRIC:
        name, title = metric, f"held-out {_label(metric)}{', %' * metric.endswith(_PERCENT)}"
    curves = {run.name: points for run in runs if (points := run.curve(kind, name))}
    return lines(curves, title, across="clips" if runs[0].epoch == 1 else "epochs", whole_x=True) if curves else ""


def _figures(run: RunMetrics) -> list[tuple[str, str, str]]:
    name, found = run.metric, [(label, value, "median") for label, value in _medians(run).items()]
    if scores := [score for _, score in run.curve("eval", name)]:
        best = max(scores) if run.higher_is_better else min(scores)
        found.insert(0, (f"held-out {_label(name)}", _value(name, scores[-1]), f"best {_value(name, best)}"))
    return found


def _medians(run: RunMetrics) -> dict[str, str]:
    """Return the medians of the training rows by label, with units; without what the run did not measure."""
    known = [(label, unit, run.median(name)) for name, label, unit in _FACTS]
    return {label: f"{number(value)}{unit}" for label, unit, value in known if value is not None}


def _label(metric: str) -> str:
    return metric.removesuffix(_PERCENT)


def _value(metric: str, value: float) -> str:
    return f"{value:.2f} %" if metric.endswith(_PERCENT) else f"{value:.4g}"


def _comparison(runs: Sequence[RunMetrics]) -> str:
    name, rows = runs[0].metric, []
    score = f"held-out {_label(name)}"
    for run in runs:
        curve = run.curve("eval", name)
        last = {score: _value(name, curve[-1][1])} if curve else {}
        rows.append({"run": run.name} | last | _medians(run))
    heads = [head for head in ("run", score, *(label for _, label, _ in _FACTS)) if any(head in row for row in rows)]
    return table(heads, [[row.get(head, "-") for head in heads] for row in rows])


def _parts(run: RunMetrics) -> dict[str, float]:
    step = run.median("step_ms")
    if step is None:
        return {}
    shares = {label: run.median(name) for name, label, _ in _FACTS if label.startswith("waiting")}
    waits = {label: step * share / 100 for label, share in shares.items() if share is not None}
    return {"computing": step - sum(waits.values()), **waits}


def _starts(run: RunMetrics) -> list[tuple[str, str, str, str]]:
    starts = [row for row in run.rows if row["kind"] == "start"]
    return [
        (str(number + 1), str(row.get("world_size", "")), f"{row['samples']:,}", str(row.get("checkpoint") or "fresh"))
        for number, row in enumerate(starts)
    ]
