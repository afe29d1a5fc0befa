"""Changes a dataset without touching its videos: removes samples, and changes labels and columns.

Each change commits a new generation in milliseconds, whatever the size of the shards. A job that has pinned an older
generation continues to read it until `fastvid gc` deletes it. New labels and columns come from a table with keys, or
from the usual annotation files, whose rows are matched to samples by the names of their sources.
"""

from __future__ import annotations

import logging
import posixpath
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fastvid.errors import UsageError
from fastvid.format.dataset import change
from fastvid.format.generations import Generation, conflict
from fastvid.format.schema import ANNOTATION_FIELDS, CLASS, FACT_FIELDS
from fastvid.runtime.names import VIDEO_SUFFIXES, encode_name, meant
from fastvid.runtime.near_names import near_names
from fastvid.runtime.values import things
from fastvid.sharding.job.ledger import whole_name
from fastvid.sharding.job.members import hide_rows, with_column
from fastvid.sharding.sources import tables
from fastvid.sharding.sources.annotations import AnnotationFile, parsing, read_table
from fastvid.sharding.sources.tables import LABELS, AnnotationRow, Annotations, seconds_text
from fastvid.storage import Storage

_LOG = logging.getLogger(__name__)

_USUAL: Final = ("label", LABELS, "split", "caption")  # columns for whose names others are typed by mistake
# Number of unknown keys that a message lists.
_SHOWN: Final = 10


@dataclass(frozen=True, slots=True)
class Removed:
    """The result of `remove_samples`."""

    generation: int
    removed: int  # number of samples that this generation hides and the one before did not
    already: int  # number of samples that were hidden already


@dataclass(frozen=True, slots=True)
class Relabelled:
    """The result of `relabel_samples`."""

    generation: int
    samples: int  # number of rows that differ from the generation before
    columns: tuple[str, ...]
    new_classes: tuple[str, ...]


def remove_samples(storage: Storage, keys: Sequence[str]) -> Removed:
    """Hide samples from now on. Their bytes are deleted by `compact_shards` and `collect_garbage`."""
    wanted = pa.array(list(dict.fromkeys(keys)), pa.string())
    if not len(wanted):
        raise UsageError("no keys given")

    def named(_generation: Generation, table: pa.Table) -> Any:
        rows_of(table, wanted, storage)
        return pc.is_in(table["key"], value_set=wanted)

    return hide_samples(storage, named, lambda number: f"remove {things(number, 'sample')}")


def hide_samples(storage: Storage, which: Callable[[Generation, pa.Table], Any], note: Callable[[int], str]) -> Removed:
    """Hide the samples for which `which` returns true in a new generation, unless all are hidden already.

    `which`: returns one bool for each row of the annotations. `note`: returns the generation's note for a number of
    hidden samples.
    """
    found = Removed(0, 0, 0)

    def edit(generation: Generation, table: pa.Table) -> tuple[Generation, pa.Table] | None:
        nonlocal found
        named = which(generation, table)
        already = pc.sum(pc.and_(named, table["removed"])).as_py() or 0
        found = Removed(generation.number, (pc.sum(named).as_py() or 0) - already, already)
        if not found.removed:
            return None
        return replace(generation, note=note(found.removed)), hide_rows(table, named)

    current = change(storage, edit)
    return replace(found, generation=current.number)


