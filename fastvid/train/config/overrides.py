"""``key=value`` overrides on the command line: dotted keys, values parsed by the type of the field.

Every key must exist. The new configuration is built once, from all overrides together, so that values that are only
valid together can be set together.

The first functions check values in a section of the configuration (such as `DataConfig`); their messages name the
dotted key (``data.path``).
"""

from __future__ import annotations

import ast
import difflib
import math
import types
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass, replace
from typing import Any, Final, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

from fastvid.errors import UsageError
from fastvid.runtime.values import EXPECTED, as_type, check_choice, check_fields, check_least


def _section(config: object) -> str:
    return type(config).__name__.removesuffix("Config").lower()


def at_least(least: float, config: Any, *names: str) -> None:
    """Check that values of a section are at least `least`; None passes."""
    check_least(least, **{f"{_section(config)}.{name}": getattr(config, name) for name in names})


def check_kinds(config: Any) -> None:
    """Check that the values of a section have the types of its fields."""
    check_fields(_section(config), config)


def one_of_or_own(config: Any, name: str, allowed: Any, options: Mapping[str, Any], options_name: str) -> None:
    """Check that a value is one of a Literal's or ``module:name``, and that only the latter has options."""
    value, key = getattr(config, name), f"{_section(config)}.{name}"
    check_choice(key, value, get_args(allowed), "module:name")
    if options and ":" not in value:
        raise UsageError(
            f"{_section(config)}.{options_name} is set, but {key} is {value!r}",
            hint=f"set the other settings of {_section(config)}, or {key}=module:name",
        )


def each_of_or_own(config: Any, name: str, allowed: Any) -> None:
    """Check that each value of a tuple is one of a Literal's (None: none) or ``module:name``, without duplicates."""
    values, key = getattr(config, name), f"{_section(config)}.{name}"
    for value in values:
        check_choice(f"{key} has {{}}", value, get_args(allowed), "module:name")
        if values.count(value) > 1:
            raise UsageError(f"{key} has {value!r} more than once", hint="name it once")


Root = TypeVar("Root")
Tree = dict[str, "Tree | str"]

NAMED: Final = "named"
"""Key in a field's metadata. Its value is a function that returns a class, given the name that a user chose for it.

``key=NAME`` then creates an object of that class, with the values of ``key.OPTION=`` as its fields.
"""

_NONE = "none"
_OWN = ""  # in a tree, the entry with the key's own value, where keys inside it are given as well


def apply(config: Root, overrides: Sequence[str]) -> Root:
    """Return a configuration with some values changed."""
    tree: Tree = {}
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals or not all(key.split(".")):
            raise UsageError(f"{text!r} is not key=value")
        _insert(tree, key, value)
    return _changed(type(config), config, tree, "")  # type: ignore[no-any-return]


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


_PARSED: Final = (str, bool, int, float)


def parse(text: str, hint: Any, key: str) -> Any:
    """Parse a value of a type.

    `hint`: bool, int, float, str, a Literal, ``X | None``, ``int | str`` or ``tuple[X, ...]``.
    """
    kinds = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    if type(None) in kinds and text.lower() == _NONE:
        return None
    plain = [kind for kind in kinds if kind is not type(None) and not is_dataclass(kind)]
    if plain == [int, str]:
        return int(text) if text.isdecimal() else text
    kind, arguments = plain[0] if len(plain) == 1 else None, get_args(plain[0]) if plain else ()
    if get_origin(kind) is Literal:
        check_choice(key, text, arguments)
        return text
    if get_origin(kind) is tuple and arguments[1:] == (...,):
        return tuple(parse(part.strip(), arguments[0], key) for part in text.split(",") if part.strip())
    if kind not in _PARSED:
        raise UsageError(f"{key} cannot be set on the command line", hint="set it in the recipe, a Python file")
    try:
        value = as_type(text.lower() if kind is bool else text, kind, strict=False)
    except (msgspec.ValidationError, UnicodeError):
        value = math.nan
    if value != value:  # NaN
        raise UsageError(f"{key} is {text!r}, expected {EXPECTED[kind]}")
    return value


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


