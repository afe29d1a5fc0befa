"""Charts as inline SVG and HTML that scale to any width. Colours come from the style sheet; numbers are text.

Positions in a chart are percentages of its width and height, so that text and marks keep their size on any screen.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from fastvid.report.page import table, text
from fastvid.runtime.values import count

COLOURS: Final = 8
"""Number of colours in the style sheet: classes ``c0`` to ``c7``."""

_MARKED: Final = 15  # draw a mark at each point only if a line has at most this many points
_DRAWN: Final = 1000  # maximum number of points drawn of a line
_LISTED: Final = 50  # maximum rows in the table of numbers below a chart
_LETTER: Final = 6.7  # width in pixels of a letter of an axis label

Point = tuple[float, float]
_height = operator.itemgetter(1)


@dataclass(frozen=True, slots=True)
class _Axis:
    """An axis from `low` to `high`; `whole`: whether its ticks are whole numbers."""

    low: float
    high: float
    whole: bool = False

    def at(self, value: float) -> float:
        """Return the position of a value in percent of the axis, from `low`."""
        return 100 * (value - self.low) / (self.high - self.low)

    def ticks(self, most: int) -> list[float]:
        """Return the values of the ticks: about `most` round numbers, or fewer."""
        span = self.high - self.low
        step = 10.0 ** math.floor(math.log10(span / most))
        step *= next(factor for factor in (1, 2, 5, 10) if span / (step * factor) <= most)
        if self.whole:
            step = max(1.0, step)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [number * step for number in range(first, last + 1)] or [self.low]


def lines(
    series: Mapping[str, Sequence[Point]],
    title: str,
    *,
    across: str,
    limits: Point | None = None,
    whole_x: bool = False,
) -> str:
    """Return a chart of curves as HTML, with a collapsed table of their numbers below.

    `across`: label of the x axis. `limits`: lowest and highest y; by default the axis covers 0 and all values.
    `whole_x`: whether ticks of the x axis are whole numbers.
    """
    drawn = {name: [at for at in points if all(map(math.isfinite, at))] for name, points in series.items()}
    places = [point for points in drawn.values() for point in points] or [(1.0, 1.0)]
    x_axis = _axis([x for x, _ in places], whole=whole_x, room=1.0)
    y_axis = _Axis(*limits) if limits else _axis([y for _, y in places], room=1.06)
    styles = {name: f"c{n % COLOURS}{' dashed' * (n >= COLOURS)}" for n, name in enumerate(drawn)}
    parts, marks = [], []
    for name, points in drawn.items():
        at = [(x_axis.at(x), 100 - y_axis.at(y)) for x, y in points]
        path = " ".join(f"{10 * x:.1f},{10 * y:.1f}" for x, y in _thinned(at))
        parts.append(f'<polyline class="{styles[name]}" points="{path}"/>' if len(at) > 1 else "")
        if len(at) <= _MARKED:
            marks += [f'<circle class="{styles[name]}" cx="{x:.2f}%" cy="{y:.2f}%" r="4"/>' for x, y in at]
    curves = f'<svg class="curves" viewBox="0 0 1000 1000" preserveAspectRatio="none">{"".join(parts)}</svg>'
    heads, rows = (across, *series), _listed(drawn)
    shown = rows[:: math.ceil(len(rows) / _LISTED) or 1]
    inner = curves + "".join(marks) + _columns(shown, heads, x_axis)
    svg = _frame(f"{title} over {across}", x_axis, y_axis, _tick, _tick, inner)
    legend = "".join(f'<span><i class="{styles[name]}"></i>{text(name)}</span>' for name in drawn if len(series) > 1)
    cells = [["" if value is None else _precise(value) for value in (x, *values)] for x, values in shown]
    some = "" if len(shown) == len(rows) else f", {len(shown)} of {count(len(rows))} rows"
    return (
        f'<figure><figcaption><b>{text(title)}</b><span class="legend">{legend}</span></figcaption>{svg}'
        f'<div class="across">{text(across)}</div>'
        f"<details><summary>Numbers{some}</summary>{table(heads, cells)}</details></figure>"
    )


def bars(
    values: Mapping[str, float],
    *,
    unit: str = "",
    label: Callable[[float], str] | None = None,
    spread: Mapping[str, Point] | None = None,
    quiet: Collection[str] = (),
) -> str:
    """Return horizontal bars with their values as HTML.

    `label`: formats a value; by default `number` with the unit. `spread`: (low, high) of bars that get a range mark.
    `quiet`: names of bars that are drawn in a weaker colour.
    """
    label = label or (lambda value: f"{number(value)} {unit}".rstrip())
    spread = spread or {}
    most = max(
        [one for one in (*values.values(), *(high for _, high in spread.values())) if 0 < one < math.inf], default=1.0
    )
    rows = []
    for name, value in values.items():
        kind, tip = "row quiet" if name in quiet else "row", f"{name}: {label(value)}"
        whisker = read = ""
        if name in spread:
            low, high = spread[name]
            rounds = f"{label(low)} to {label(high)}"
            tip, read = f"{tip}, from {rounds}", f' role="img" aria-label="from {text(rounds)}"'
            place = f"left:{100 * low / most:.2f}%;width:{100 * (high - low) / most:.2f}%"
            whisker = f'<i class="spread" style="{place}"></i>'
        rows.append(
            f'<div class="{kind}" data-tip="{text(tip)}"><span class="name">{text(name)}</span>'
            f'<span class="track"{read}><i class="fill" style="width:{max(0.0, 100 * value / most):.2f}%"></i>{whisker}'
            f'</span><span class="value">{text(label(value))}</span></div>'
        )
    return f'<div class="bars">{"".join(rows)}</div>'


def number(value: float) -> str:
    """Format a value with three significant digits, or all digits before the decimal point."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _tick(value: float) -> str:
    for unit, letter in ((1e9, "G"), (1e6, "M")):
        if abs(value) >= unit:
            return f"{value / unit:.3g} {letter}"
    return number(value)