def relabel_samples(
    storage: Storage,
    rows: Mapping[str, Mapping[str, Any]],
    *,
    new_classes: bool = False,
    note: str = "relabel",
    since: int | None = None,
) -> Relabelled:
    """Change column values of samples; samples that are not named keep theirs.

    `since`: number of the generation that the values depend on; if it is no longer the current one, ConflictError.
    """
    if not rows:
        raise UsageError("no samples given")
    columns = tuple(dict.fromkeys(name for values in rows.values() for name in values))
    fixed = [name for name in columns if name in (*ANNOTATION_FIELDS, *FACT_FIELDS, CLASS) and name != "label"]
    if fixed or not columns:
        raise UsageError(
            f"column {fixed[0]!r} cannot be changed" if fixed else "no columns given",
            hint="change label (the class), split columns, captions or your own columns",
        )
    done = Relabelled(0, 0, (), ())
    for name in columns:
        if name not in _USUAL and not name[-1:].isdigit() and (near := meant(name, _USUAL)):
            _LOG.warning("%r is a column of your own: %s", name, near)

    def edit(generation: Generation, table: pa.Table) -> tuple[Generation, pa.Table] | None:
        nonlocal done
        if since not in (None, generation.number):
            raise conflict(storage)
        indices = rows_of(table, pa.array(list(rows), pa.string()), storage)
        changed = np.zeros(table.num_rows, dtype=bool)
        labels = [name for row in rows.values() for name in (row.get("label"), *(row.get(LABELS) or ()))]
        classes, touched = ClassNames(generation.classes, labels, grow=new_classes), []
        for name in columns:
            old: list[Any] = table[name].to_pylist() if name in table.column_names else [None] * table.num_rows
            values = list(old)
            for index, (key, row) in zip(indices, rows.items(), strict=True):
                if name in row:
                    value = row[name]
                    if name == "label":
                        value = classes.index(value, key)
                    elif name == LABELS and value is not None:
                        value = [classes.name(part, key) for part in value]
                    values[index] = value
            differs = np.asarray([a != b for a, b in zip(old, values, strict=True)])
            if differs.any() or name not in table.column_names:
                kind = table.schema.field(name).type if name in table.column_names else None
                table = with_column(table, name, _column(name, values, kind))
                touched.append(name)
                changed |= differs
        added = tuple(classes.names[len(generation.classes) :])
        done = Relabelled(generation.number, int(changed.sum()), tuple(touched), added)
        if not touched:
            return None
        return replace(generation, classes=tuple(classes.names), note=note), table

    current = change(storage, edit)
    return replace(done, generation=current.number)


def rows_of(table: pa.Table, keys: pa.Array, storage: Storage) -> list[int]:
    """Return the row of each key."""
    rows = pc.index_in(keys, value_set=table["key"].combine_chunks())
    if rows.null_count:
        unknown = keys.filter(pc.is_null(rows)).to_pylist()
        listed = ", ".join(repr(key) for key in unknown[:_SHOWN])
        more = f" and {len(unknown) - _SHOWN} more" if len(unknown) > _SHOWN else ""
        near = ", ".join(map(repr, near_names(table["key"], unknown[0])))
        told = f"{len(unknown)} of {len(keys)} keys are not in the dataset: {listed}{more}"
        hint = f"did you mean {near}? nothing was changed" if near else "nothing was changed; `fastvid find` lists keys"
        raise UsageError(told, file=storage.url, hint=hint)
    numbers: list[int] = rows.to_pylist()
    return numbers


class ClassNames:
    """Class names, and the conversion of label texts to indices."""

    def __init__(
        self, names: Sequence[str], labels: Sequence[Any], *, grow: bool, more: str = "add it with --new-classes"
    ) -> None:
        self.names, self._more = list(names), more
        self._known = {name: index for index, name in reversed(list(enumerate(names)))}
        # In a dataset without class names, labels are indices if all of them are numbers, else names.
        self._plain = not names and all(label is None or str(label).isdecimal() for label in labels)
        self._grow = grow or not names
        # If a class is called "10", it is not certain what "1" means.
        self._counted = self._plain or not (self._grow or any(map(str.isdecimal, names)))

    def index(self, value: Any, key: str) -> int | None:
        """Return the index of a class given by name or index; None for None."""
        if value is None:
            return None
        text = str(value)
        known = self._known.get(text)
        if known is not None:
            return known
        if text.isdecimal() and self._counted and (self._plain or int(text) < len(self.names)):
            return int(text)
        if not self._grow:
            shown = ", ".join(self.names[:_SHOWN]) + (", ..." if len(self.names) > _SHOWN else "")
            raise UsageError(
                f"unknown class {text!r}",
                key=key,
                hint=f"use one of {shown}, or {self._more}; nothing was changed",
            )
        self._known[text] = len(self.names)
        self.names.append(text)
        return len(self.names) - 1

    def name(self, value: Any, key: str) -> str:
        """Return the name of a class given by name or index; without class names, the index as text."""
        index = self.index(value, key)
        return str(value) if index is None or index >= len(self.names) else self.names[index]


