"""Chart descriptions: a benchmark's ``charts(record)`` returns them, and `bench.report` draws them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Bars:
    """A bar chart.

    Attributes:
        title: Title of the plot; charts of several files with the same title share one plot.
        unit: Unit of the values.
        values: Value of each bar by name, from top to bottom.
        spread: Minimum and maximum by name.
        rivals: Names of the bars that fastvid is compared with.
        note: One or two sentences for the reader.
    """

    title: str
    unit: str
    values: Mapping[str, float]
    spread: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    rivals: Sequence[str] = ()
    note: str = ""


@dataclass(frozen=True)
class Lines:
    """A line chart.

    Attributes:
        title: As in `Bars`.
        across: Label of the x axis.
        up: Label of the y axis.
        series: Points (x, y) by name.
        expected: Names of series that are predicted, not measured.
        log_x: Whether the x axis is logarithmic.
        log_y: Whether the y axis is logarithmic.
        note: As in `Bars`.
    """

    title: str
    across: str
    up: str
    series: Mapping[str, Sequence[tuple[float, float]]]
    expected: Sequence[str] = ()
    log_x: bool = False
    log_y: bool = False
    note: str = ""


@dataclass(frozen=True)
class Table:
    """A table of text; the first column is left-aligned, the others right-aligned like numbers."""

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


Chart = Bars | Lines | Table
