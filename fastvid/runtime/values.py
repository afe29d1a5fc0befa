"""Check argument values with uniform messages; hash bytes; format values as JSON that every reader accepts, or text."""

from __future__ import annotations

import hashlib
import json
import math
import operator
import os
import threading
import unicodedata
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any, Final, TypeVar

import msgspec

from fastvid.errors import UsageError, visible

T = TypeVar("T")

_DESCRIBED: Final[set[Any]] = set()
_DESCRIBING: Final = threading.RLock()


def as_type(value: object, kind: type[T], **options: Any) -> T:
    """Return plain data, as JSON has it, as a value of a type: `msgspec.convert`, which raises its errors.

    msgspec 0.21 describes a dataclass the first time it makes one, and a second thread that finds the description of
    nested dataclasses unfinished crashes the process. So one thread at a time makes the first value of a type.
    """
    with nullcontext() if kind in _DESCRIBED else _DESCRIBING:
        try:
            made: T = msgspec.convert(value, kind, **options)
            return made
        finally:
            _DESCRIBED.add(kind)


def check_choice(name: str, value: object, known: Collection[object]) -> None:
    """Raise UsageError unless a value is one of those in `known`."""
    if value not in known:
        raise UsageError(f"{name} is {value!r}", hint=f"use one of {', '.join(map(str, known))}")


def check_integer(name: str, value: Any, least: int | None = None, most: int | None = None) -> int:
    """Return an integer of any type, such as numpy's, as an int; raise UsageError if it is not `least` to `most`."""
    try:
        number = operator.index(value)
    except TypeError:
        raise UsageError(f"{name} is {value!r}, expected an integer", hint=f"give {name} as an int") from None
    if (least is not None and number < least) or (most is not None and number > most):
        limits = f"at least {least}" if most is None else f"{least} to {most}"
        raise UsageError(f"{name} is {number}, expected {limits}")
    return number


def check_least(least: float, /, **values: float | None) -> None:
    """Raise UsageError unless numbers, given by name, are at least `least` and not NaN; None is accepted."""
    for name, value in values.items():
        if value is not None and not (_is_number(value) and value >= least):
            raise UsageError(f"{name} is {value!r}, expected at least {least}")


def check_seconds(**values: float) -> None:
    """Raise UsageError unless numbers of seconds, given by name, are positive and finite."""
    for name, value in values.items():
        if not (_is_number(value) and 0 < value < math.inf):
            raise UsageError(f"{name} is {value!r}, expected a positive number of seconds")


def _is_number(value: object) -> bool:
    return hasattr(value, "__float__")


_BLOCK: Final = 1 << 24
"""Bytes hashed per call, so that Ctrl-C does not wait until a whole tar is hashed."""

_READ: Final = 1 << 20


def sha256(data: bytes | memoryview) -> str:
    """Return the SHA-256 of bytes; a memoryview, for example of a mapped file, is not copied."""
    view = memoryview(data)
    return sha256_of_pieces(view[start : start + _BLOCK] for start in range(0, len(view), _BLOCK))


def sha256_of_pieces(pieces: Iterable[bytes | memoryview]) -> str:
    """Return the SHA-256 of bytes given in pieces."""
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()


def sha256_of_file(descriptor: int) -> str:
    """Return the SHA-256 of an open file from start to end, without changing its position."""

    def pieces() -> Iterator[bytes]:
        position = 0
        while piece := os.pread(descriptor, _READ, position):
            yield piece
            position += len(piece)

    return sha256_of_pieces(pieces())


def json_text(value: Any, *, indent: int | None = None, default: Callable[[Any], Any] | None = None) -> str:
    """Return a value as JSON, with null for NaN and infinity, whose literals are not valid JSON."""
    return json.dumps(_finite(value), indent=indent, default=default, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


def listing(found: Mapping[str, Any]) -> str:
    """Format a JSON object as two columns, name and value; inner names are dotted, and lists are left out."""
    rows = list(_named(found))
    width = max((text_width(name) for name, _ in rows), default=0)
    return "\n".join(f"  {padded(name, width)}  {text}" for name, text in rows)


def _named(found: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in found.items():
        if isinstance(value, Mapping):
            yield from _named(value, f"{prefix}{name}.")
        elif isinstance(value, float):
            yield prefix + name, duration(value) if name == "seconds" else f"{value:.4g}"
        elif isinstance(value, int) and not isinstance(value, bool):
            yield prefix + name, size(value) if "bytes" in prefix + name else count(value)
        elif not isinstance(value, list | tuple):
            yield prefix + name, visible("-" if value is None else str(value))


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


def words(value: object) -> str:
    """Return a value as text; of a list its values, and of a mapping its names and values, with commas between."""
    listed = [f"{name} {one}" for name, one in value.items()] if isinstance(value, Mapping) else value
    return ", ".join(map(str, listed)) if isinstance(listed, (list, tuple)) else str(value)


def text_width(text: str) -> int:
    """Return the columns that a terminal needs for a text: two for wide letters such as Chinese, none for accents."""
    return sum(2 if unicodedata.east_asian_width(one) in "WF" else not unicodedata.combining(one) for one in text)


def padded(text: str, width: int) -> str:
    """Return a text with spaces after it, so that it takes `width` columns of a terminal, or more if it is longer."""
    return text + " " * (width - text_width(text))
