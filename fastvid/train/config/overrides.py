"""``key=value`` overrides on the command line: dotted keys, values parsed by the type of the field.

Every key must exist. The new configuration is built once, from all overrides together, so that values that are only
valid together can be set together.

The functions before them check values of a section of the configuration; their messages name the dotted key.
"""

from __future__ import annotations

import ast
import difflib
import math
import types
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass, replace
from typing import Any, Final, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from fastvid.errors import UsageError
from fastvid.runtime.values import check_choice, check_least


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


Root = TypeVar("Root")
Tree = dict[str, "Tree | str"]

NAMED: Final = "named"
"""Key in the metadata of a field whose value is an object of a class that a user may name: how to find the class.

``key=NAME`` then makes a new object of that class, with the values of ``key.OPTION=`` as its fields.
"""

_BOOLS = {"true": True, "false": False}
_NONE = "none"
_OWN = ""  # the value of a key in a tree that also has keys inside it


def apply(config: Root, overrides: Sequence[str]) -> Root:
    """Return a configuration with some values changed."""
    tree: Tree = {}
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise UsageError(f"{text!r} is not key=value")
        _insert(tree, key, value)
    return _rebuilt(config, tree, "")  # type: ignore[no-any-return]


def keys(config: object, prefix: str = "") -> list[str]:
    """Return the dotted keys that `apply` accepts, in the order of the fields."""
    found: list[str] = []
    if not is_dataclass(config):
        return found
    for item in fields(config):
        value, key = getattr(config, item.name), f"{prefix}{item.name}"
        if is_dataclass(value):
            found += keys(value, f"{key}.")
        elif isinstance(value, Mapping):
            for name, inner in value.items():
                found += keys(inner, f"{key}.{name}.") if is_dataclass(inner) else [f"{key}.{name}"]
        else:
            found.append(key)
    return found


def parse(text: str, kind: Any, key: str) -> Any:
    """Parse a value of a type.

    `kind`: bool, int, float, str, a Literal, ``X | None``, ``int | str`` or ``tuple[X, ...]``.
    """
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        if type(None) in arguments and text.lower() == _NONE:
            return None
        inner = [argument for argument in arguments if argument is not type(None)]
        inner = [argument for argument in inner if not is_dataclass(argument)] or inner
        if inner == [int, str]:
            return int(text) if text.isdecimal() else text
        return _refuse(key) if inner[1:] else parse(text, inner[0], key)
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


def _insert(tree: Tree, key: str, value: str) -> None:
    *path, leaf = key.split(".")
    branch = tree
    for name in path:
        inner = branch.setdefault(name, {})
        if isinstance(inner, str):
            inner = branch[name] = {_OWN: inner}
        branch = inner
    known = branch.get(leaf)
    if isinstance(known, str) or (known is not None and _OWN in known):
        raise UsageError(f"{key!r} is given twice")
    if known is None:
        branch[leaf] = value
    else:
        known[_OWN] = value


def _rebuilt(config: Any, tree: Tree, prefix: str) -> Any:
    hints = get_type_hints(type(config))
    known = {item.name: item.metadata.get(NAMED) for item in fields(config) if item.init}
    changes: dict[str, Any] = {}
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if name not in known:
            raise _unknown(config, prefix, name)
        current, find = getattr(config, name), known[name]
        own = value if isinstance(value, str) else value.get(_OWN)
        if find is not None and isinstance(own, str):
            changes[name] = _made(find(own), {} if isinstance(value, str) else value, f"{key}.")
            continue
        if isinstance(value, dict) and own is not None:
            other = next(inner for inner in value if inner != _OWN)
            raise UsageError(f"{key}.{other} is inside a key that is also given a value")
        replaced = isinstance(value, str) and _dataclasses(hints[name])  # such as data.balance=none
        if not replaced and (is_dataclass(current) or isinstance(current, Mapping)):
            if isinstance(value, str):
                inside = keys(current, f"{key}.") if is_dataclass(current) else [f"{key}.NAME"]
                raise UsageError(f"{key} contains several values", hint=f"set one of {', '.join(inside)}")
            if is_dataclass(current):
                changes[name] = _rebuilt(current, value, f"{key}.")
            else:
                *_, kind = get_args(hints[name]) or (Any,)
                changes[name] = _merged(current, value, f"{key}.", kind)
        elif isinstance(value, str):
            changes[name] = parse(value, hints[name], key)
        elif kinds := _dataclasses(hints[name]):
            # Not set in the recipe: one with its defaults, such as data.balance.power=0.5.
            changes[name] = _rebuilt(kinds[0](), value, f"{key}.")
        else:
            raise UsageError(f"{key} is a single value and does not contain {next(iter(value))!r}")
    return replace(config, **changes)


def _made(kind: Any, tree: Tree, prefix: str) -> Any:
    """Return an object of a dataclass, with values for some of its fields."""
    hints, known = get_type_hints(kind), [item.name for item in fields(kind) if item.init]
    values = {}
    for name, value in tree.items():
        if name == _OWN:
            continue
        key = f"{prefix}{name}"
        if name not in known:
            raise _unknown_of([f"{prefix}{one}" for one in known], key)
        if not isinstance(value, str):
            raise UsageError(f"{key} is a single value and does not contain {next(iter(value))!r}")
        values[name] = parse(value, hints[name], key)
    required = (item.name for item in fields(kind) if item.init and item.default is item.default_factory is MISSING)
    if missing := [name for name in required if name not in values]:
        raise UsageError(f"{prefix}{missing[0]} is not given", hint=f"set {prefix}{missing[0]}")
    return kind(**values)


def _dataclasses(hint: Any) -> list[Any]:
    return [kind for kind in get_args(hint) if is_dataclass(kind)]


def _merged(current: Mapping[str, Any], tree: Tree, prefix: str, kind: Any) -> dict[str, Any]:
    """Return a mapping with some entries added or changed; dataclasses if `kind` is one, else values of any type."""
    merged = dict(current)
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if is_dataclass(kind):
            if isinstance(value, str) or _OWN in value:
                inside = [f"{key}.{item.name}" for item in fields(kind)]
                raise UsageError(f"{key} contains several values", hint=f"set one of {', '.join(inside)}")
            merged[name] = _rebuilt(merged[name], value, f"{key}.") if name in merged else _made(kind, value, f"{key}.")
        elif isinstance(value, str):
            merged[name] = _scalar(value)
        else:
            raise UsageError(f"{key} is a single value and does not contain {next(iter(value))!r}")
    return merged


def _scalar(text: str) -> Any:
    """Parse a value without a declared type: true, false, none, a number, or else text."""
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
    here += [f"{prefix}{item.name}.NAME" for item in fields(config) if getattr(config, item.name) == {}]
    return _unknown_of(here, f"{prefix}{name}")


def _unknown_of(here: Sequence[str], key: str) -> UsageError:
    leaves = {one.rpartition(".")[2]: one for one in reversed(here)}
    near = [leaves[leaf] for leaf in difflib.get_close_matches(key.rpartition(".")[2], leaves, n=1)]
    if not here:
        return UsageError(f"{key} is not a setting", hint="remove it, there are none here")
    hint = f"did you mean {near[0]}? known are {', '.join(here)}" if near else f"known are {', '.join(here)}"
    return UsageError(f"{key} is not a setting", hint=hint)


def _refuse(key: str) -> Any:
    raise UsageError(f"{key} cannot be set on the command line", hint="set it in the recipe, which is a Python file")
