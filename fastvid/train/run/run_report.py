"""Training runs as one HTML page: curves, where the time went, and how they scale."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from fastvid.errors import UsageError
from fastvid.report.charts import bars, lines
from fastvid.report.markup import card, figures, grid, table
from fastvid.report.page import Section, document
from fastvid.train.records import metrics

# Kind of row, name and title of the charts of each section.
_CHARTS = {
    "Learning": (("eval", "top1_percent", "held-out top-1, %"), ("train", "loss", "training loss")),
    "Schedule": (("train", "lr", "learning rate"), ("train", "grad_norm", "norm of the gradient")),
    "Speed": (("train", "clips_per_s", "clips/s"), ("train", "wait_percent", "waiting for data, % of the time")),
}
_FACTS = (
    ("clips_per_s", "clips/s", "{:,.1f}"),
    ("clips_per_s_per_gpu", "clips/s a rank", "{:,.2f}"),
    ("wait_percent", "waiting for data", "{:.1f} %"),
    ("exposed_percent", "exposed communication", "{:.1f} %"),
    ("mfu_percent", "MFU", "{:.1f} %"),
    ("tflops_per_gpu", "TFLOP/s a rank", "{:,.2f}"),
    ("memory_gib", "peak memory", "{:,.2f} GiB"),
)

Row = Mapping[str, Any]
Point = tuple[float, float]


@dataclass(frozen=True, eq=False)
class Run:
    """What a run's folder says.

    Attributes:
        name: What it is called.
        rows: Its metrics as they were written.
        epoch: Samples of an epoch.
    """

    name: str
    rows: Sequence[dict[str, Any]]
    epoch: int

    @classmethod
    def read(cls, folder: Path) -> Run:
        """Reads a run's folder.

        Raises:
            UsageError: There is no run.
        """
        file = folder / metrics.METRICS_FILE
        if not file.is_file():
            raise UsageError("folder holds no run", file=folder, hint=f"it has no {metrics.METRICS_FILE}")
        rows = metrics.read(file)
        ends = [row["samples"] / (row["epoch"] + 1) for row in rows if row["kind"] == "eval"]
        seen = [row["samples"] for row in rows if row["kind"] == "train"]
        return cls(folder.name, rows, round(ends[0]) if ends else max(seen, default=1))

    def curve(self, kind: str, name: str) -> list[Point]:
        """A number over epochs; work that was lost is left out."""
        return [
            (row["samples"] / self.epoch, row[name])
            for row in metrics.curve(list(self.rows), kind)
            if row.get(name) is not None
        ]

    def middle(self, name: str) -> float | None:
        """Median of a number of the training rows."""
        values = [row[name] for row in self.rows if row["kind"] == "train" and row.get(name) is not None]
        return median(values) if values else None

    def speeds(self) -> dict[int, list[float]]:
        """Clips a second by number of ranks, for each stretch that was logged."""
        found: dict[int, list[float]] = {}
        world = 1
        for row in self.rows:
            if row["kind"] == "start":
                world = int(row.get("world_size", 1))
            elif row["kind"] == "train":
                found.setdefault(world, []).append(row["clips_per_s"])
        return found


def efficiency(runs: Sequence[Run]) -> list[tuple[int, float, float, float]]:
    """How runs, or the worlds of one, scale.

    Returns:
        Ranks, clips/s, clips/s a rank, and that in percent of the smallest world's; one row a world, median over all
        its stretches.
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
    """The page of one run, or of several beside each other."""
    runs = [Run.read(folder) for folder in folders]
    first, alone = runs[0], len(runs) == 1
    sections = [] if alone else [Section("Runs", card("Medians of the training rows", _comparison(runs)))]
    for title, pair in _CHARTS.items():
        drawn = [card("", chart) for chart in (_chart(runs, *what) for what in pair) if chart]
        sections += [Section(title, grid(*drawn))] if drawn else []
    parts = _parts(first)
    if parts and alone:
        split = bars(parts, unit="ms", quiet=[name for name in parts if name != "computing"])
        sections.append(Section("Step", card("Where a step's time goes", split, "Median of the run, rank 0.")))
    rows = efficiency(runs)
    if len(rows) > 1:
        cells = [(str(w), f"{speed:.1f}", f"{each:.2f}", f"{share:.0f} %") for w, speed, each, share in rows]
        heads = ("ranks", "clips/s", "clips/s a rank", "efficiency")
        note = "Against the smallest number of ranks."
        sections.append(Section("Scaling", card("Clips a second by number of ranks", table(heads, cells), note)))
    if alone:
        heads = ("process group", "ranks", "at clip", "from checkpoint")
        note = "A run that was killed, or whose number of ranks changed, resumes from its newest checkpoint."
        sections.append(Section("Starts", card("Process groups", table(heads, _starts(first)), note)))
    config = _config(folders[0])
    return document(
        ", ".join(run.name for run in runs),
        sections,
        command="report",
        lead=f"{config['model']} on {config['data']}." if alone and config else "",
        chips={name: value for name, value in config.items() if name not in ("model", "data")} if alone else {},
        top=figures(_figures(first)) if alone else "",
    )


def _config(folder: Path) -> dict[str, str]:
    """What a run trained, in words; empty where its configuration cannot be read."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        model, data, epochs = config["model"]["name"], config["data"], config["run"]["epochs"]
        batch, how = data["global_batch_size"], config["sync"]
    except (OSError, ValueError, KeyError):
        return {}
    return {"model": model, "data": data["path"], "clips a step": str(batch), "epochs": str(epochs), "strategy": how}


def _chart(runs: Sequence[Run], kind: str, name: str, title: str) -> str:
    curves = {run.name: points for run in runs if (points := run.curve(kind, name))}
    return lines(curves, title, across="epochs", whole_x=True) if curves else ""


def _figures(run: Run) -> list[tuple[str, str, str]]:
    scores = [score for _, score in run.curve("eval", "top1_percent")]
    found = [("held-out top-1", f"{scores[-1]:.2f} %", f"best {max(scores):.2f} %")] if scores else []
    known = [(label, form, run.middle(name)) for name, label, form in _FACTS]
    return found + [(label, form.format(value), "median") for label, form, value in known if value is not None]


def _comparison(runs: Sequence[Run]) -> str:
    rows = []
    for run in runs:
        scores = [score for _, score in run.curve("eval", "top1_percent")]
        facts = [run.middle(name) for name, _, _ in _FACTS]
        shown = ["" if value is None else form.format(value) for value, (_, _, form) in zip(facts, _FACTS, strict=True)]
        rows.append((run.name, f"{scores[-1]:.2f} %" if scores else "", *shown))
    return table(("run", "top-1", *(label for _, label, _ in _FACTS)), rows)


def _parts(run: Run) -> dict[str, float]:
    step = run.middle("step_ms")
    if step is None:
        return {}
    wait, exposed = (step * (run.middle(name) or 0.0) / 100 for name in ("wait_percent", "exposed_percent"))
    return {"computing": step - wait - exposed, "waiting for data": wait, "exposed communication": exposed}


def _starts(run: Run) -> list[tuple[str, str, str, str]]:
    starts = [row for row in run.rows if row["kind"] == "start"]
    return [
        (str(number + 1), str(row.get("world_size", "")), f"{row['samples']:,}", str(row.get("checkpoint") or "fresh"))
        for number, row in enumerate(starts)
    ]
