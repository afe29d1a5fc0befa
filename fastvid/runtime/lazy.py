"""Imports the public names of a package on first use."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def importer(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a package's ``__getattr__``, which imports a name from its module and caches it."""

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        from fastvid.errors import naming_extras

        module, _, there = homes[name].partition(":")
        with naming_extras():
            value = getattr(importlib.import_module(module), there or name)
        setattr(sys.modules[package], name, value)
        return value

    return get
