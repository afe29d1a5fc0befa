"""Annotations of samples: the rows of a job, and the same as members of their tars.

So neither other tools nor fastvid need any other file of the dataset, see `fastvid.sharding.job.index`.
"""

from __future__ import annotations

import datetime
import json
import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from fastvid.format.annotations import annotation_table, fact_columns
from fastvid.format.generations import Generation
from fastvid.format.schema import ANNOTATION_FIELDS, CLASS, FACT_FIELDS, SOURCE_CLASS
from fastvid.format.tar import to_json
from fastvid.runtime.names import encode_name
from fastvid.sharding.job.ledger import PackedSample, Part
from fastvid.sharding.sources.sources import Source, SourceList

LABEL_MEMBER: Final = "cls"
"""Suffix of the member with the label as decimal text, as webdataset's decoders and DALI read it."""

CAPTION_MEMBER: Final = "txt"
"""Suffix of the member with the caption, UTF-8."""

_LOG: Final = logging.getLogger(__name__)
_CAPTIONS: Final = ("caption", "text")  # columns that may be the caption; the first with a value is
_PLAIN: Final = (CLASS, "label", "labels", "caption")  # top-level fields of the JSON, with split columns
_SPLIT: Final = "split"
_NESTED: Final = "annotations"
_TYPES: Final = "annotation_types"
_RECORD: Final = "dataset"
_COPY: Final = "copy"  # codec of profiles that do not encode
_MARK: Final = {"format": "fastvid"}  # distinguishes fastvid's record from a field of the same name
_SEGMENT: Final = ("parent", "start_seconds", "end_seconds", "bad_frames")  # in the JSON of every segment
# Types that JSON lacks, by name, and how to parse their text. datetime precedes date, of which it is a subclass.
_AS_TEXT: Final[Mapping[str, tuple[type, Callable[[str], Any]]]] = {
    "bytes": (bytes, bytes.fromhex),
    "datetime": (datetime.datetime, datetime.datetime.fromisoformat),
    "date": (datetime.date, datetime.date.fromisoformat),
    "time": (datetime.time, datetime.time.fromisoformat),
    "decimal": (Decimal, Decimal),
}
# Columns that are not stored: facts, which the JSON always has, and what is only true of one generation.
_LEFT_OUT: Final = (*ANNOTATION_FIELDS, *FACT_FIELDS)


def annotation_row(sample: PackedSample, source: Source, labels: Mapping[str, int]) -> dict[str, Any]:
    """Return the annotations of one sample."""
    row: dict[str, Any] = {
        "key": sample.key,
        "source_id": sample.source_id,
        "label": None if source.label is None else labels[source.label],
        "removed": False,
        **fact_columns(sample.num_frames, Fraction(sample.fps), sample.width, sample.height),
    }
    # A table may have a column with one of fastvid's names for something else, such as its own count of frames.
    taken = {*row, CLASS}
    row |= {f"source_{name}" if name in taken else name: value for name, value in source.columns.items()}
    # Tables that a dataset was exported to have both: fastvid's column, and the one that was named anew.
    row |= {name: value for name, value in source.columns.items() if name not in taken}
    if sample.parent is not None:
        row |= {"parent": sample.parent, "start_seconds": sample.start_seconds, "end_seconds": sample.end_seconds}
    if sample.bad_frames is not None:
        row["bad_frames"] = sample.bad_frames
    asked = {"asked_start_seconds": source.start, "asked_end_seconds": source.end}
    row |= {name: seconds for name, seconds in asked.items() if seconds is not None}
    return row


def annotations_of(
    parts: Sequence[Part], found: SourceList, labels: Mapping[str, int], hidden: Collection[str]
) -> pa.Table:
    """Return the annotations of all samples of the parts, in order.

    `labels`: class index of each label. `hidden`: ids of sources whose samples are marked as removed.
    """
    sources = {encode_name(source.id): source for source in found.sources}
    rows = [annotation_row(one, sources[one.source_id], labels) for part in parts for one in part.samples]
    return hide_sources(annotation_table(rows), hidden)


def joined(old: pa.Table, new: pa.Table) -> pa.Table:
    """Concatenate annotations with the columns of both, without metadata; what no type can hold becomes text."""
    for name in [name for name in old.column_names if name in new.column_names]:
        try:
            pa.concat_tables([old.select([name]), new.select([name])], promote_options="permissive")
        except (pa.ArrowInvalid, pa.ArrowTypeError):
            kinds = old.schema.field(name).type, new.schema.field(name).type
            _LOG.warning("column %r becomes text: it had values of type %s, and the new ones are %s", name, *kinds)
            old, new = _as_text(old, name), _as_text(new, name)
    every = (pa.table(dict(zip(one.column_names, one.columns, strict=True))) for one in (old, new))
    return pa.concat_tables(every, promote_options="permissive")


