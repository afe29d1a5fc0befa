"""Work with names: of files, of objects as ``module:name``, of a package's public imports, of command-line options."""

from __future__ import annotations

import argparse
import difflib
import importlib
import inspect
import os
import pkgutil
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, cast
from urllib.parse import quote_from_bytes, unquote_to_bytes

from fastvid.errors import UsageError

if TYPE_CHECKING:
    from importlib.abc import InspectLoader
    from importlib.machinery import ModuleSpec

_DIGITS: Final = re.compile(r"([0-9]+)")
_RAW_NAME: Final = "bytes:"
_LISTED: Final = re.compile(r"^    from (\S+) import (\w+) as (\w+)$", re.MULTILINE)


VIDEO_SUFFIXES: Final = frozenset(
    {
        ".3g2", ".3gp", ".264", ".265", ".asf", ".avi", ".divx", ".dv", ".f4v", ".flv", ".gif", ".h264", ".h265",
        ".hevc", ".ivf", ".m1v", ".m2ts", ".m2v", ".m4s", ".m4v", ".mkv", ".mov", ".mp4", ".mpe", ".mpeg", ".mpg",
        ".mts", ".mxf", ".ogm", ".ogv", ".ts", ".vob", ".webm", ".wmv", ".y4m",
    }
)  # fmt: skip
"""File name suffixes of videos, in lower case."""

PICTURE_SUFFIXES: Final = frozenset({".jpeg", ".jpg", ".png"})
"""Suffixes of pictures that may be the frames of a video."""


def is_video(name: str) -> bool:
    """Return whether a file name has the suffix of a video."""
    return os.path.splitext(name)[1].lower() in VIDEO_SUFFIXES


def picture_order(names: Iterable[str]) -> list[str]:
    """Return the names of pictures, in the order of the numbers in them, which may have any length."""
    found = [name for name in names if os.path.splitext(name)[1].lower() in PICTURE_SUFFIXES]
    return sorted(found, key=lambda name: [_in_order(part) for part in _DIGITS.split(name)])


def _in_order(part: str) -> tuple[int, str]:
    number = part.lstrip("0")
    return len(number) if _DIGITS.match(part) else 0, number


def encode_name(name: str) -> str:
    """Return a file name as valid Unicode: unchanged if UTF-8, else ``bytes:`` and percent-encoding."""
    if name.isascii() and not name.startswith(_RAW_NAME):
        return name
    raw = os.fsencode(name)
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        return _RAW_NAME + quote_from_bytes(raw)
    return _RAW_NAME + quote_from_bytes(raw) if text.startswith(_RAW_NAME) else text


def decode_name(text: str) -> str:
    """Return the file name that `encode_name` encoded."""
    if text.startswith(_RAW_NAME):
        return os.fsdecode(unquote_to_bytes(text[len(_RAW_NAME) :]))
    return text


def import_name(setting: str, name: str) -> Any:
    """Import and return the object that a setting names as ``module:name``.

    `setting`: its dotted key, for messages. Exceptions of the imported module's own code, such as a failing import in
    it, are not caught.
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
                hint=meant(part, public) or f"define {path} in {module_name}, or correct the name",
            )
        found = getattr(found, part)
    return found


def check_keywords(setting: str, name: str, make: Any, given: Iterable[str], *, always: Collection[str] = ()) -> None:
    """Raise UsageError unless a callable accepts options as keyword arguments, and requires no further arguments.

    `setting` and `name`: of the options and of the callable, for messages. `given`: names of the options. `always`:
    names of the arguments that fastvid passes itself.
    """
    parameters = _parameters(make)
    if parameters is None:
        return
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    known = [p.name for p in named if p.name not in always]
    given = set(given)
    anything = any(p.kind is p.VAR_KEYWORD for p in parameters)
    for option in sorted(given - set(known)):
        if not anything or option in always:
            hint = f"use one of {', '.join(known)}" if known else "remove it: it has no options"
            raise UsageError(f"{setting}.{option}: {name!r} has no such option", hint=meant(option, known) or hint)
    missing = [p.name for p in named if p.default is p.empty and p.name not in {*given, *always}]
    if missing:
        raise UsageError(
            f"{name!r} requires {', '.join(missing)}", hint=f"set {', '.join(f'{setting}.{one}' for one in missing)}"
        )


def accepted(make: Any, names: Iterable[str]) -> set[str]:
    """Return the subset of `names` that a callable accepts as keyword arguments; all if that cannot be found out."""
    parameters = _parameters(make)
    if parameters is None or any(p.kind is p.VAR_KEYWORD for p in parameters):
        return set(names)
    return {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)} & set(names)


def first_argument(make: Any) -> list[str]:
    """Return a list with the name of a callable's first positional argument; empty without one, or if unknown."""
    return [p.name for p in _parameters(make) or () if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][:1]


def _parameters(make: Any) -> list[inspect.Parameter] | None:
    """Return the parameters of a callable; None if they are unknown, as for some functions written in C."""
    try:
        return list(inspect.signature(make).parameters.values())
    except (TypeError, ValueError):
        return None


def _module(setting: str, name: str, module_name: str) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # Only if the module named by the user is missing: a missing import inside it has its own clear error.
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        near = meant(module_name, [module.name for module in pkgutil.iter_modules()])
        raise UsageError(
            f"{setting} is {name!r}, but there is no module {module_name!r}",
            hint=" ".join([*([near] if near else []), "add the folder of the module to PYTHONPATH, or install it"]),
        ) from error


def meant(name: str, known: Iterable[str]) -> str | None:
    """Return "did you mean X?" with the known name that is most similar to `name`; None if none is. Case is ignored."""
    names = {one.lower(): one for one in known}
    near = difflib.get_close_matches(name.lower(), names, n=1)
    return f"did you mean {names[near[0]]}?" if near else None


def listed_names(spec: ModuleSpec) -> dict[str, str]:
    """Return the public names of a package, each with its module, or ``module:name`` if the name differs there.

    They are read from the lines ``from module import name as name`` below ``if TYPE_CHECKING:`` in the package's
    source, so that this list, which type checkers need, is the only one.
    """
    source = cast("InspectLoader", spec.loader).get_source(spec.name) or ""
    found = {public: (module, name) for module, name, public in _LISTED.findall(source)}
    return {public: module if name == public else f"{module}:{name}" for public, (module, name) in found.items()}


def importer(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a ``__getattr__`` for a package, which imports a public name on first use and caches it.

    `homes`: from `listed_names`.
    """

    def get(name: str) -> Any:
        if name not in homes:
            near = meant(name, homes)
            raise AttributeError(f"module {package!r} has no attribute {name!r}{f': {near}' if near else ''}")
        from fastvid.errors import naming_extras

        module, _, there = homes[name].partition(":")
        with naming_extras():
            value = getattr(importlib.import_module(module), there or name)
        setattr(sys.modules[package], name, value)
        return value

    return get


def parse(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.Namespace:
    """Parse a command line, whose options may be anywhere among the arguments; on an error, exit with code 2.

    Words after ``--`` are arguments, not options. In a command line with ``--``, options may not be between arguments.
    """
    if parser.usage is None:
        # parse_intermixed_args stores the usage unescaped, and --help would fail at a "%" in it.
        parser.usage = parser.format_usage().removeprefix("usage: ").replace("%", "%%")
    # Python 3.11's parse_intermixed_args treats words after "--" as options.
    return parser.parse_args(words) if "--" in words else parser.parse_intermixed_args(words)
