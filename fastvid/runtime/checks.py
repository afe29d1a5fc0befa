"""Argument checks with uniform messages."""

from __future__ import annotations

import math
import operator
from collections.abc import Collection
from typing import Any

from fastvid.errors import UsageError


def check_choice(name: str, value: object, known: Collection[object]) -> None:
    """Check that a value is one of those known."""
    if value not in known:
        raise UsageError(f"{name} is {value!r}", hint=f"use one of {', '.join(map(str, known))}")


def check_integer(name: str, value: Any, least: int | None = None, most: int | None = None) -> int:
    """Return an integer of any type, such as numpy's, as an int after checking its range."""
    try:
        number = operator.index(value)
    except TypeError:
        raise UsageError(f"{name} is {value!r}, expected an integer", hint=f"give {name} as an int") from None
    if (least is not None and number < least) or (most is not None and number > most):
        limits = f"at least {least}" if most is None else f"{least} to {most}"
        raise UsageError(f"{name} is {number}, expected {limits}")
    return number


def check_least(least: float, /, **values: float | None) -> None:
    """Check that numbers are at least `least` and not NaN; None passes."""
    for name, value in values.items():
        if value is not None and not (_is_number(value) and value >= least):
            raise UsageError(f"{name} is {value!r}, expected at least {least}")


def check_seconds(**values: float) -> None:
    """Check that numbers of seconds are positive and finite."""
    for name, value in values.items():
        if not (_is_number(value) and 0 < value < math.inf):
            raise UsageError(f"{name} is {value!r}, expected a positive number of seconds")


def _is_number(value: object) -> bool:
    return hasattr(value, "__float__")