def _as_text(table: pa.Table, name: str) -> pa.Table:
    values = [None if value is None else str(value) for value in table[name].to_pylist()]
    return table.set_column(table.column_names.index(name), name, pa.array(values, pa.string()))


def hide_sources(annotations: pa.Table, sources: Collection[str]) -> pa.Table:
    """Return annotations in which all samples of some sources, given by their ids, are marked as removed."""
    named = pc.is_in(annotations["source_id"], value_set=pa.array(sorted(sources), pa.string()))
    return hide_rows(annotations, named) if sources else annotations


def hide_rows(annotations: pa.Table, rows: Any) -> pa.Table:
    """Return annotations in which more rows are marked as removed; `rows`: bool, one for each."""
    return with_column(annotations, "removed", pc.or_(annotations["removed"], rows))


def with_column(table: pa.Table, name: str, values: Any) -> pa.Table:
    """Return a table with new values of a column, those of a list cast to its type; a new column is appended."""
    if name not in table.column_names:
        return table.append_column(name, values)
    field = table.schema.field(name)
    made = pa.array(values, field.type) if isinstance(values, list) else values
    return table.set_column(table.column_names.index(name), field.with_type(made.type), made)


def annotate_members(members: Mapping[str, bytes], row: Mapping[str, Any], classes: Sequence[str]) -> dict[str, bytes]:
    """Return a sample's members with its current annotations in them instead of those that they contain.

    The JSON gets ``class``, ``label``, ``labels``, ``caption`` and the split columns as far as they are not null, and
    all other columns under ``annotations``. A member ``cls`` is added for a label and ``txt`` for a caption. Values
    that JSON lacks are stored as text: dates in ISO 8601, bytes in hex; numbers that are not finite become null. The
    type of such a value is in ``annotation_types``, so that `stored_row` returns the value itself.

    `members`: contents by suffix. `row`: the sample's row of annotations. `classes`: the dataset's class names.
    """
    found = json.loads(members.get("json", b"{}"))
    fields = found if isinstance(found, dict) else {"json": found}
    meta = {name: value for name, value in fields.items() if not _is_ours(name) and not _is_record(name, value)}
    label, caption = row.get("label"), next((row[name] for name in _CAPTIONS if row.get(name) is not None), None)
    plain = {name: value for name, value in row.items() if _is_ours(name) and name not in (_NESTED, _TYPES)}
    plain["caption"] = caption
    if label is not None and label < len(classes):
        plain[CLASS] = classes[label]
    others = {
        name: _json_value(value)
        for name, value in row.items()
        if name not in _LEFT_OUT
        and not (name in plain and _is_told(name, row))
        and not (name in _SEGMENT and meta.get(name) == value)
    }
    types = {name: kind for name, value in row.items() if name not in _LEFT_OUT and (kind := _lost_type(value))}
    meta |= {name: _json_value(value) for name, value in plain.items() if value is not None}
    if others:
        meta[_NESTED] = others
    if types:
        meta[_TYPES] = types
    made = {"json": to_json(meta)}
    if label is not None:
        made[LABEL_MEMBER] = str(label).encode()
    if caption is not None:
        made[CAPTION_MEMBER] = str(caption).encode()
    return made | {kind: data for kind, data in members.items() if kind not in ("json", LABEL_MEMBER, CAPTION_MEMBER)}


def is_current(members: Mapping[str, bytes], row: Mapping[str, Any], classes: Sequence[str]) -> bool:
    """Return whether a sample's members contain its current annotations, as `annotate_members` would write them."""
    made = annotate_members(members, row, classes)
    told, current = (_told(one.get("json", b"{}")) for one in (members, made))
    return told == current and {**members, "json": b""} == {**made, "json": b""}


def _told(content: bytes) -> Any:
    """Return a sample's JSON without the dataset's record and without null annotations.

    A column that was added to the dataset later is null for old samples; it makes no difference.
    """
    meta = json.loads(content)
    if not isinstance(meta, dict):
        return meta
    nested = {name: value for name, value in meta.get(_NESTED, {}).items() if value is not None}
    return {name: value for name, value in meta.items() if not _is_record(name, value)} | {_NESTED: nested}


