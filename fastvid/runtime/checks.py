"""Argument checks with uniform messages."""

from __future__ import annotations

import math
from collections.abc import Collection

from fastvid.errors import UsageError


def check_choice(name: str, value: object, known: Collection[object]) -> None:
    """Check that a value is one of those known.

    Raises:
        UsageError: If it is not; the hint lists the known ones.
    """
    if value not in known:
        raise UsageError(f"{name} is {value!r}", hint=f"use one of {', '.join(map(str, known))}")


def check_least(least: float, /, **values: float | None) -> None:
    """Check that numbers are at least `least` and not NaN; None passes.

    Raises:
        UsageError: If a number is too small.
    """
    for name, value in values.items():
        if value is not None and not value >= least:
            raise UsageError(f"{name} is {value}, expected at least {least}")


def check_seconds(**values: float) -> None:
    """Check that numbers of seconds are positive and finite.

    Raises:
        UsageError: If one is not.
    """
    for name, value in values.items():
        if not 0 < value < math.inf:
            raise UsageError(f"{name} is {value}, expected a positive number of seconds")
