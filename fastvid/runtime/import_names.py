"""Objects that a user names as ``module:name``, such as a model, a task or an optimizer of their own."""

from __future__ import annotations

import difflib
import importlib
import inspect
import pkgutil
from collections.abc import Collection, Iterable
from types import ModuleType
from typing import Any

from fastvid.errors import UsageError


def import_name(setting: str, name: str) -> Any:
    """Return the object that a setting names.

    Exceptions of the module's own code, such as a failing import in it, are not caught.
    """
    module_name, colon, path = name.partition(":")
    if not (colon and module_name and path):
        raise UsageError(f"{setting} is {name!r}", hint="write it as module:name, for example my_code:Mine")
    found: Any = _module(setting, name, module_name)
    for part in path.split("."):
        if not hasattr(found, part):
            public = [other for other in dir(found) if not other.startswith("_")]
            raise UsageError(
                f"{setting} is {name!r}, but module {module_name!r} has no {path!r}",
                file=getattr(found, "__file__", None),
                hint=_meant(part, public) or f"define {path} in {module_name}, or correct the name",
            )
        found = getattr(found, part)
    return found


def check_keywords(setting: str, name: str, make: Any, given: Iterable[str], *, always: Collection[str] = ()) -> None:
    """Check that a callable accepts options as keyword arguments, and has no other required arguments."""
    try:
        parameters = inspect.signature(make).parameters.values()
    except (TypeError, ValueError):
        return
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    known = [p.name for p in named if p.name not in always]
    given = set(given)
    anything = any(p.kind is p.VAR_KEYWORD for p in parameters)
    for option in sorted(given - set(known)):
        if not anything or option in always:
            hint = f"use one of {', '.join(known)}" if known else "remove it: it has no options"
            raise UsageError(f"{setting}.{option}: {name!r} has no such option", hint=_meant(option, known) or hint)
    missing = [p.name for p in named if p.default is p.empty and p.name not in {*given, *always}]
    if missing:
        raise UsageError(
            f"{name!r} requires {', '.join(missing)}", hint=f"set {', '.join(f'{setting}.{one}' for one in missing)}"
        )


def accepted(make: Any, names: Iterable[str]) -> set[str]:
    """Return those of the names that a callable accepts as keyword arguments."""
    try:
        parameters = inspect.signature(make).parameters.values()
    except (TypeError, ValueError):
        return set(names)
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return set(names)
    return {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)} & set(names)


def first_argument(make: Any) -> list[str]:
    """Return the name of a callable's first positional argument; empty if it has none or none can be read."""
    try:
        parameters = inspect.signature(make).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][:1]


def _module(setting: str, name: str, module_name: str) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # Translate only a missing named module: a missing import inside it has its own clear error.
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        near = _meant(module_name, [module.name for module in pkgutil.iter_modules()])
        raise UsageError(
            f"{setting} is {name!r}, but there is no module {module_name!r}",
            hint=" ".join([*([near] if near else []), "add the folder of the module to PYTHONPATH, or install it"]),
        ) from error


def _meant(name: str, known: Iterable[str]) -> str | None:
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean {near[0]}?" if near else None
