"""Checks of arguments: each kind of fault has one message."""

from __future__ import annotations

import math
from collections.abc import Collection

from fastvid.errors import UsageError


def check_choice(name: str, value: object, known: Collection[object]) -> None:
    """Refuse a value that is not one of those known.

    Raises:
        UsageError: It is not; the hint lists them.
    """
    if value not in known:
        raise UsageError(f"{name} is {value!r}", hint=f"known are {', '.join(map(str, known))}")


def check_least(least: float, /, **values: float | None) -> None:
    """Refuse numbers below the least one, and NaN; None is fine.

    Raises:
        UsageError: A number is too small.
    """
    for name, value in values.items():
        if value is not None and not value >= least:
            raise UsageError(f"{name} is {value}, expected at least {least}")


def check_seconds(**values: float) -> None:
    """Refuse what is no time to wait: zero, less, infinity and NaN.

    Raises:
        UsageError: A number is not positive and finite.
    """
    for name, value in values.items():
        if not 0 < value < math.inf:
            raise UsageError(f"{name} is {value}, expected a positive number of seconds")
