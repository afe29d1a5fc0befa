"""Rows of annotations: reads tables with any columns, and checks what a row may contain.

A table (CSV with a header, JSON, JSON Lines or Parquet) is read as records with their row numbers, so that an error can
name the row. `Columns` maps any columns to those of fastvid, and makes one record of each segment of a video. Rows of
all formats become `AnnotationRow`.
"""

from __future__ import annotations

import ast
import csv
import datetime
import decimal
import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import PurePath
from typing import IO, Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from fastvid.errors import UsageError
from fastvid.format.schema import check_unpacked
from fastvid.sharding.sources.spool import Spool

Record = dict[str, Any]
"""A row of a table by column; values may be nested."""
NumberedRecord = tuple[int, Record]
"""Number of a row in its file, from 1, and the row."""

ENTRY: Final = "entry"
"""Column with the name of an object inside a JSON object; it is the path if there is no column ``path``."""
SEGMENTS: Final = "segments"
"""Column with a list of segments: [start, end], or objects with start and end, or with segment = [start, end]."""
# Columns with one value per segment, if a row has several segments. So have all columns that a mapping names.
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
        """Return the table's column for one of fastvid's names."""
        return self.sources.get(name, name)

    def rows(self, records: Iterable[NumberedRecord]) -> Sequence[NumberedRecord]:
        """Return one row for each segment of each record, with renamed columns; other columns keep their names.

        A record has segments if its column ``segments``, ``start`` or ``end`` is a list. Then start, end, caption,
        label and every column of this mapping may be lists too, with one value per segment; ``labels`` has one value
        per segment if it is a list of lists. All other columns are repeated. A list as text, as in a CSV, counts as a
        list. The fields of segments that are objects become columns, which may be renamed as well.
        """
        made, missing = self._renamed(records, self.sources)
        made = ((number, row) for number, record in made for row in self._segments(number, record))
        made, missing = self._renamed(made, missing)
        rows = made if isinstance(made, Spool) else Spool(made)
        absent = next((name for name in missing if name not in self.optional), None)
        if absent is not None and rows:
            known = ", ".join(dict.fromkeys(str(self.source_of(name)) for _, row in rows[:100] for name in row))
            raise UsageError(f"table has no column {missing[absent]!r}", hint=f"name one of its columns {known}")
        return rows

    def _renamed(
        self, records: Iterable[NumberedRecord], sources: Mapping[str, str]
    ) -> tuple[Iterable[NumberedRecord], dict[str, str]]:
        """Return the records with renamed columns; and of `sources`, the names whose column no record has."""
        found: set[str] = set()

        def rename() -> Iterator[NumberedRecord]:
            for number, record in records:
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
                found.update(values)
                yield number, row | values

        made = Spool(rename()) if sources else records
        return made, {name: source for name, source in sources.items() if name not in found}

    def _segments(self, number: int, record: Record) -> Iterator[Record]:
        given = as_list(record.get(SEGMENTS))
        if given is None and not any(as_list(record.get(name)) is not None for name in ("start", "end")):
            yield record
            return
        lists: dict[str, list[Any]] = {} if given is None else {SEGMENTS: given}
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
        ends = {"start", "end", self.source_of("start"), self.source_of("end")}
        for items in zip(*lists.values(), strict=True):
            segment = dict(zip(lists, items, strict=True))
            place = _place(segment.pop(SEGMENTS), number, ends) if given is not None else {}
            named = {name if name not in record else f"segment_{name}": value for name, value in place.items()}
            yield {**fixed, **segment, **named}