def _column(name: str, values: list[Any], kind: pa.DataType | None) -> pa.Array:
    """Return the values of a column; its type becomes wider if they would lose digits in it."""
    if kind is None and all(value is None for value in values):
        kind = pa.string()
    with suppress(pa.ArrowInvalid, pa.ArrowTypeError):
        made = pa.array(values, kind)
        if made.to_pylist() == values:
            return made
    try:
        both = [pa.table({name: part}) for part in (pa.array([], kind), pa.array(values))]
        return pa.concat_tables(both, promote_options="permissive")[name].combine_chunks()
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise UsageError(
            f"values of column {name!r} do not have its type {kind}: {error}", hint="nothing was changed"
        ) from error


def read_labels(place: str, columns: str | Mapping[str, str] | None = None) -> dict[str, dict[str, Any]]:
    """Return rows for `relabel_samples`, by key, from a table with a column ``key`` and the columns to change.
    An empty field of a CSV is None.
    """
    file, names = AnnotationFile(place), tables.Columns.parse(columns)
    form = file.suffix[1:] if file.suffix in (".json", ".jsonl", ".parquet") else "csv"
    with parsing(place, form):
        rows = _by_key(read_table(file, form, names, whole=True))
        tables.check_rows([AnnotationRow(key, None, row) for key, row in rows.items()])
        for row in rows.values():
            if LABELS in row:
                row[LABELS] = tables.label_list(row[LABELS])
    return rows


def _by_key(records: Sequence[tables.NumberedRecord]) -> dict[str, dict[str, Any]]:
    rows: dict[str, dict[str, Any]] = {}
    for number, record in records:
        key = record.get("key")
        if not isinstance(key, str) or not key:
            raise UsageError("row has no key", row=number, column="key", hint="name it by --columns key=COLUMN")
        if key in rows:
            raise UsageError(f"duplicate key {key!r}", row=number)
        values = {name: None if value == "" else value for name, value in record.items() if name != "key"}
        rows[key] = {name: value if name == LABELS else tables.plain_value(value) for name, value in values.items()}
    return rows


def match_annotations(
    table: pa.Table, annotations: Annotations
) -> tuple[dict[str, dict[str, Any]], list[str], list[str]]:
    """Find the samples that annotation rows refer to, by the names of their sources.

    A row's name is a source's path or the end of it, with or without the file extension. All segments of a source get
    its row. Returns the rows by key, the names that match nothing, and those that match samples of several sources,
    which are not changed.
    """
    by_name: dict[str, dict[str, list[str]]] = {}
    for key, source in zip(table["key"].to_pylist(), table["source_id"].to_pylist(), strict=True):
        for name in _names(source):
            by_name.setdefault(name, {}).setdefault(source, []).append(key)
    rows: dict[str, dict[str, Any]] = {}
    unmatched, ambiguous = list[str](), list[str]()
    for row in annotations.rows:
        names = _wanted(row)
        found = next((by_name[name] for name in names if name in by_name), None)
        if found is not None and len({whole_name(source) for source in found}) > 1:
            # A whole path matches one source; only the end of a path can match several.
            found = {source: keys for source, keys in found.items() if whole_name(source) in names} or found
        if found is None:
            unmatched.append(row.name)
        elif len({whole_name(source) for source in found}) > 1:
            ambiguous.append(row.name)
        else:
            values = dict(row.columns) if row.label is None else {"label": row.label, **row.columns}
            rows |= {key: values for keys in found.values() for key in keys}
    return rows, unmatched, ambiguous


def _names(source: str) -> list[str]:
    """Return the names that match a source: each tail of its path, with and without file extension and clip range."""
    names, path = list[str](), whole_name(source)
    stem, ending = posixpath.splitext(path)
    for clip in dict.fromkeys((source[len(path) :], "")):
        for text in (path, stem) if ending.lower() in VIDEO_SUFFIXES else (path,):
            parts = text.split("/")
            names += ["/".join(parts[start:]) + clip for start in range(len(parts))]
    return names


def _wanted(row: AnnotationRow) -> list[str]:
    """Return the names to look up for a row's video, best first."""
    path = encode_name(posixpath.normpath(row.name))
    if row.start is None and row.end is None:
        return [path]
    ends = f"{seconds_text(row.start)}-{seconds_text(row.end)}"
    if row.whole_name is None:
        return [f"{path}#{ends}"]
    return [path, f"{encode_name(row.whole_name)}#{ends}"]
