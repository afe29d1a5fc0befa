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
    value, known = getattr(config, name), get_args(allowed)
    key = f"{_section(config)}.{name}"
    if not isinstance(value, str) or (":" not in value and value not in known):
        near = difflib.get_close_matches(str(value), known, n=1)
        meant = f"did you mean {near[0]}? " if near else ""
        raise UsageError(f"{key} is {value!r}", hint=f"{meant}use one of {', '.join(known)}, or module:name")
    if options and ":" not in value:
        raise UsageError(
            f"{_section(config)}.{options_name} is set, but {key} is {value!r}",
            hint=f"set the other settings of {_section(config)}, or {key}=module:name",
        )
