"""Formats numbers for people."""

from __future__ import annotations

import unicodedata
from collections import Counter


def count(number: int) -> str:
    """Format an integer: ``240,436``."""
    return f"{number:,}"


def things(number: int, name: str) -> str:
    """Format a number with a noun: ``1 sample``, ``1,200 samples``."""
    return f"{count(number)} {name}" if number == 1 else f"{count(number)} {name}s"


def size(number: float) -> str:
    """Format bytes in decimal units: ``812 B``, ``12.4 kB``, ``3.10 GB``."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if number < 1000 or unit == "TB":
            break
        number /= 1000
    return f"{number:.0f} {unit}" if unit == "B" else f"{number:.3g} {unit}" if number < 100 else f"{number:.0f} {unit}"


def duration(seconds: float) -> str:
    """Format seconds: ``0.04 s``, ``9.8 s``, ``3 min 20 s``, ``213 h``."""
    if seconds < 0.95:
        return f"{seconds:.2g} s"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min" if whole < 100 * 3600 else f"{count(round(whole / 3600))} h"


def axis_seconds(seconds: float) -> str:
    """Format seconds on an axis: ``0``, ``0.5 s``, ``10 s``, ``2 min``."""
    if not seconds:
        return "0"
    return f"{seconds:g} s" if seconds < 120 else f"{seconds / 60:g} min"


def axis_bytes(number: float) -> str:
    """Format bytes on an axis."""
    return size(number) if number else "0"


def percent(part: float, total: float) -> str:
    """Format a percentage, for example ``42 %``; a nonzero part never rounds to 0, an incomplete one never to 100."""
    if not total:
        return "-"
    value = 100 * part / total
    if 0 < value < 1:
        return "<1 %"
    return ">99 %" if 99 < value < 100 else f"{value:.0f} %"


def shares(counts: Counter[str], top: int = 4) -> str:
    """Format the most common values with their percentages: ``336x256 61 %, 256x256 20 %, 12 others``."""
    total = counts.total()
    parts = [f"{name} {percent(number, total)}" for name, number in counts.most_common(top)]
    if len(counts) > top:
        parts.append("1 other" if len(counts) - top == 1 else f"{len(counts) - top} others")
    return ", ".join(parts)


def text_width(text: str) -> int:
    """Return the columns that a terminal needs for a text: two for wide letters such as Chinese, none for accents."""
    return sum(2 if unicodedata.east_asian_width(one) in "WF" else not unicodedata.combining(one) for one in text)


def padded(text: str, width: int) -> str:
    """Return a text with spaces after it, so that it takes `width` columns of a terminal, or more if it is longer."""
    return text + " " * (width - text_width(text))
