"""Reads new labels and columns for a dataset's samples, from a table with keys or from the usual annotation files."""

from __future__ import annotations

import csv
import io
import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from fastvid.errors import StorageError, UsageError
from fastvid.runtime.file_names import encode_name
from fastvid.sharding.sources.annotation_file import AnnotationFile
from fastvid.sharding.sources.annotations import read_table
from fastvid.sharding.sources.columns import Columns, NumberedRecord
from fastvid.sharding.sources.rows import LABELS, AnnotationRow, Annotations, label_list
from fastvid.sharding.sources.sources import seconds_text
from fastvid.sharding.sources.tables import plain_value
from fastvid.sharding.sources.video_names import VIDEO_SUFFIXES


@dataclass(frozen=True, slots=True)
class Matched:
    """Annotation rows matched to the samples of a dataset."""

    rows: Mapping[str, Mapping[str, Any]]
    unmatched: tuple[str, ...]
    ambiguous: tuple[str, ...]  # names that match samples of several sources; their samples are not changed


def read_labels(place: str, columns: str | Mapping[str, str] | None = None) -> dict[str, dict[str, Any]]:
    """Return rows for `relabel_samples` from a table with the columns ``key`` and those to change."""
    file, names = AnnotationFile(place), Columns.parse(columns)
    form = file.suffix[1:]
    try:
        if form not in ("json", "jsonl", "parquet"):
            rows = read_label_csv(file.read(), file=place, columns=names)
        else:
            rows = _by_key(read_table(file, form, names))
        for row in rows.values():
            if LABELS in row:
                row[LABELS] = label_list(row[LABELS])
    except StorageError:
        raise
    except OSError as error:
        raise UsageError(f"table cannot be read: {error.strerror}", file=place) from error
    except UsageError as error:
        raise UsageError(error.message, hint=error.hint, **{"file": place, **error.where}) from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"table does not parse as {form}: {error}", file=place) from error
    return rows


def _by_key(records: Sequence[NumberedRecord]) -> dict[str, dict[str, Any]]:
    rows: dict[str, dict[str, Any]] = {}
    for number, record in records:
        key = record.get("key")
        if not isinstance(key, str):
            raise UsageError("row has no key", row=number, column="key", hint="name the column, such as key=COLUMN")
        if key in rows:
            raise UsageError(f"duplicate key {key!r}", row=number)
        rows[key] = {
            name: value if name == LABELS else plain_value(value) for name, value in record.items() if name != "key"
        }
    return rows


def read_label_csv(data: bytes, *, file: str, columns: Columns | None = None) -> dict[str, dict[str, Any]]:
    """Return rows for `relabel_samples` from a CSV with the columns ``key`` and those to change.

    An empty field is None. Columns of whole or decimal numbers become numbers, except ``label``, whose text is first
    looked up as a class name.
    """
    try:
        reader = csv.reader(io.StringIO(data.decode("utf-8-sig"), newline=""), strict=True)
        lines = [(reader.line_num, line) for line in reader if line]
    except (UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"cannot parse CSV: {error}", file=file) from error
    renamed = {source: name for name, source in columns.sources.items()} if columns is not None else {}
    header = [renamed.get(name.strip(), name.strip()) for name in lines[0][1]] if lines else []
    if missing := next((name for name in renamed.values() if name not in header), None):
        raise UsageError(f"table has no column for {missing!r}", file=file, hint=f"its columns are {', '.join(header)}")
    if "key" not in header or len(header) < 2 or len(set(header)) < len(header):
        raise UsageError(
            f"CSV header is {','.join(header)!r}", file=file, hint="name the column key, and label or other columns"
        )
    rows: dict[str, dict[str, Any]] = {}
    at = header.index("key")
    for number, line in lines[1:]:
        if len(line) != len(header):
            raise UsageError(f"line has {len(line)} fields, the header {len(header)}", file=file, line=number)
        if line[at] in rows:
            raise UsageError(f"duplicate key {line[at]!r}", file=file, line=number)
        rows[line[at]] = {name: value or None for name, value in zip(header, line, strict=True) if name != "key"}
    for name in header:
        if name not in ("key", "label", LABELS):
            numbers = _numbers([row[name] for row in rows.values()])
            if numbers is not None:
                for row, value in zip(rows.values(), numbers, strict=True):
                    row[name] = value
    return rows


def match_annotations(table: pa.Table, annotations: Annotations) -> Matched:
    """Find the samples that annotation rows refer to, by the names of their sources.

    A row's name is a source's path or the end of it, with or without the file extension. All segments of a source get
    its row.
    """
    by_name: dict[str, dict[str, list[str]]] = {}
    for key, source in zip(table["key"].to_pylist(), table["source_id"].to_pylist(), strict=True):
        for name in _names(source):
            by_name.setdefault(name, {}).setdefault(source, []).append(key)
    rows: dict[str, dict[str, Any]] = {}
    unmatched, ambiguous = [], []
    for row in annotations.rows:
        names = _wanted(row)
        found = next((by_name[name] for name in names if name in by_name), None)
        if found is not None and len({_whole(source) for source in found}) > 1:
            # A whole path matches one source; only the end of a path can match several.
            found = {source: keys for source, keys in found.items() if _whole(source) in names} or found
        if found is None:
            unmatched.append(row.name)
        elif len({_whole(source) for source in found}) > 1:
            ambiguous.append(row.name)
        else:
            values = dict(row.columns) if row.label is None else {"label": row.label, **row.columns}
            rows |= {key: values for keys in found.values() for key in keys}
    return Matched(rows, tuple(unmatched), tuple(ambiguous))


def _names(source: str) -> list[str]:
    """Return the names that match a source: its path and every suffix of it, with and without extension and clip."""
    names = []
    for name in dict.fromkeys((source, _whole(source))):
        path, clip = (name, "") if name == _whole(source) else (_whole(source), name[len(_whole(source)) :])
        stem, ending = posixpath.splitext(path)
        for text in (path, stem) if ending.lower() in VIDEO_SUFFIXES else (path,):
            parts = text.split("/")
            names += ["/".join(parts[start:]) + clip for start in range(len(parts))]
    return names


def _whole(source: str) -> str:
    """Return a source's path without the clip range, for example ``#10-20``."""
    return source.partition("#")[0]


def _wanted(row: AnnotationRow) -> list[str]:
    """Return the names to look up for a row's video, best first."""
    path = encode_name(posixpath.normpath(row.name))
    if row.start is None and row.end is None:
        return [path]
    ends = f"{seconds_text(row.start)}-{seconds_text(row.end)}"
    if row.whole_name is None:
        return [f"{path}#{ends}"]
    return [path, f"{encode_name(row.whole_name)}#{ends}"]


def _numbers(texts: list[Any]) -> list[Any] | None:
    """Return the values as integers or floats, keeping None; None if any is not a number."""
    for kind in (int, float):
        try:
            return [None if text is None else kind(text) for text in texts]
        except ValueError:
            continue
    return None
