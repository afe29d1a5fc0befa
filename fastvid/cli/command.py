"""Make a command from a function, and read and write the files that options name.

The function's parameters become arguments and options, and its docstring becomes their help.

Positional parameters become arguments, and keyword-only ones become options. A parameter whose type is a dataclass
becomes an option for each field. ``**options`` become options for those parameters of another function, see `forwards`,
that the docstring describes. The first part of the docstring describes the command; its section ``Args``, or
``Attributes`` of a dataclass, describes each option as ``name (METAVAR): help``. A flag such as ``-o`` before the
metavar is a second name of the option. ``{NAME}`` refers to the list NAME in the function's module: as a metavar it
becomes the choices, in a text their names.
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import StrEnum
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Final, Literal, NamedTuple, NoReturn, TypeVar

from fastvid.errors import UsageError
from fastvid.runtime.names import meant

_SECTION: Final = re.compile(r"^(?:Args|Attributes):$", re.MULTILINE)
_ENTRY: Final = re.compile(r"^ {4}(\w+)(?: \(([^)]*)\))?: (.*(?:\n {5,}.*)*)", re.MULTILINE)

_LIST: Final = re.compile(r"\{(\w+)\}")

F = TypeVar("F", bound=Callable[..., int])


class _Text(NamedTuple):
    """The description of an option in a docstring."""

    flag: str  # a second name such as -o; empty for none
    metavar: str
    choices: list[str]
    help: str


@dataclass(frozen=True)
class _Option:
    """A parameter of a command, or a field of one of its groups."""

    name: str
    kind: Any  # type without None
    default: Any  # MISSING if it must be given
    is_positional: bool
    text: _Text

    @property
    def words(self) -> list[str]:
        """The option's names on the command line."""
        if self.is_positional:
            return [self.name]
        return [*filter(None, [self.text.flag]), "--" + self.name.rstrip("_").replace("_", "-")]


def exclusive(*names: str, required: bool = False) -> Callable[[F], F]:
    """Declare that at most one of these options may be given, or exactly one if `required`."""
    return _marked("exclusive", (names, required))


def forwards(target: Callable[..., Any]) -> Callable[[F], F]:
    """Add parameters of `target`, to which the command passes them, as options: those that its docstring describes."""
    return _marked("forwards", target)