def _changed(kind: Any, current: Any, tree: Tree, prefix: str) -> Any:
    """Return a copy of the dataclass object `current` with changed values, or if it is None a new `kind`."""
    hints, known = get_type_hints(kind), {item.name: item for item in fields(kind) if item.init}
    changes: dict[str, Any] = {}
    for name, value in tree.items():
        if name == _OWN:
            continue
        if name not in known:
            raise _unknown(kind, current, prefix, name)
        now, find = getattr(current, name, None), known[name].metadata.get(NAMED)
        changes[name] = _value(hints[name], now, value, f"{prefix}{name}", find)
    if current is not None:
        return replace(current, **changes)
    required = (item.name for item in known.values() if item.default is item.default_factory is MISSING)
    if missing := [name for name in required if name not in changes]:
        raise UsageError(f"{prefix}{missing[0]} is not given", hint=f"set {prefix}{missing[0]}")
    return kind(**changes)


def _value(hint: Any, now: Any, value: Tree | str, key: str, find: Any = None) -> Any:
    """Return the new value of a field, or of a mapping's entry, whose type is `hint` and old value is `now`."""
    own, inside = (value, {}) if isinstance(value, str) else (value.get(_OWN), value)
    if find is not None and isinstance(own, str):
        return _changed(find(own), None, inside, f"{key}.")
    kinds = [kind for kind in (hint, *get_args(hint)) if is_dataclass(kind)]
    if isinstance(value, str):
        several = is_dataclass(now) or isinstance(now, Mapping) or kinds == [hint]
        if several and (kinds == [hint] or not kinds):  # otherwise it is replaced, such as by data.balance=none
            raise _several(now, hint, key)
        return _scalar(value) if hint is Any else parse(value, hint, key)
    if own is not None:
        other = next(name for name in value if name != _OWN)
        raise UsageError(f"{key}.{other} is inside a key that is also given a value")
    if isinstance(now, Mapping):
        *_, kind = get_args(hint) or (Any,)
        kind = kind if is_dataclass(kind) else Any
        return {**now, **{name: _value(kind, now.get(name), one, f"{key}.{name}") for name, one in value.items()}}
    if is_dataclass(now):
        return _changed(type(now), now, value, f"{key}.")
    if kinds:  # not set in the recipe: one with its defaults, such as data.balance.power=0.5
        return _changed(kinds[0], None, value, f"{key}.")
    raise UsageError(f"{key} is a single value and does not contain {next(iter(value))!r}")


def _several(now: Any, hint: Any, key: str) -> UsageError:
    inside = keys(now, f"{key}.") if is_dataclass(now) else [f"{key}.{name}" for name in _names(hint) or ["NAME"]]
    return UsageError(f"{key} contains several values", hint=f"set one of {', '.join(inside)}")


def _names(kind: Any) -> list[str]:
    return [item.name for item in fields(kind) if item.init] if is_dataclass(kind) else []


def _scalar(text: str) -> Any:
    """Parse a value without a declared type: true, false, none, a number, or else text."""
    known = {"true": True, "false": False, _NONE: None}
    if text.lower() in known:
        return known[text.lower()]
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
    return value if isinstance(value, (int, float)) else text


def _unknown(kind: Any, current: Any, prefix: str, name: str) -> UsageError:
    here = keys(current, prefix) if current is not None else [f"{prefix}{one}" for one in _names(kind)]
    here += [f"{prefix}{one}.NAME" for one in _names(kind) if getattr(current, one, None) == {}]
    key = f"{prefix}{name}"
    if not here:
        return UsageError(f"{key} is not a setting", hint="remove it: this part has no settings")
    leaves = {one.rpartition(".")[2]: one for one in reversed(here)}
    longer = sorted((leaf for leaf in leaves if name in leaf.split("_")), key=len)
    near = difflib.get_close_matches(name, leaves, n=1) or longer
    # At the top level the list of all settings would be too long to read.
    known = f"known are {', '.join(here)}" if prefix or not near else "`fastvid train RECIPE --show` lists all"
    hint = f"did you mean {leaves[near[0]]}? {known}" if near else known
    return UsageError(f"{key} is not a setting", hint=hint)