def as_list(value: Any) -> list[Any] | None:
    """Return a list, also if it is text as JSON or Python write it; None for anything else."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = _parsed(value)
    return list(value) if isinstance(value, list | tuple) else None


def _parsed(text: str) -> Any:
    """Return the value of a text that is JSON or a Python literal; the text itself if it is neither."""
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


def _place(segment: Any, number: int, ends: Collection[str]) -> Record:
    """Return the columns of one item of a list of segments; `ends`: the table's names for its start and end."""
    if isinstance(segment, Mapping):
        columns = {str(name): value for name, value in segment.items()}
        if any(name in columns for name in ends):
            return columns
        pair = as_list(columns.pop("segment", None))
    else:
        columns, pair = {}, as_list(segment)
    if pair is None or len(pair) != 2:
        raise UsageError(f"{segment!r} is no segment", row=number, hint="give [start, end], or name both by --columns")
    return columns | {"start": pair[0], "end": pair[1]}


FIRST_ROW: Final = 2
"""Number of the line with a CSV's first row; the header is line 1."""

# Patterns of numbers as JSON writes them. Text such as 0022, 1_000 or nan is no number.
_INTEGER: Final = re.compile(r"-?(0|[1-9][0-9]{0,18})")
_NUMBER: Final = re.compile(r"-?(0|[1-9][0-9]*)?(\.[0-9]*)?([eE][+-]?[0-9]+)?")
_INT64: Final = 1 << 63
_CLOCK: Final = re.compile(r"(?:(\d+):)?(\d+):([0-5]?\d(?:\.\d*)?)", re.ASCII)


def read_text_rows(text: Iterable[str], *, whole: bool = False) -> Iterable[dict[str, str]]:
    """Read the rows of a CSV, given by line; fields missing at the end of a row are empty, or an error if `whole`."""
    reader = csv.reader(text)
    try:
        lines = Spool((reader.line_num, fields) for fields in reader if fields)
    except csv.Error as error:
        raise UsageError(
            f"CSV does not parse: {error}", row=reader.line_num, hint="check the quotes of its fields"
        ) from error
    header = lines[0][1] if lines else []
    if double := next((name for name in header if header.count(name) > 1), None):
        raise UsageError(f"duplicate column {double!r}", row=1, hint="rename or delete one of the columns")
    for number, fields in lines:
        if len(fields) > len(header) or (whole and len(fields) < len(header)):
            few = "more" if len(fields) > len(header) else "fewer"
            raise UsageError(f"row has {few} fields than the header", row=number, hint="quote fields with a comma")
    return Spool(dict(zip_longest(header, fields, fillvalue="")) for _, fields in lines[1:])


def read_rows(text: Iterable[str], *, text_columns: Collection[str], whole: bool = False) -> Iterator[dict[str, Any]]:
    """Yield the rows of a CSV, see `read_text_rows`.

    A column is of integers, else of numbers, else of text, by all its fields; empty fields become None.
    """
    rows, kinds = read_text_rows(text, whole=whole), dict[str, list[Callable[[str], Any]]]()
    for row in rows:
        for name, value in row.items():
            left = kinds.setdefault(name, [] if name in text_columns else list(_KINDS))
            if left and value:
                left[:] = [kind for kind in left if _KINDS[kind](value)]
    for row in rows:
        typed = {name: left[0](row[name]) if row[name] else None for name, left in kinds.items() if left}
        texts = {name: row[name] or None for name, left in kinds.items() if not left and name not in text_columns}
        yield row | typed | texts


def read_objects(text: str, inside: str | None = None) -> list[NumberedRecord]:
    """Read the objects of a JSON list, or of a JSON object, whose names become the column ``entry``."""
    found = json.loads(text)
    if inside is not None:
        found = found[inside]
    if isinstance(found, dict) and found and all(isinstance(record, dict) for record in found.values()):
        taken = next((name for name, record in found.items() if ENTRY in record), None)
        if taken is not None:
            raise UsageError(
                f"object {taken!r} has a field {ENTRY!r}",
                hint="rename the field: it is what the names of objects become",
            )
        found = [{ENTRY: name, **record} for name, record in found.items()]
    if not isinstance(found, list) or not all(isinstance(record, dict) for record in found):
        raise UsageError("JSON is not a list of objects", hint="use jsonl: for a file with one object per line")
    return list(enumerate(found, 1))


