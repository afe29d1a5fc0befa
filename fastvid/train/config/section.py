"""Checks of the values of a section of the configuration, whose messages name the dotted key."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, get_args

from fastvid.errors import UsageError
from fastvid.runtime.checks import check_choice, check_least


def _section(config: object) -> str:
    return type(config).__name__.removesuffix("Config").lower()


def at_least(least: float, config: Any, *names: str) -> None:
    """Check that values of a section are at least `least`; None passes."""
    check_least(least, **{f"{_section(config)}.{name}": getattr(config, name) for name in names})


def one_of(config: Any, name: str, allowed: Any) -> None:
    """Check that a value of a section is one of a Literal's."""
    check_choice(f"{_section(config)}.{name}", getattr(config, name), get_args(allowed))


def one_of_or_own(config: Any, name: str, allowed: Any, options: Mapping[str, Any], options_name: str) -> None:
    """Check that a value is one of a Literal's, which have no options, or has the form ``module:name``."""
    value, key = getattr(config, name), f"{_section(config)}.{name}"
    _known_or_own(f"{key} is", value, get_args(allowed))
    if options and ":" not in value:
        raise UsageError(
            f"{_section(config)}.{options_name} is set, but {key} is {value!r}",
            hint=f"set the other settings of {_section(config)}, or {key}=module:name",
        )


def each_of_or_own(config: Any, name: str, allowed: Any) -> None:
    """Check that each value of a tuple is one of a Literal's, if any, or has the form ``module:name``; none twice."""
    values, key = getattr(config, name), f"{_section(config)}.{name}"
    if isinstance(values, str):
        raise UsageError(f"{key} is {values!r}, expected a tuple of names", hint=f"write ({values!r},)")
    for value in values:
        _known_or_own(f"{key} has", value, get_args(allowed))
        if values.count(value) > 1:
            raise UsageError(f"{key} has {value!r} more than once", hint="name it once")


def _known_or_own(what: str, value: object, known: tuple[str, ...]) -> None:
    if isinstance(value, str) and (":" in value or value in known):
        return
    near = difflib.get_close_matches(str(value), known, n=1)
    meant = f"did you mean {near[0]}? " if near else ""
    others = f"use one of {', '.join(known)}, or " if known else "write it as "
    raise UsageError(f"{what} {value!r}", hint=f"{meant}{others}module:name")