def stored_row(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Return the annotations in a sample's JSON, by column: the inverse of `annotate_members`, except for facts."""
    nested, types = meta.get(_NESTED, {}), meta.get(_TYPES, {})
    told = {name: meta[name] for name in meta if _is_ours(name) and name not in (CLASS, _NESTED, _TYPES)}
    if nested.get("text") is not None and nested["text"] == told.get("caption"):
        del told["caption"]
    told |= {name: meta[name] for name in _SEGMENT if meta.get(name) is not None}
    row = {name: _from_json(value, types.get(name)) for name, value in (told | nested).items()}
    return {SOURCE_CLASS if name == CLASS else name: value for name, value in row.items()}  # see `read_annotations`


def columns_to_json(columns: Mapping[str, Any]) -> list[Any]:
    """Return the columns of a source as JSON: the values, and the types of those values that JSON lacks."""
    types = {name: kind for name, value in columns.items() if (kind := _lost_type(value))}
    return [{name: _json_value(value) for name, value in columns.items()}, types]


def columns_from_json(told: Sequence[Any]) -> dict[str, Any]:
    """Return the columns of a source from the result of `columns_to_json`."""
    columns, types = told
    return {name: _from_json(value, types.get(name)) for name, value in columns.items()}


def dataset_record(
    made: Generation, profile: Mapping[str, Any], encoder: Mapping[str, Any], table: pa.Table | None = None
) -> dict[str, Any]:
    """Return the record of the dataset that is stored in the tar of a shard.

    `made`: the generation that the shard is for; its class names include those without samples. `table`: annotations
    with the columns of the dataset; None while the rows are not complete.
    """
    record: dict[str, Any] = {**_MARK, "generation": made.number, "streams": list(made.streams)}
    record |= {"classes": list(made.classes), "extras": dict(made.extras), "profile": dict(profile)}
    # Videos that were copied without encoding them do not depend on the build of ffmpeg.
    record["encoder"] = {} if profile.get("codec") == _COPY else dict(encoder)
    if table is not None:
        record["columns"] = [[field.name, str(field.type)] for field in table.schema]
    return record


def with_record(
    samples: Iterator[tuple[str, Mapping[str, bytes]]], record: Mapping[str, Any]
) -> Iterator[tuple[str, Mapping[str, bytes]]]:
    """Yield samples; the JSON of the first contains a record of the dataset as its field ``dataset``."""
    for number, (key, members) in enumerate(samples):
        if number:
            yield key, members
        else:
            yield key, {**members, "json": to_json(json.loads(members["json"]) | {_RECORD: record})}


def record_in(meta: Any) -> Mapping[str, Any] | None:
    """Return the record of the dataset in the JSON of a tar's first sample; None if there is none."""
    found = meta.get(_RECORD) if isinstance(meta, dict) else None
    return found if _is_record(_RECORD, found) else None


def _is_record(name: str, value: Any) -> bool:
    if name != _RECORD or not isinstance(value, dict) or not _MARK.items() <= value.items():
        return False
    return {"streams", "classes", "extras", "profile", "encoder"} <= value.keys()


def _is_ours(name: str) -> bool:
    return name in (*_PLAIN, _NESTED, _TYPES) or name.startswith(_SPLIT)


def _is_told(name: str, row: Mapping[str, Any]) -> bool:
    """Return whether a top-level field, or its absence, determines the value of a column.

    Not for ``caption`` if it equals ``text``: the field may have been made from that column.
    """
    return row[name] is None or not (name == "caption" and row[name] == row.get("text"))


def _lost_type(value: Any) -> str | None:
    """Return the name of a value's type if JSON lacks it, such as "nan" or a type of `_AS_TEXT`; else None."""
    if value is None or isinstance(value, str | int | float):
        return str(value) if isinstance(value, float) and not math.isfinite(value) else None
    return next((name for name, (kind, _) in _AS_TEXT.items() if isinstance(value, kind)), None)


def _from_json(value: Any, kind: str | None) -> Any:
    if kind is None:
        return value
    return _AS_TEXT[kind][1](value) if kind in _AS_TEXT else float(kind)


def _json_value(value: Any) -> Any:
    """Return a value that JSON can contain."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(name): _json_value(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_json_value(one) for one in value]
    if isinstance(value, bytes):
        return value.hex()
    return value.isoformat() if hasattr(value, "isoformat") else str(value)