def _precise(value: float) -> str:
    return f"{value:,.0f}" if float(value).is_integer() or abs(value) >= 1e5 else f"{value:.5g}"


def _axis(values: Sequence[float], *, whole: bool = False, room: float) -> _Axis:
    """Return an axis that covers 0 and the values; `room`: factor by which its ends are moved away from 0."""
    low, high = min(0.0, *values), max(0.0, *values)
    return _Axis(low * room, high * room if high > low else low + 1, whole)


def _frame(
    label: str, x: _Axis, y: _Axis, say_x: Callable[[float], str], say_y: Callable[[float], str], body: str
) -> str:
    """Return an SVG with grid, ticks and body; screen readers read `label` instead."""
    rows = [(100 - y.at(tick), text(say_y(tick))) for tick in y.ticks(5)]
    left = 12 + _LETTER * max(len(said) for _, said in rows)
    parts = [
        f'<line class="rule" x1="0" x2="100%" y1="{at:.2f}%" y2="{at:.2f}%"/>'
        f'<text class="end" x="-8" y="{at:.2f}%" dy=".35em">{said}</text>'
        for at, said in rows
    ]
    parts += [
        f'<text class="middle" x="{x.at(tick):.2f}%" y="100%" dy="18">{text(say_x(tick))}</text>' for tick in x.ticks(6)
    ]
    axis = '<line class="axis" x1="0" x2="100%" y1="100%" y2="100%"/>'
    return (
        f'<svg class="chart" style="padding-left:{left:.0f}px" role="img" aria-label="{text(label)}">'
        f"{''.join(parts)}{body}{axis}</svg>"
    )


def _thinned(points: Sequence[Point]) -> list[Point]:
    """Return about `_DRAWN` points or fewer: the lowest and the highest point of each interval, in order of x."""
    stretch = math.ceil(2 * len(points) / _DRAWN) or 1
    parts = [points[start : start + stretch] for start in range(0, len(points), stretch)]
    return [one for part in parts for one in sorted({min(part, key=_height), max(part, key=_height)})]


def _listed(series: Mapping[str, Sequence[Point]]) -> list[tuple[float, list[float | None]]]:
    """Return every x of any series, ascending, with the value of each series at this x, None if it has none."""
    values = [dict(points) for points in series.values()]
    return [(x, [one.get(x) for one in values]) for x in sorted({x for one in values for x in one})]


def _columns(rows: Sequence[tuple[float, Sequence[float | None]]], heads: Sequence[str], axis: _Axis) -> str:
    """Return invisible columns that show a row of numbers on hover; each reaches halfway to its neighbours."""
    places = [axis.at(x) for x, _ in rows]
    edges = [0.0, *((one + other) / 2 for one, other in itertools.pairwise(places)), 100.0]
    parts = []
    for (x, values), left, right in zip(rows, edges, edges[1:], strict=False):
        told = [f"{name} {_precise(y)}" for name, y in zip(heads, (x, *values), strict=True) if y is not None]
        place = f'x="{left:.2f}%" y="0" width="{right - left:.2f}%" height="100%"'
        parts.append(f'<rect class="hit" {place} data-tip="{text(", ".join(told))}"/>')
    return "".join(parts)
