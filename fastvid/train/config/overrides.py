"""``key=value`` on the command line: dotted keys into a configuration, values read by the field's type.

Every key is checked against what exists, and the changed configuration is built once, from all overrides together, so
that two values that only fit each other can be given at once.
"""

from __future__ import annotations

import ast
import difflib
import math
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from fastvid.errors import UsageError
from fastvid.runtime.checks import check_choice

Root = TypeVar("Root")
Tree = dict[str, "Tree | str"]

_BOOLS = {"true": True, "false": False}
_NONE = "none"


def apply(config: Root, overrides: Sequence[str]) -> Root:
    """A configuration with some values changed.

    Args:
        config: A frozen dataclass of dataclasses, mappings and values.
        overrides: ``key=value`` each; the key is dotted, such as ``optim.base_lr=0.02``. Tuples are written with
            commas, and ``none`` is None where the field allows it. Entries of a mapping may be new; fields may not.

    Raises:
        UsageError: A key is unknown or given twice, or a value does not fit its type.
    """
    tree: Tree = {}
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise UsageError(f"{text!r} is not key=value")
        _plant(tree, key, value)
    return _rebuilt(config, tree, "")  # type: ignore[no-any-return]


def keys(config: object, prefix: str = "") -> list[str]:
    """The dotted keys that `apply` accepts, in the order of the fields."""
    found: list[str] = []
    if not is_dataclass(config):
        return found
    for item in fields(config):
        value, key = getattr(config, item.name), f"{prefix}{item.name}"
        if is_dataclass(value):
            found += keys(value, f"{key}.")
        elif isinstance(value, Mapping):
            found += [f"{key}.{name}" for name in value]
        else:
            found.append(key)
    return found


def parse(text: str, kind: Any, key: str) -> Any:
    """A value of a type from text.

    Args:
        text: What was typed.
        kind: bool, int, float, str, a Literal, ``X | None`` or ``tuple[X, ...]``.
        key: For the message.

    Raises:
        UsageError: The text is no such value, or the type has no spelling on the command line.
    """
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        if type(None) in arguments and text.lower() == _NONE:
            return None
        (inner, *others) = [argument for argument in arguments if argument is not type(None)]
        return _refuse(key) if others else parse(text, inner, key)
    if origin is Literal:
        check_choice(key, text, arguments)
        return text
    if origin is tuple and arguments[1:] == (...,):
        return tuple(parse(part.strip(), arguments[0], key) for part in text.split(",") if part.strip())
    if kind is str:
        return text
    if kind is bool:
        if text.lower() not in _BOOLS:
            raise UsageError(f"{key} is {text!r}, expected true or false")
        return _BOOLS[text.lower()]
    if kind in (int, float):
        try:
            number = kind(text)
        except ValueError:
            number = math.nan
        if math.isnan(number):
            raise UsageError(f"{key} is {text!r}, expected {'a whole number' if kind is int else 'a number'}")
        return number
    return _refuse(key)


def _plant(tree: Tree, key: str, value: str) -> None:
    *path, leaf = key.split(".")
    branch = tree
    for name in path:
        inner = branch.setdefault(name, {})
        if isinstance(inner, str):
            raise UsageError(f"{key!r} lies inside a key that is given a value as well")
        branch = inner
    if leaf in branch:
        raise UsageError(f"{key!r} is given twice")
    branch[leaf] = value


def _rebuilt(config: Any, tree: Tree, prefix: str) -> Any:
    hints = get_type_hints(type(config))
    known = {item.name for item in fields(config) if item.init}
    changes: dict[str, Any] = {}
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if name not in known:
            raise _unknown(config, prefix, name)
        current = getattr(config, name)
        if is_dataclass(current) or isinstance(current, Mapping):
            if isinstance(value, str):
                inside = keys(current, f"{key}.") if is_dataclass(current) else [f"{key}.NAME"]
                raise UsageError(f"{key} holds several values", hint=f"set one of {', '.join(inside)}")
            build: Callable[[Any, Tree, str], Any] = _rebuilt if is_dataclass(current) else _merged
            changes[name] = build(current, value, f"{key}.")
        elif isinstance(value, str):
            changes[name] = parse(value, hints[name], key)
        else:
            raise UsageError(f"{key} is one value and has no {next(iter(value))!r} inside")
    return replace(config, **changes)


def _merged(current: Mapping[str, Any], tree: Tree, prefix: str) -> dict[str, Any]:
    merged = dict(current)
    for name, value in tree.items():
        if not isinstance(value, str):
            raise UsageError(f"{prefix}{name} is one value and has no {next(iter(value))!r} inside")
        merged[name] = _scalar(value)
    return merged


def _scalar(text: str) -> Any:
    """A value whose type nobody declares: true, false, none, a number, or text."""
    if text.lower() in _BOOLS:
        return _BOOLS[text.lower()]
    if text.lower() == _NONE:
        return None
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
    return value if isinstance(value, (int, float)) else text


def _unknown(config: Any, prefix: str, name: str) -> UsageError:
    here = keys(config, prefix)
    near = difflib.get_close_matches(f"{prefix}{name}", here, n=1)
    hint = f"did you mean {near[0]}? known are {', '.join(here)}" if near else f"known are {', '.join(here)}"
    return UsageError(f"{prefix}{name} is not a setting", hint=hint)


def _refuse(key: str) -> Any:
    raise UsageError(f"{key} cannot be set on the command line", hint="set it in the recipe, which is a Python file")
