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
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import fields
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, Final, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

from fastvid.errors import UsageError, visible
from fastvid.runtime.names import meant

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


def check_choice(name: str, value: object, known: Iterable[object], own: str = "", **where: object) -> None:
    """Raise UsageError unless a value is one of those in `known`; the hint names the nearest.

    `name`: of the value, or the message with {} for the value. `own`: form of the names of users' own objects, such as
    "module:class", which are accepted if they contain a colon.
    """
    known = list(known)
    if value in known or (own and isinstance(value, str) and ":" in value):
        return
    listed = ", ".join(map(str, known))
    others = (f"use one of {listed}; or {own}" if own else f"use one of {listed}") if known else f"write it as {own}"
    longer = (one for one in known if isinstance(one, str) and len(one) > 2 and str(value).startswith(one))
    near = meant(str(value), map(str, known)) or next((f"did you mean {one}?" for one in longer), None)
    told = name.replace("{}", repr(value)) if "{}" in name else f"{name} is {value!r}"
    raise UsageError(told, hint=f"{near} {others}" if near else others, **where)


_MOST: Final = 2**63 - 1  # what int64 can hold


def check_integer(name: str, value: Any, least: int = -_MOST, most: int = _MOST) -> int:
    """Return an integer of any type, such as numpy's, as an int; raise UsageError if it is not `least` to `most`."""
    try:
        number = operator.index(value)
    except TypeError:
        raise UsageError(f"{name} is {value!r}, expected an integer", hint=f"give {name} as an int") from None
    if not least <= number <= most:
        limits = f"at least {least}" if number < most == _MOST else f"{least} to {most}"
        raise UsageError(f"{name} is {number}, expected {limits}")
    return number


def check_least(least: float, /, **values: float | None) -> None:
    """Raise UsageError unless numbers, given by name, are at least `least` and not NaN; None is accepted."""
    for name, value in values.items():
        if value is not None and not (is_number(value) and value >= least):
            raise UsageError(f"{name} is {value!r}, expected at least {least}")


def check_integers(least: int, /, **values: Any) -> None:
    """Raise UsageError unless integers of any type, given by name, are at least `least`; None is accepted."""
    for name, value in values.items():
        if value is not None:
            check_integer(name, value, least)


def check_share(name: str, value: Any) -> None:
    """Raise UsageError unless a value is a number from 0 to 1."""
    if not (is_number(value) and 0 <= value <= 1):
        raise UsageError(f"{name} is {value!r}, expected 0 to 1", hint=f"give {name} as a number, such as 0.5")


def path_text(name: str, path: object) -> str:
    """Return a path or URL as text; raise UsageError if it is neither text nor a path."""
    if not isinstance(path, str | os.PathLike):
        raise UsageError(f"{name} is {path!r}, expected a path", hint="give a path or URL as str or pathlib.Path")
    return os.fspath(path)


def check_bounds(name: str, value: Any, most: float = math.inf) -> tuple[float, float]:
    """Return two numbers; raise UsageError unless they are finite, positive, ascending and at most `most`."""
    try:
        low, high = map(float, value)
    except (TypeError, ValueError):
        low = high = math.nan
    if not 0 < low <= high <= most or high == math.inf:
        limit = "" if most == math.inf else f" <= {most:g}"
        raise UsageError(f"{name} is {value!r}, expected 0 < low <= high{limit}", hint=f"use {name}=(low, high)")
    return low, high


def check_numbers(name: str, value: Any) -> tuple[float, ...]:
    """Return several numbers as floats; raise UsageError if the value is anything else."""
    if hasattr(value, "__iter__") and all(map(is_number, numbers := tuple(value))):
        return tuple(map(float, numbers))
    raise UsageError(f"{name} are {value!r}, expected a list of numbers", hint=f"give {name} as a list or tuple")


def check_channels(name: str, value: Any, most: float) -> tuple[float, float, float]:
    """Return a number for each of R, G and B, given as three or as one for all; raise UsageError if not 0 to `most`."""
    try:
        numbers = tuple(map(float, value))
    except TypeError:
        numbers = (value,) * 3
    except ValueError:
        numbers = ()
    if len(numbers) != 3 or not all(is_number(number) and 0 <= number <= most for number in numbers):
        told = f"{name} is {value!r}, expected one or three numbers from 0 to {most:g}"
        raise UsageError(told, hint="divide levels by 255")
    return float(numbers[0]), float(numbers[1]), float(numbers[2])


def check_kind(name: str, value: object, *kinds: type, use: str) -> None:
    """Raise UsageError unless a value is an instance of one of these types; `use`: what to use instead."""
    if not isinstance(value, kinds):
        expected = " or ".join(kind.__name__.replace("NoneType", "None") for kind in kinds)
        raise UsageError(f"{name} is {value!r}, expected {expected}", hint=f"use {use}")


def check_switches(**values: bool) -> None:
    """Raise UsageError unless values, given by name, are True or False."""
    for name, value in values.items():
        check_kind(name, value, bool, use="True or False")


EXPECTED: Final[dict[Any, str]] = {
    str: "a text", bool: "true or false", int: "a whole number", float: "a number", NoneType: "none",
    tuple: "a tuple", Mapping: "a mapping",
}  # fmt: skip
"""Types in words, for messages."""

_NUMBERS: Final[dict[Any, Any]] = {int: Integral, float: Real}  # of any library


def check_fields(name: str, record: Any) -> None:
    """Check the fields of a dataclass object against their types, see `check_hint`; `name`: of the object."""
    hints = get_type_hints(type(record))
    for field in fields(record):
        check_hint(f"{name}.{field.name}", getattr(record, field.name), hints[field.name])


def check_hint(name: str, value: object, hint: Any) -> None:
    """Raise UsageError unless a value fits a type hint of plain types; types that `EXPECTED` lacks pass."""
    if get_origin(hint) is Literal:
        check_choice(name, value, get_args(hint))
    elif not _fits(value, hint):
        inner = get_args(hint) or (hint,)
        single = get_origin(hint) is tuple and _fits(value, inner[0])
        kinds = inner if get_origin(hint) in (Union, UnionType) else (hint,)
        told = " or ".join(EXPECTED.get(get_origin(kind) or kind, str(kind)) for kind in kinds)
        raise UsageError(f"{name} is {value!r}, expected {told}", hint=f"write ({value!r},)" if single else None)


def _fits(value: object, hint: Any) -> bool:
    kind, inner = get_origin(hint) or hint, get_args(hint)
    if kind in (Union, UnionType):
        return any(_fits(value, one) for one in inner)
    if kind is tuple:
        return isinstance(value, (tuple, list)) and all(_fits(one, inner[0]) for one in value)
    return kind not in EXPECTED or (isinstance(value, _NUMBERS.get(kind, kind)) and value == value)  # not NaN


def check_seconds(**values: float) -> None:
    """Raise UsageError unless numbers of seconds, given by name, are positive and finite."""
    for name, value in values.items():
        if not (is_number(value) and 0 < value < math.inf):
            raise UsageError(f"{name} is {value!r}, expected a positive number of seconds")


def is_number(value: object) -> bool:
    """Return whether a value is a single number of any type."""
    return hasattr(value, "__float__") and not isinstance(value, type) and not getattr(value, "shape", ())


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
