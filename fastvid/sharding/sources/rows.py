"""Rows of annotations, the order of their classes, and what a row cannot contain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from fastvid.errors import UsageError
from fastvid.sharding.sources.columns import as_list

MAX_LABEL: Final = 999_999
"""Largest integer label; all up to the largest one are classes."""
LABELS: Final = "labels"
"""The column with several class names per video; `MultiHot` reads it."""
RESERVED: Final = "__"
"""How the columns begin that fastvid computes when it reads annotations."""


@dataclass(frozen=True, slots=True)
class AnnotationRow:
    """One line of an annotation file.

    Several labels are a list of class names in the column ``labels``.
    """

    name: str
    label: str | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)
    start: float | None = None  # start of the clip in seconds; None for the start of the file
    end: float | None = None  # end of the clip in seconds; None for the end of the file
    whole_name: str | None = None
    number: int = field(default=0, compare=False)  # line or row of the file, from 1; 0 if unknown

    @property
    def class_names(self) -> tuple[str, ...]:
        """Its label and labels."""
        return class_names(self.label, self.columns)

    @property
    def where(self) -> dict[str, Any]:
        """Where it is in its file, for errors."""
        return {"row": self.number} if self.number else {}


@dataclass(frozen=True, slots=True)
class Annotations:
    """The rows of annotation files, and class names ordered by label."""

    rows: tuple[AnnotationRow, ...]
    classes: tuple[str, ...]


def class_names(label: str | None, columns: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the classes of a video: its label, and those in the column ``labels``."""
    return (*(() if label is None else (label,)), *(columns.get(LABELS) or ()))


def label_list(value: Any) -> list[str] | None:
    """Return several labels as a list of class names, each once; None if there is no value."""
    if value is None or (isinstance(value, str) and not value.strip()):
        return None
    found = as_list(value)
    if found is None and isinstance(value, str):
        found = [part.strip() for part in value.split(";") if part.strip()]
    elif found is None and isinstance(value, int) and not isinstance(value, bool):
        found = [value]
    if found is None or not all(isinstance(part, str | int) and not isinstance(part, bool) for part in found):
        raise UsageError(
            f"labels are {value!r}", column=LABELS, hint='give a list of class names, or text such as "jump;run"'
        )
    return list(dict.fromkeys(map(str, found)))


def class_order(rows: Sequence[AnnotationRow]) -> tuple[str, ...]:
    """Return the classes of all rows in label order: integers up to the largest one, or sorted names."""
    found = {name for row in rows for name in row.class_names}
    if not found or not all(name.isdecimal() and name.isascii() for name in found):
        return tuple(sorted(found))
    for row in rows:
        for name in row.class_names:
            if len(name) > len(str(MAX_LABEL)) or int(name) > MAX_LABEL:
                raise UsageError(f"label {name} is larger than {MAX_LABEL}", hint="number classes from 0", **row.where)
    return tuple(str(number) for number in range(max(map(int, found)) + 1))


def check_rows(rows: Sequence[AnnotationRow]) -> None:
    """Raise a UsageError for the first row with a value that cannot be stored."""
    for row in rows:
        for name, value in (("label", row.label), *row.columns.items()):
            if name.startswith(RESERVED):
                raise UsageError(
                    f"column {name!r} has a reserved name", hint=f"rename it: names with {RESERVED} are ours"
                )
            for text in (name, *(value if isinstance(value, list) else [value])):
                if isinstance(text, str) and not _is_unicode(text):
                    raise UsageError(
                        f"column {name!r} is not UTF-8: {text!r}", hint="save the file as UTF-8", **row.where
                    )


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