def read_lines(text: Iterable[str]) -> Iterator[NumberedRecord]:
    """Yield the objects of JSON Lines, given by line; empty lines are skipped."""
    for number, line in enumerate(text, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line.removesuffix("\n"))
        except (ValueError, RecursionError) as error:
            raise UsageError(
                f"line is not JSON: {error}", row=number, hint="write one JSON object per line, or use json: for a list"
            ) from error
        if not isinstance(record, dict):
            raise UsageError("line is not a JSON object", row=number, hint="write one JSON object per line")
        yield number, record


_AT_ONCE, _BUFFER_BYTES = 1 << 12, 1 << 20
_MANY_ROWS, _ROWS_PER_BYTE = 2_000_000, 30  # a file with more rows than both is refused: they cannot all differ


def read_parquet(file: IO[bytes]) -> Iterator[NumberedRecord]:
    """Yield the rows of a Parquet file."""
    first = 1
    try:
        data = pa.PythonFile(file, "r")
        with file, pq.ParquetFile(data, buffer_size=_BUFFER_BYTES, pre_buffer=False) as found:
            rows, names = found.metadata.num_rows, found.schema_arrow.names
            if rows > _MANY_ROWS and rows > _ROWS_PER_BYTE * data.size():
                raise UsageError(f"Parquet file of {data.size():,} bytes has {rows:,} rows, which name no videos")
            if len(set(names)) < len(names):
                raise UsageError("duplicate column in the Parquet file", hint="rename or delete one of the columns")
            check_unpacked(data, found)
            for batch in found.iter_batches(_AT_ONCE, use_threads=False):
                yield from enumerate(batch.to_pylist(), first)
                first += batch.num_rows
    except (pa.ArrowException, OSError) as error:
        raise UsageError(f"Parquet does not parse: {error}", hint="check that the file is complete") from error


def plain_value(value: Any) -> Any:
    """Convert a value to one that both a table's column and JSON can store.

    Lists of text, and of finite numbers, stay lists. Other nested values and integers of more than 64 bits become JSON
    text, times of day and dates ISO 8601, decimals text.
    """
    if isinstance(value, bool) or value is None or isinstance(value, str | float):
        return value
    if isinstance(value, int):
        return value if -_INT64 <= value < _INT64 else str(value)
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, decimal.Decimal):
        return str(value)
    if isinstance(value, bytes):
        raise UsageError("value is binary", hint="delete the column, or store text")
    is_kept = isinstance(value, list) and (all(isinstance(part, str) for part in value) or _are_numbers(value))
    return value if is_kept else json.dumps(value, default=plain_value)


def _are_numbers(values: list[Any]) -> bool:
    """Return whether a list, however nested, contains only numbers that a column of a table can store."""
    return all(
        _are_numbers(one) if isinstance(one, list) else type(one) in (int, float) and -_INT64 <= one < _INT64
        for one in values
    )


def seconds_of(value: Any, name: str, row: int) -> float | None:
    """Return a time of an annotation in seconds; None if it is empty.

    A time is a number, a duration of Parquet, or text as ``HH:MM:SS.mmm``, ``MM:SS.mmm`` or a number.
    """
    if value in (None, ""):
        return None
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    try:
        clock = _CLOCK.fullmatch(value.strip()) if isinstance(value, str) else None
        if clock is not None:
            # Add as decimals, not floats, so that 0:08.475 gives the same float as 8.475.
            seconds = float(decimal.Decimal(clock[3]) + 60 * int(clock[2]) + 3600 * int(clock[1] or 0))
        else:
            seconds = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        seconds = math.nan
    if not math.isfinite(seconds):
        raise UsageError(
            f"{name} is {value!r}, not a number of seconds",
            row=row,
            column=name,
            hint="give seconds or HH:MM:SS.mmm, and leave it empty for no bound",
        )
    return seconds


