"""Rows of annotations, the order of their classes, and what a row cannot contain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from fastvid.errors import UsageError

MAX_LABEL: Final = 999_999
"""Largest integer label; all up to the largest one are classes."""
RESERVED: Final = "__"
"""How the columns begin that fastvid computes when it reads annotations."""


@dataclass(frozen=True, slots=True)
class AnnotationRow:
    """One line of an annotation file.

    Attributes:
        name: The video's name in the annotation file: a path, or a file name without folder and suffix.
        label: Name of its class; None if there is none.
        columns: Its other columns.
        start: Start of the clip in seconds; None for the start of the file.
        end: End of the clip in seconds; None for the end of the file.
        whole_name: Name of the uncut video that `start` and `end` refer to, if `name` is the name of a trimmed file.
    """

    name: str
    label: str | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)
    start: float | None = None
    end: float | None = None
    whole_name: str | None = None


@dataclass(frozen=True, slots=True)
class Annotations:
    """The rows of annotation files, and class names ordered by label."""

    rows: tuple[AnnotationRow, ...]
    classes: tuple[str, ...]


def class_order(rows: Sequence[AnnotationRow], first: int = 1) -> tuple[str, ...]:
    """Return classes in label order: integers up to the largest one, or sorted names.

    Args:
        rows: The rows.
        first: Line of the first row.

    Raises:
        UsageError: If an integer is too large to be a label.
    """
    found = {row.label for row in rows if row.label is not None}
    if not found or not all(label.isdecimal() and label.isascii() for label in found):
        return tuple(sorted(found))
    for number, row in enumerate(rows, first):
        if row.label is not None and (len(row.label) > len(str(MAX_LABEL)) or int(row.label) > MAX_LABEL):
            raise UsageError(f"label {row.label} is larger than {MAX_LABEL}", row=number, hint="number classes from 0")
    return tuple(str(number) for number in range(max(map(int, found)) + 1))


def check_rows(rows: Sequence[AnnotationRow], first: int) -> None:
    """Raise a UsageError for the first row with a value that cannot be stored."""
    for number, row in enumerate(rows, first):
        for name, value in (("label", row.label), *row.columns.items()):
            if name.startswith(RESERVED):
                raise UsageError(
                    f"column {name!r} has a reserved name", hint=f"rename it: names with {RESERVED} are ours"
                )
            for text in (name, *(value if isinstance(value, list) else [value])):
                if isinstance(text, str) and not _is_unicode(text):
                    raise UsageError(
                        f"column {name!r} is not UTF-8: {text!r}", row=number, hint="save the file as UTF-8"
                    )


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
