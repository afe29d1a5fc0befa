"""What a result shows: a benchmark's ``charts(record)`` gives these, and `bench.report` draws them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Bars:
    """One number a name.

    Attributes:
        title: Of the plot; results of several files stand in one plot where the titles are the same.
        unit: Of the numbers.
        values: By name, from top to bottom.
        spread: Least and greatest, by name.
        rivals: Names of what fastvid is compared with.
        note: What the reader should know, in a sentence or two.
    """

    title: str
    unit: str
    values: Mapping[str, float]
    spread: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    rivals: Sequence[str] = ()
    note: str = ""


@dataclass(frozen=True)
class Lines:
    """Numbers over numbers.

    Attributes:
        title: Of the plot, as with Bars.
        across: What is along the x axis.
        up: What is up the y axis.
        series: Points (x, y) by name.
        expected: Names of series that are predicted, not measured.
        log_x: A logarithmic x axis; `log_y` likewise.
        note: As with Bars.
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
    """Text in rows; the first column is on the left, the others are aligned as numbers."""

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


Chart = Bars | Lines | Table