def seconds_text(time: float | None) -> str:
    """Return a time as text from which exactly this time can be read."""
    if time is None:
        return ""
    short = f"{time:g}"
    return short if float(short) == time else repr(time)


def _is_integer(text: str) -> bool:
    return _INTEGER.fullmatch(text) is not None and -_INT64 <= int(text) < _INT64


def _is_number(text: str) -> bool:
    # Integers of more than 64 bits are identifiers, which a float would round.
    is_long = len(text) > 18 and text.lstrip("-").isdigit()
    return not is_long and _NUMBER.fullmatch(text) is not None and any(map(str.isdigit, text))


_KINDS: Final[Mapping[Callable[[str], Any], Callable[[str], bool]]] = {int: _is_integer, float: _is_number}
"""Types of a CSV's columns, and whether a field may be of it; the first that all fields may be of is taken."""


SPLITS: Final = {
    "train": "train",
    "training": "train",
    "val": "val",
    "valid": "val",
    "validate": "val",
    "validation": "val",
    "test": "test",
}
"""The names of splits in files and folders, and the split that each means."""


def split_value(value: Any) -> Any:
    """Return the value of a column ``split`` as it is stored, such as "train" for "training"."""
    return SPLITS.get(value, value) if isinstance(value, str) else plain_value(value)


def split_of(name: str) -> str | None:
    """Return the split that a name mentions, such as "train" for ``hmdb51_train_split_1.txt``."""
    words = re.split(r"[^a-z]+", PurePath(name).stem.lower())
    found = {SPLITS[word] for word in words if word in SPLITS}
    return found.pop() if len(found) == 1 else None


MAX_LABEL: Final = 999_999
"""Largest allowed integer label; all numbers up to the largest label in use become classes."""
CLASS_NUMBER: Final = re.compile("0|[1-9][0-9]*")
"""A class name that is a number. Others are names, such as 001."""
LABELS: Final = "labels"
"""The column with several class names per video; `MultiHot` reads it."""
_NOT_UNICODE: Final = re.compile("[\ud800-\udfff]")
RESERVED: Final = "__"
"""Prefix of the columns that fastvid computes when it reads annotations."""


@dataclass(slots=True)  # see `fastvid.sharding.sources.sources.Source`
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

    rows: Sequence[AnnotationRow]
    classes: tuple[str, ...]


def class_names(label: str | None, columns: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the classes of a video: its label, and those in the column ``labels``."""
    return (*(() if label is None else (label,)), *(columns.get(LABELS) or ()))


def label_text(value: Any) -> str | None:
    """Return a label as text; None if there is none."""
    if isinstance(value, float):  # as pandas stores integers beside empty cells
        value = int(value) if value.is_integer() else None if math.isnan(value) else value
    return None if value in (None, "") else str(value)


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
    """Return the classes of all rows, ordered by label: all integers up to the largest one, or sorted names."""
    found = {name for row in rows for name in row.class_names}
    if not found or not all(map(CLASS_NUMBER.fullmatch, found)):
        return tuple(sorted(found))
    for row in rows:
        for name in row.class_names:
            if len(name) > len(str(MAX_LABEL)) or int(name) > MAX_LABEL:
                raise UsageError(f"label {name} is larger than {MAX_LABEL}", hint="number classes from 0", **row.where)
    return tuple(str(number) for number in range(max(map(int, found)) + 1))


def check_rows(rows: Iterable[AnnotationRow]) -> None:
    """Raise a UsageError for the first row with a value that cannot be stored."""
    for row in rows:
        for name, value in (("label", row.label), *row.columns.items()):
            if name.startswith(RESERVED):
                raise UsageError(f"column {name!r} has a reserved name", hint=f"rename it: {RESERVED} is ours")
            for text in (name, *(value if isinstance(value, list) else [value])):
                if isinstance(text, str) and not text.isascii() and _NOT_UNICODE.search(text):
                    raise UsageError(f"column {name!r} is not UTF-8: {text!r}", hint="save it as UTF-8", **row.where)
