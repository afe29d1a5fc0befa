"""Plots as SVG text to stand in a page. Figures are made without pyplot: no global state, no display."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any, Final

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

INK: Final = "#1b1f24"
MUTED: Final = "#68707c"
GREEN: Final = "#0b6e4f"
RED: Final = "#c8553d"
BLUE: Final = "#3d6fb4"
GREY: Final = "#b8bfc9"
# In the order in which a plot's series take them; also told apart by people who do not see red or green.
SERIES: Final = (GREEN, RED, BLUE, "#d9a441", "#7a5195", "#4c9a9a", "#8c6d46", GREY)


def lines(
    series: Mapping[str, Sequence[tuple[float, float]]],
    title: str,
    *,
    across: str,
    limits: tuple[float, float] | None = None,
    log_x: bool = False,
    log_y: bool = False,
    whole_x: bool = False,
    dashed: Sequence[str] = (),
    size: tuple[float, float] = (4.7, 3.0),
) -> str:
    """Curves.

    Args:
        series: Points (x, y) by name, in the legend's order.
        title: What is up the y axis.
        across: What is along the x axis.
        limits: Of y; default is from 0, or what fits on a log axis.
        log_x: A logarithmic x axis; `log_y` likewise.
        whole_x: Ticks at whole numbers only.
        dashed: Names drawn dashed and without marks: what is expected, not measured.
        size: Inches.
    """
    figure, axes = _axes(*size)
    for number, (name, points) in enumerate(series.items()):
        x, y = zip(*points, strict=True) if points else ((), ())
        mark = "" if name in dashed or len(points) > 15 else "o"
        style = "--" if name in dashed else "-"
        axes.plot(x, y, style, marker=mark, markersize=4, color=SERIES[number % len(SERIES)], linewidth=2, label=name)
    if log_x:
        axes.set_xscale("log")
    else:
        axes.set_xlim(left=0)
    if log_y:
        axes.set_yscale("log")
    elif limits is None:
        axes.set_ylim(bottom=0)
    if limits:
        axes.set_ylim(*limits)
    if whole_x:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel(across, color=MUTED, fontsize=9.5)
    axes.set_title(title, loc="left", fontsize=10.5, color=MUTED)
    if len(series) > 1:
        axes.legend(frameon=False, fontsize=9)
    return _svg(figure)


def bars(
    values: Mapping[str, float],
    *,
    unit: str,
    spread: Mapping[str, tuple[float, float]] | None = None,
    marked: Sequence[str] = (),
    width: float = 9.6,
) -> str:
    """Horizontal bars with their values.

    Args:
        values: By name, from top to bottom.
        unit: Written after each value.
        spread: Least and greatest by name, drawn as a thin line.
        marked: Names drawn in the second colour.
        width: Inches.
    """
    figure, axes = _axes(width, 0.42 * len(values) + 0.6)
    names = list(values)
    colours = [RED if name in marked else GREEN for name in names]
    axes.barh(range(len(names)), [values[name] for name in names], color=colours)
    axes.set_yticks(range(len(names)), names)
    far = 0.0
    for place, name in enumerate(names):
        least, most = (spread or {}).get(name, (values[name], values[name]))
        axes.plot((least, most), (place, place), color=INK, linewidth=1.2, alpha=0.6)
        end = max(most, values[name])
        far = max(far, end)
        says = f"{number(values[name])} {unit}".rstrip()
        axes.annotate(
            says, (end, place), xytext=(6, 0), textcoords="offset points", va="center", fontsize=9.5, color=INK
        )
    axes.grid(visible=False)
    axes.invert_yaxis()
    axes.set_xlim(0, (far or 1.0) * 1.14)
    axes.xaxis.set_visible(False)
    axes.spines["bottom"].set_visible(False)
    return _svg(figure)


def number(value: float) -> str:
    """`value` with three significant digits, or all digits before the point."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _axes(width: float, height: float) -> tuple[Figure, Any]:
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=9.5, colors=INK, length=0)
    axes.grid(axis="y", color="#eceff3")
    axes.set_axisbelow(True)
    return figure, axes


def _svg(figure: Figure) -> str:
    out = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "fastvid", "font.family": "sans-serif"}):
        figure.savefig(out, format="svg", metadata={"Date": None}, transparent=True)
    drawn = out.getvalue()
    return drawn[drawn.index("<svg") :]