def _marked(name: str, value: Any) -> Callable[[F], F]:
    def mark(function: F) -> F:
        vars(function)[name] = value
        return function

    return mark


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Raise UsageError, because argparse would print all options before its message."""
        words = message.removeprefix("unrecognized arguments: ").split()
        options = (one for action in self._actions for one in action.option_strings)
        near = meant(words[0], options) if words[0].startswith("-") else None
        raise UsageError(message, hint=" ".join(filter(None, (near, f"`{self.prog} --help` lists the options"))))


def parser_of(name: str, function: Callable[..., int]) -> argparse.ArgumentParser:
    """Return the parser of a command."""
    about = _SECTION.split(inspect.getdoc(function) or "")[0].strip()
    parser = _Parser(prog=f"fastvid {name}", description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    names, required = vars(function).get("exclusive", ((), False))
    group = parser.add_mutually_exclusive_group(required=required) if names else parser
    for option in _options(function):
        _add(group if option.name in names else parser, option)
    return parser


def call(function: Callable[..., int], args: argparse.Namespace) -> int:
    """Call a command with the parsed arguments, and return its exit code."""
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in vars(args).items()}
    bound, hints = inspect.signature(function).bind_partial(), typing.get_type_hints(function)
    for name, parameter in bound.signature.parameters.items():
        kind = hints[name]
        if is_dataclass(kind):
            group = {field.name: given[field.name] for field in fields(kind)}
            bound.arguments[name] = typing.cast(Any, kind)(**group)
        elif parameter.kind is parameter.VAR_KEYWORD:
            bound.arguments[name] = {option.name: given[option.name] for option in _forwarded(function)}
        else:
            bound.arguments[name] = given[name]
    return function(*bound.args, **bound.kwargs)


def _options(function: Callable[..., int]) -> Iterator[_Option]:
    hints, texts = typing.get_type_hints(function), _texts(function)
    for name, parameter in inspect.signature(function).parameters.items():
        kind = hints[name]
        if is_dataclass(kind):
            types, about = typing.get_type_hints(kind), _texts(kind)
            for field in fields(kind):
                yield _option(field.name, types[field.name], field.default, False, about)
        elif parameter.kind is parameter.VAR_KEYWORD:
            yield from _forwarded(function)
        else:
            default = MISSING if parameter.default is parameter.empty else parameter.default
            if parameter.kind is parameter.VAR_POSITIONAL:
                kind, default = tuple[kind, ...], ()  # type: ignore[valid-type]
            yield _option(name, kind, default, parameter.kind is not parameter.KEYWORD_ONLY, texts)


def _forwarded(function: Callable[..., int]) -> Iterator[_Option]:
    target, own, texts = vars(function)["forwards"], inspect.signature(function).parameters, _texts(function)
    hints = typing.get_type_hints(target)
    for name, parameter in inspect.signature(target).parameters.items():
        if name in texts and name not in own:
            yield _option(name, hints[name], parameter.default, False, texts)


def _option(name: str, kind: Any, default: Any, positional: bool, texts: Mapping[str, _Text]) -> _Option:
    if typing.get_origin(kind) in (UnionType, typing.Union):
        kind = next(part for part in typing.get_args(kind) if part is not NoneType)
    return _Option(name, kind, default, positional, texts[name])


def _texts(owner: Any) -> dict[str, _Text]:
    """Return the description of each option in the docstring of a function or dataclass, by parameter name."""
    lists = vars(sys.modules[owner.__module__])
    sections = _SECTION.split(inspect.getdoc(owner) or "")
    found = {}
    for name, head, body in _ENTRY.findall(sections[-1] if len(sections) > 1 else ""):
        words = head.split()
        flag = words.pop(0) if words and words[0].startswith("-") else ""
        metavar, choices = " ".join(words), []
        if match := _LIST.fullmatch(metavar):
            metavar, choices = "", [str(choice) for choice in lists[match[1]]]
        line = " ".join(body.split()).removesuffix(".")
        line = _LIST.sub(lambda match: ", ".join(map(str, lists[match[1]])), line)
        found[name] = _Text(
            flag, metavar, choices, line[:1].lower() + line[1:] if line[1:2].islower() or line[1:2] == " " else line
        )
    return found


def _add(parser: argparse._ActionsContainer, option: _Option) -> None:
    kind, default = option.kind, option.default
    keywords: dict[str, Any] = {"help": _help(option)}
    if not option.is_positional:
        keywords |= {"dest": option.name, "required": default is MISSING}
    if default is not MISSING:
        keywords["default"] = default
    if kind is bool:
        parser.add_argument(*option.words, action="store_true", **keywords)
        return
    if option.text.metavar:
        keywords["metavar"] = option.text.metavar
    origin = typing.get_origin(kind)
    if origin in (tuple, list):
        # An option of type tuple may be repeated; one of type list takes several words.
        kind = typing.get_args(kind)[0]
        if option.is_positional or origin is list:
            keywords["nargs"] = "*" if option.is_positional and default == () else "+"
        else:
            keywords |= {"action": "append", "default": list(default)}
    elif option.is_positional and default is not MISSING:
        keywords["nargs"] = "?"
    if option.text.choices:
        keywords |= {"choices": option.text.choices}
    elif typing.get_origin(kind) is Literal:
        keywords |= {"choices": typing.get_args(kind), "type": str}
    elif issubclass(kind, StrEnum):
        keywords |= {"choices": list(kind), "type": kind}
    else:
        keywords["type"] = kind
    parser.add_argument(*option.words, **keywords)


def _help(option: _Option) -> str:
    text, default = option.text.help.replace("%", "%%"), option.default
    is_said = any(default is nothing for nothing in (MISSING, None, False, ())) or "default" in text
    plain = f"{default:g}" if isinstance(default, float) else default
    return text if is_said else f"{text} (default: {plain})"


def read_text(name: str, what: str) -> str:
    """Return the text of a file that an option names, or of stdin for ``-``."""
    try:
        return sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        hint = "name a text file in UTF-8, or - for stdin"
        raise UsageError(f"{what} cannot be read: {error}", file=name, hint=hint) from error


def read_lines(name: str | None, what: str) -> list[str]:
    """Return the lines of a file of keys or sources, or of stdin for ``-``; an empty list without one."""
    lines = [] if name is None else read_text(name, what).splitlines()
    return [line.strip() for line in lines if line.strip()]


def write_file(name: str, data: bytes | str, what: str) -> None:
    """Write a file that an option names."""
    try:
        Path(name).write_bytes(data.encode() if isinstance(data, str) else data)
    except OSError as error:
        raise UsageError(
            f"{what} cannot be written: {error.strerror}", file=name, hint="choose a path that you can write"
        ) from error
