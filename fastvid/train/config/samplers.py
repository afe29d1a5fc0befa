"""Samplers by name, for ``data.frames=`` on the command line."""

from __future__ import annotations

from dataclasses import is_dataclass
from typing import Any, Final

from fastvid.errors import UsageError
from fastvid.load.clips.sampling import Dense, Segments, Uniform
from fastvid.load.clips.timed_sampling import Window
from fastvid.runtime.import_names import import_name

SAMPLERS: Final = {"segments": Segments, "dense": Dense, "uniform": Uniform, "window": Window}
"""Samplers of a fixed number of frames, by the name that ``data.frames=`` accepts."""


def find_sampler(name: str) -> type[Any]:
    """Return the class of a sampler.

    Args:
        name: One of `SAMPLERS`, or ``module:class``.

    Raises:
        UsageError: If the name is unknown or is not the name of a sampler.
    """
    if name not in SAMPLERS and ":" not in name:
        raise UsageError(f"unknown sampler {name!r}", hint=f"use one of {', '.join(SAMPLERS)}; or module:class")
    kind = SAMPLERS.get(name) or import_name("sampler", name)
    if not (isinstance(kind, type) and is_dataclass(kind) and hasattr(kind, "draw")):
        raise UsageError(
            f"sampler is {name!r}, which is not a dataclass with a method draw",
            hint="write it like fastvid.Dense, see docs/howto/sampler.md",
        )
    return kind
