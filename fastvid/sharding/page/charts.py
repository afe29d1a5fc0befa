"""Small charts as inline SVG and HTML. Colours come from the page's style sheet; texts are escaped here."""

from __future__ import annotations

import html
import math
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from fastvid.runtime.units import count, percent, size

_WIDTH: Final = 560
_HEIGHT: Final = 200
_LEFT, _RIGHT, _TOP, _BOTTOM = 44, 8, 22, 26
_BINS: Final = 28
# Values above this quantile share the last bar, so that one long video does not squeeze the rest together.
_TAIL: Final = 0.99
# As many colours as the style sheet has for splits.
_COLOURS: Final = 6

_REPLACED: Final = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}


def text(value: object) -> str:
    """A value as HTML text. Letters that could reorder or hide the text around them are spelled out."""
    plain = "".join(
        f"\\u{ord(letter):04x}" if unicodedata.category(letter) in _REPLACED else letter for letter in str(value)
    )
    return html.escape(plain, quote=True)


def card(title: str, sub: str, body: str) -> str:
    """A panel. Title and `sub` are texts, `body` is markup."""
    return f'<div class="card"><div class="head"><h3>{text(title)}</h3><span>{text(sub)}</span></div>{body}</div>'


def definitions(rows: Mapping[str, object]) -> str:
    """Names and values in two columns."""
    listed = "".join(f"<dt>{text(name)}</dt><dd>{text(value)}</dd>" for name, value in rows.items())
    return f'<dl class="facts">{listed}</dl>'


def histogram(
    values: npt.NDArray[np.float64], label: Callable[[float], str], axis: Callable[[float], str], *, what: str
) -> str:
    """Bars over equal intervals, with the median marked.

    Args:
        values: Float64 [N], N >= 1.
        label: Writes a value.
        axis: Writes a round value under the axis.
        what: What the values are of, such as "samples".
    """
    low, tail, high = float(values.min()), float(np.quantile(values, _TAIL)), float(values.max())
    # An axis begins at zero unless all values lie far from it.
    start = 0.0 if low < 0.5 * tail else low
    stop = max(tail, start * 1.01, 1e-9)
    ticks = _ticks(start, stop, 6)
    edges = np.linspace(start, stop, min(_BINS, max(8, len(values))) + 1)
    heights = np.histogram(np.minimum(values, stop), edges)[0]
    scale = [tick for tick in _ticks(0, float(heights.max()) * 1.2, 4) if tick == round(tick)]
    top = max(scale[-1], float(heights.max()))
    inner, floor = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _BOTTOM
    step = inner / len(heights)
    parts = [f'<svg class="chart" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{text(what)}">']
    for tick in scale:
        y = floor - (floor - _TOP) * tick / top
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick end" x="{_LEFT - 6}" y="{y + 4:.1f}">{count(round(tick))}</text>')
    for number, height in enumerate(heights.tolist()):
        x, tall = _LEFT + number * step, (floor - _TOP) * height / top
        last = number == len(heights) - 1 and high > stop
        upper = label(high if last else float(edges[number + 1]))
        tip = f"{label(float(edges[number]))} to {upper}: {count(height)} {what} ({percent(height, len(values))})"
        hit = f'<rect class="hit" x="{x:.1f}" y="{_TOP}" width="{step:.1f}" height="{floor - _TOP}"/>'
        place = f'x="{x + 0.75:.1f}" y="{floor - tall:.1f}" width="{step - 1.5:.1f}" height="{tall:.1f}"'
        parts.append(f'<g data-tip="{text(tip)}">{hit}<rect class="bar" {place} rx="2"/></g>')
    parts.append(f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{floor}" y2="{floor}"/>')
    for tick in ticks:
        x = _LEFT + inner * (tick - start) / (stop - start)
        if x <= _WIDTH - _RIGHT + 1:
            parts.append(f'<text class="tick middle" x="{x:.1f}" y="{_HEIGHT - 8}">{text(axis(tick))}</text>')
    median = float(np.median(values))
    x = _LEFT + inner * (min(median, stop) - start) / (stop - start)
    side, shift = ("end", -6) if x > _WIDTH * 0.6 else ("start", 6)
    parts.append(f'<line class="median" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP - 6}" y2="{floor}"/>')
    parts.append(f'<text class="mark {side}" x="{x + shift:.1f}" y="{_TOP - 8}">median {text(label(median))}</text>')
    return "".join(parts) + "</svg>"


def bars(counts: Counter[str], *, top: int = 7) -> str:
    """Horizontal bars of the most common values."""
    total, most = counts.total(), max(counts.values(), default=1)
    shown = counts.most_common(top)
    rest = total - sum(number for _, number in shown)
    if rest:
        shown.append((f"{len(counts) - top} others", rest))
        most = max(most, rest)
    rows = [
        f'<div class="row"><span class="name">{text(name)}</span>'
        f'<span class="track"><i class="fill" style="width:{100 * number / most:.2f}%"></i></span>'
        f'<span class="num">{count(number)}</span><span class="pct">{percent(number, total)}</span></div>'
        for name, number in shown
    ]
    return f'<div class="bars">{"".join(rows)}</div>'


def stack(parts: Mapping[str, int], total: int, order: Sequence[str]) -> str:
    """One bar of coloured pieces; `total` is what the whole width stands for."""
    pieces = [
        f'<i class="c{order.index(name) % _COLOURS}" style="width:{100 * number / max(total, 1):.2f}%"'
        f' data-tip="{text(name)}: {count(number)}"></i>'
        for name, number in parts.items()
    ]
    return f'<span class="stack">{"".join(pieces)}</span>'


def packets(kinds: str) -> str:
    """Packets as bars in decode order, their height by size. `kinds` is as in `Strip.packets`."""
    found = [(part[0], int(part[1:])) for part in kinds.split()]
    if not found:
        return ""
    # Key packets are ten times as large as others: square roots keep both visible.
    most = math.sqrt(max(number for _, number in found))
    step, tall = _WIDTH * 2 / len(found), 84
    names = {"k": "key: decoding starts here", "r": "others refer to it", "d": "nothing refers to it"}
    parts = [f'<svg class="packets" viewBox="0 0 {_WIDTH * 2} {tall}" role="img" aria-label="packets">']
    for number, (kind, number_bytes) in enumerate(found):
        high = max(2.0, tall * math.sqrt(number_bytes) / most)
        parts.append(
            f'<rect class="p{kind}" x="{number * step + 1:.1f}" y="{tall - high:.1f}" width="{max(step - 2, 1):.1f}"'
            f' height="{high:.1f}" rx="2" data-tip="packet {number}: {size(number_bytes)}, {names[kind]}"/>'
        )
    return "".join(parts) + "</svg>"


def _ticks(low: float, high: float, most: int) -> list[float]:
    """Round numbers inside [low, high], at most about `most`."""
    span = max(high - low, 1e-9)
    step = 10 ** math.floor(math.log10(span / most))
    step *= next(factor for factor in (1, 2, 5, 10) if span / (step * factor) <= most)
    first = math.ceil(low / step - 1e-9)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)] or [low]
