"""Renders training runs as one HTML page: curves, time per step, and scaling."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from fastvid.errors import UsageError
from fastvid.report.charts import bars, lines
from fastvid.report.page import Section, card, document, figures, grid, table
from fastvid.train.records import records as metrics

_PERCENT = "_percent"
_METRIC = "metric"  # placeholder in `_CHARTS` for the metric of the first run's task
# Charts of each section: kind of row, column, and title.
_CHARTS = {
    "Learning": (("eval", _METRIC, ""), ("train", "loss", "training loss"), ("eval", "loss", "held-out loss")),
    "Schedule": (("train", "lr", "learning rate"), ("train", "grad_norm", "norm of the gradient")),
    "Speed": (("train", "clips_per_s", "clips/s"), ("train", "wait_percent", "waiting for data, % of the time")),
}
_FACTS = (
    ("clips_per_s", "clips/s", "{:,.1f}"),
    ("clips_per_s_per_gpu", "clips/s per rank", "{:,.2f}"),
    ("wait_percent", "waiting for data", "{:.1f} %"),
    ("exposed_percent", "waiting for other ranks", "{:.1f} %"),
    ("mfu_percent", "used of the device's peak (MFU)", "{:.1f} %"),
    ("tflops_per_gpu", "TFLOP/s per rank", "{:,.3g}"),
    ("memory_gib", "peak memory", "{:,.2f} GiB"),
)

Row = Mapping[str, Any]
Point = tuple[float, float]


@dataclass(frozen=True, eq=False)
class RunMetrics:
    """The metrics in a run's folder."""

    name: str
    rows: Sequence[dict[str, Any]]  # rows of metrics, as written
    epoch: int  # samples per epoch
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
        ends = [row["samples"] / (row["epoch"] + 1) for row in rows if row["kind"] == "eval"]
        seen = [row["samples"] for row in rows if row["kind"] == "train"]
        compared = next((row for row in rows if row["kind"] == "start" and "metric" in row), {})
        return cls(
            folder.name,
            rows,
            round(ends[0]) if ends else max(seen, default=1),
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

    def speeds(self) -> dict[int, list[float]]:
        """Return the clips per second of every training row, by world size."""
        speeds: dict[int, list[float]] = {}
        world = 1
        for row in self.rows:
            if row["kind"] == "start":
                world = int(row.get("world_size", 1))
            elif row["kind"] == "train":
                speeds.setdefault(world, []).append(row["clips_per_s"])
        return speeds


def efficiency(runs: Sequence[RunMetrics]) -> list[tuple[int, float, float, float]]:
    """Return how throughput scales with the world size, over several runs or within one.

    Returns one row per world size: ranks, median clips/s, clips/s per rank, and efficiency: clips/s per rank in percent
    of the value at the smallest world size.
    """
    speeds: dict[int, list[float]] = {}
    for run in runs:
        for world, values in run.speeds().items():
            speeds.setdefault(world, []).extend(values)
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
    first, single = runs[0], len(runs) == 1
    metric = first.metric
    sections = [] if single else [Section("Runs", card("Medians of the training rows", _comparison(runs)))]
    for title, pair in _CHARTS.items():
        drawn = [card("", chart) for chart in (_chart(runs, *what, metric) for what in pair) if chart]
        sections += [Section(title, grid(*drawn))] if drawn else []
    parts = _parts(first)
    if parts and single:
        split = bars(parts, unit="ms", quiet=[name for name in parts if name != "computing"])
        sections.append(Section("Step", card("Time per step", split, "Median of the run, rank 0.")))
    rows = efficiency(runs)
    if len(rows) > 1:
        cells = [(str(w), f"{speed:.1f}", f"{each:.2f}", f"{share:.0f} %") for w, speed, each, share in rows]
        heads = ("ranks", "clips/s", "clips/s per rank", "efficiency")
        note = "Relative to the smallest number of ranks."
        sections.append(Section("Scaling", card("Clips per second by number of ranks", table(heads, cells), note)))
    if single:
        heads = ("process group", "ranks", "at clip", "from checkpoint")
        note = "A run that was killed, or whose number of ranks changed, resumes from its newest checkpoint."
        sections.append(Section("Starts", card("Process groups", table(heads, _starts(first)), note)))
    config = _config(folders[0])
    return document(
        ", ".join(run.name for run in runs),
        sections,
        command="report",
        lead=f"{config['model']} on {config['data']}." if single and config else "",
        chips={name: value for name, value in config.items() if name not in ("model", "data")} if single else {},
        top=figures(_figures(first)) if single else "",
    )


def _config(folder: Path) -> dict[str, str]:
    """Return a run's main settings by label; empty if its configuration cannot be read."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        model, data, epochs = config["model"]["name"], config["data"], config["run"]["epochs"]
        batch, how = data["global_batch_size"], config["sync"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}
    return {"model": model, "data": data["path"], "clips per step": str(batch), "epochs": str(epochs), "strategy": how}


def _chart(runs: Sequence[RunMetrics], kind: str, name: str, title: str, metric: str) -> str:
    if name == _METRIC:
        name, title = metric, f"held-out {_label(metric)}{', %' * metric.endswith(_PERCENT)}"
    curves = {run.name: points for run in runs if (points := run.curve(kind, name))}
    return lines(curves, title, across="epochs", whole_x=True) if curves else ""


def _figures(run: RunMetrics) -> list[tuple[str, str, str]]:
    scores, name = [score for _, score in run.curve("eval", run.metric)], run.metric
    best = max if run.higher_is_better else min
    held_out = [(f"held-out {_label(name)}", _value(name, scores[-1]), f"best {_value(name, best(scores))}")]
    known = [(label, form, run.median(name)) for name, label, form in _FACTS]
    return held_out * bool(scores) + [
        (label, form.format(value), "median") for label, form, value in known if value is not None
    ]


def _label(metric: str) -> str:
    return metric.removesuffix(_PERCENT)


def _value(metric: str, value: float) -> str:
    return f"{value:.2f} %" if metric.endswith(_PERCENT) else f"{value:.4g}"


def _comparison(runs: Sequence[RunMetrics]) -> str:
    rows, name = [], runs[0].metric
    for run in runs:
        scores = [score for _, score in run.curve("eval", name)]
        facts = [run.median(name) for name, _, _ in _FACTS]
        shown = ["" if value is None else form.format(value) for value, (_, _, form) in zip(facts, _FACTS, strict=True)]
        rows.append((run.name, _value(name, scores[-1]) if scores else "", *shown))
    return table(("run", _label(name), *(label for _, label, _ in _FACTS)), rows)


def _parts(run: RunMetrics) -> dict[str, float]:
    step = run.median("step_ms")
    if step is None:
        return {}
    wait, exposed = (step * (run.median(name) or 0.0) / 100 for name in ("wait_percent", "exposed_percent"))
    return {"computing": step - wait - exposed, "waiting for data": wait, "waiting for other ranks": exposed}


def _starts(run: RunMetrics) -> list[tuple[str, str, str, str]]:
    starts = [row for row in run.rows if row["kind"] == "start"]
    return [
        (str(number + 1), str(row.get("world_size", "")), f"{row['samples']:,}", str(row.get("checkpoint") or "fresh"))
        for number, row in enumerate(starts)
    ]
