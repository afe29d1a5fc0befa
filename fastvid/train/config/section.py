"""Checks of the values of a section of the configuration, whose messages name the dotted key."""

from __future__ import annotations

from typing import Any, get_args

from fastvid.runtime.checks import check_choice, check_least


def _section(config: object) -> str:
    return type(config).__name__.removesuffix("Config").lower()


def at_least(least: float, config: Any, *names: str) -> None:
    """Check that values of a section are at least `least`; None passes."""
    check_least(least, **{f"{_section(config)}.{name}": getattr(config, name) for name in names})


def one_of(config: Any, name: str, allowed: Any) -> None:
    """Check that a value of a section is one of a Literal's."""
    check_choice(f"{_section(config)}.{name}", getattr(config, name), get_args(allowed))
