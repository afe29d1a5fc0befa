"""Chart descriptions: a benchmark's ``charts(record)`` returns them, and `bench.report` draws them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Bars:
    """A bar chart."""

    title: str
    unit: str
    values: Mapping[str, float]
    spread: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    rivals: Sequence[str] = ()
    note: str = ""


@dataclass(frozen=True)
class Lines:
    """A line chart."""

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
