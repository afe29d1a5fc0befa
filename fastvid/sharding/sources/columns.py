"""Map the columns of any table to those of fastvid, and make one row of each segment of a video."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from fastvid.errors import UsageError

Record = dict[str, Any]
"""A row of a table by column; values may be nested."""
NumberedRecord = tuple[int, Record]
"""Number of a row in its file, from 1, and the row."""

ENTRY: Final = "entry"
"""Column with the name of an object inside a JSON object; the path, if no column is."""
SEGMENTS: Final = "segments"
"""Column with a list of segments: [start, end], or objects with start and end, or with segment = [start, end]."""
# Columns that have one value per segment, if a row has several segments. Columns that a mapping names have too.
_PER_SEGMENT: Final = ("start", "end", "caption", "label")
_WHOLE: Final = frozenset({"path", "key"})
_MISSING: Final = object()


@dataclass(frozen=True, slots=True)
class Columns:
    """Names for the columns of a table."""

    sources: Mapping[str, str] = field(default_factory=dict)
    optional: frozenset[str] = frozenset()

    @classmethod
    def parse(cls, text: str | Mapping[str, str] | None) -> Columns:
        """Parse ``path=videoid,start=t0``; a mapping is taken as it is."""
        if not isinstance(text, str):
            return cls(dict(text or {}))
        sources: dict[str, str] = {}
        for item in text.split(","):
            name, equals, source = (part.strip() for part in item.partition("="))
            if not name or not equals or not source:
                raise UsageError(
                    f"invalid column {item!r} in {text!r}", hint="use NAME=COLUMN, such as path=videoid,caption=text"
                )
            if name in sources:
                raise UsageError(f"column {name!r} is named twice in {text!r}", hint="name each column once")
            sources[name] = source
        return cls(sources)

    def source_of(self, name: str) -> str:
        """Return the table's column for one of our names."""
        return self.sources.get(name, name)

    def rows(self, records: Sequence[NumberedRecord]) -> list[NumberedRecord]:
        """Return one row for each segment of each record, with renamed columns; other columns keep their names.

        A record has segments if its column ``segments`` is a list, or ``start`` or ``end`` are. Then start, end,
        caption, label and every column of this mapping may be lists too, with one value per segment; ``labels`` is one
        if it is a list of lists. All other columns are repeated. A list as text, as in a CSV, counts as a list. The
        fields of segments that are objects become columns, which may be renamed as well.
        """
        made, missing = self._renamed(records, self.sources)
        made = [(number, row) for number, record in made for row in self._segments(number, record)]
        made, missing = self._renamed(made, missing)
        absent = next((name for name in missing if name not in self.optional), None)
        if absent is not None and made:
            known = ", ".join(map(str, dict.fromkeys(name for _, row in made[:100] for name in row)))
            raise UsageError(f"table has no column {missing[absent]!r}", hint=f"name one of its columns {known}")
        return made

    def _renamed(
        self, records: Sequence[NumberedRecord], sources: Mapping[str, str]
    ) -> tuple[list[NumberedRecord], dict[str, str]]:
        """Return the records with renamed columns, and the names that no record has a column for."""
        found: set[str] = set()
        made = []
        for number, record in records if sources else ():
            values = {name: _reach(record, source) for name, source in sources.items()}
            values = {name: value for name, value in values.items() if value is not _MISSING}
            replaced = {sources[name] for name in values}
            row = {name: value for name, value in record.items() if name not in replaced}
            if taken := next((name for name in values if name in row), None):
                raise UsageError(
                    f"column {taken!r} exists, and {sources[taken]!r} cannot take its name",
                    row=number,
                    hint=f"rename it too: {taken}={sources[taken]},old_{taken}={taken}",
                )
            found |= values.keys()
            made.append((number, row | values))
        left = {name: source for name, source in sources.items() if name not in found}
        return made if sources else list(records), left

    def _segments(self, number: int, record: Record) -> Iterator[Record]:
        given = as_list(record.get(SEGMENTS))
        if given is None and not any(as_list(record.get(name)) is not None for name in ("start", "end")):
            yield record
            return
        lists: dict[str, list[Any]] = {}
        if given is not None:
            lists[SEGMENTS] = given
        for name in dict.fromkeys((*_PER_SEGMENT, *self.sources)):
            values = None if name in _WHOLE or name in lists else as_list(record.get(name))
            if values is not None and (name != "labels" or any(isinstance(value, list) for value in values)):
                lists[name] = values
        lengths = {name: len(values) for name, values in lists.items()}
        if len(set(lengths.values())) > 1:
            shown = ", ".join(f"{name} {length}" for name, length in lengths.items())
            raise UsageError(
                f"lists of one row have different lengths: {shown}",
                row=number,
                hint="give each segment one value in every list",
            )
        fixed = {name: value for name, value in record.items() if name not in lists}
        for items in zip(*lists.values(), strict=True):
            segment = dict(zip(lists, items, strict=True))
            place = _place(segment.pop(SEGMENTS), number) if given is not None else {}
            named = {name if name not in record else f"segment_{name}": value for name, value in place.items()}
            yield {**fixed, **segment, **named}


def as_list(value: Any) -> list[Any] | None:
    """Return a list, also if it is text as JSON or Python write it; None for anything else."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = _parsed(value)
    return list(value) if isinstance(value, list | tuple) else None


def _parsed(text: str) -> Any:
    """Return the value that a text is in JSON, or as Python prints it; the text itself if it is neither."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return text


def _reach(value: Any, path: str) -> Any:
    """Return the value at a dotted path, of each item of a list; `_MISSING` if there is none."""
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        value = _parsed(value)
    if isinstance(value, list | tuple):
        found = [_reach(part, path) for part in value]
        if found and all(part is _MISSING for part in found):
            return _MISSING
        return [None if part is _MISSING else part for part in found]
    if not isinstance(value, Mapping):
        return _MISSING
    if path in value:
        return value[path]
    head, dot, rest = path.partition(".")
    return _reach(value[head], rest) if dot and head in value else _MISSING


def _place(segment: Any, number: int) -> Record:
    """Return the columns of one item of a list of segments."""
    if isinstance(segment, Mapping):
        columns = {str(name): value for name, value in segment.items()}
        if "start" in columns or "end" in columns:
            return columns
        pair = as_list(columns.pop("segment", None))
    else:
        columns, pair = {}, as_list(segment)
    if pair is None or len(pair) != 2:
        raise UsageError(
            f"{segment!r} is no segment", row=number, hint="give [start, end], or an object with start and end"
        )
    return columns | {"start": pair[0], "end": pair[1]}
