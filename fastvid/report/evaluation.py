"""An evaluation as one HTML page: scores, the confusion matrix, the classes."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any, Protocol

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from fastvid.report import page as html
from fastvid.report.plots import INK, MUTED

_HEADS = ("class", "videos", "top-1", "most often taken for")
_NAMED = 30  # classes that fit with their names beside a matrix


class Evaluated(Protocol):
    """What is drawn; see `fastvid.train.run.scoring.Report`."""

    @property
    def score(self) -> Any: ...

    @property
    def protocol(self) -> str: ...

    @property
    def num_views(self) -> int: ...

    @property
    def classes(self) -> Sequence[str]: ...

    @property
    def confusion(self) -> Any: ...

    def per_class(self) -> list[dict[str, Any]]: ...


def page(report: Evaluated) -> str:
    """The whole page."""
    score = report.score
    rows = report.per_class()
    known = sorted((row for row in rows if row["videos"]), key=lambda row: row["top1_percent"])
    mean = sum(row["top1_percent"] for row in known) / len(known) if known else float("nan")
    figures = [
        (f"{score.top1_percent:.2f} %", "top-1"),
        (f"{score.top5_percent:.2f} %", "top-5"),
        (f"{mean:.2f} %", "mean of the classes' top-1"),
        (f"{score.loss:.3f}", "loss, nats"),
        (f"{score.scored:,} of {score.total:,}", "videos scored"),
        (f"{report.protocol}, {report.num_views}", "protocol, views a video"),
    ]
    table = [
        (
            row["class"],
            f"{row['videos']:,}",
            f"{row['top1_percent']:.1f} %",
            f"{row['taken_for']} ({row['taken_for_videos']})" if row["taken_for"] else "",
        )
        for row in known
    ]
    return html.page(
        "fastvid eval",
        "Every video of the split once; the probabilities of its views are averaged.",
        html.figures(figures)
        + html.card("Who is taken for whom", _matrix(report), "Rows are true classes, columns what the model said.")
        + html.card(
            "Classes, the worst first", html.table(("class", "videos", "top-1", "most often taken for"), table)
        ),
    )


def _matrix(report: Evaluated) -> str:
    counts = np.asarray(report.confusion, dtype=np.float64)
    shares = counts / np.maximum(1.0, counts.sum(1, keepdims=True))
    side = 9.0 if len(counts) > _NAMED else 2.5 + 0.22 * len(counts)
    figure = Figure(figsize=(side, side * 0.88), layout="constrained")
    axes = figure.subplots()
    shown = axes.imshow(100 * shares, cmap="Greens", vmin=0, vmax=100, interpolation="nearest")
    if len(counts) <= _NAMED:
        axes.set_xticks(range(len(counts)), report.classes, rotation=90, fontsize=9)
        axes.set_yticks(range(len(counts)), report.classes, fontsize=9)
    axes.tick_params(length=0, colors=INK)
    axes.spines[:].set_visible(False)
    bar = figure.colorbar(shown, ax=axes, shrink=0.6)
    bar.outline.set_visible(False)
    bar.set_label("% of a class", color=MUTED, fontsize=9)
    out = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "fastvid", "font.family": "sans-serif"}):
        figure.savefig(out, format="svg", metadata={"Date": None}, transparent=True)
    drawn = out.getvalue()
    return drawn[drawn.index("<svg") :]
