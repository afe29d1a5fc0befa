"""Reads new labels and columns for a dataset's samples, from a CSV with keys or from the usual annotation files."""

from __future__ import annotations

import csv
import io
import posixpath
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from fastvid.errors import UsageError
from fastvid.sharding.sources.annotations import VIDEO_SUFFIXES
from fastvid.sharding.sources.rows import AnnotationRow, Annotations
from fastvid.sharding.sources.sources import encode_name


@dataclass(frozen=True, slots=True)
class Matched:
    """Annotation rows matched to the samples of a dataset.

    Attributes:
        rows: New column values by key.
        unmatched: Names in the annotations without a sample: rejected sources, or other videos.
        ambiguous: Names that match samples of several sources; their samples are not changed.
    """

    rows: Mapping[str, Mapping[str, Any]]
    unmatched: tuple[str, ...]
    ambiguous: tuple[str, ...]


def read_label_csv(data: bytes, *, file: str) -> dict[str, dict[str, Any]]:
    """Return rows for `relabel_samples` from a CSV with the columns ``key`` and those to change.

    An empty field is None. Columns of whole or decimal numbers become numbers, except ``label``, whose text is first
    looked up as a class name.

    Raises:
        UsageError: If the CSV has no key column, a duplicate key, or a row with a wrong number of fields.
    """
    try:
        reader = csv.reader(io.StringIO(data.decode("utf-8-sig"), newline=""), strict=True)
        lines = [(reader.line_num, line) for line in reader if line]
    except (UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"cannot parse CSV: {error}", file=file) from error
    header = [name.strip() for name in lines[0][1]] if lines else []
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
        if name not in ("key", "label"):
            numbers = _numbers([row[name] for row in rows.values()])
            if numbers is not None:
                for row, value in zip(rows.values(), numbers, strict=True):
                    row[name] = value
    return rows


def match_annotations(table: pa.Table, annotations: Annotations) -> Matched:
    """Find the samples that annotation rows refer to, by the names of their sources.

    A row's name is a source's path or the end of it, with or without the file extension. All segments of a source get
    its row.

    Args:
        table: Annotations of a generation, with the columns ``key`` and ``source_id``.
        annotations: Result of `read_annotations`.
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
    ends = "-".join("" if second is None else f"{second:g}" for second in (row.start, row.end))
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
