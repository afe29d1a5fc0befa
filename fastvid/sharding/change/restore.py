"""Restores a dataset from fastvid's own tars alone: its records and annotations as the tars tell them."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import pyarrow as pa

from fastvid.errors import FormatError, UsageError
from fastvid.format.annotations.build_table import annotation_table, fact_columns
from fastvid.format.annotations.signals import read_signals, signals_file
from fastvid.format.generations import Generation, ShardRecord, commit_generation
from fastvid.format.indexed import IndexedSample
from fastvid.format.schema import ANNOTATION_FIELDS, DATASET_JSON, FACT_FIELDS, SIGNALS
from fastvid.format.tar import read_members
from fastvid.format.write_shard import index_shard
from fastvid.runtime.hashing import sha256
from fastvid.sharding.job.blocked import read_blocked
from fastvid.sharding.job.identity import digest
from fastvid.sharding.job.lock import lock_folder
from fastvid.sharding.job.tar_annotations import stored_record, stored_row
from fastvid.sharding.sources.tars import find_tars
from fastvid.storage import LocalStorage, open_storage
from fastvid.storage.transfer import link_or_copy

_LOG = logging.getLogger(__name__)

_ID_DIGITS: Final = 32  # hex digits of the tars' digests that form the dataset's id
_UNITS: Final = ("s", "ms", "us", "ns")
_TYPES: Final = {
    str(kind): kind
    for kind in (
        *(pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()),
        *(pa.float16(), pa.float32(), pa.float64(), pa.bool_(), pa.string(), pa.large_string(), pa.binary()),
        *(
            pa.large_binary(),
            pa.date32(),
            pa.date64(),
            pa.null(),
            *map(pa.timestamp, _UNITS),
            *map(pa.duration, _UNITS),
        ),
        *(pa.time32("s"), pa.time32("ms"), pa.time64("us"), pa.time64("ns")),
    )
}


@dataclass(frozen=True, slots=True)
class Restored:
    """The result of `restore_dataset`."""

    dataset: str
    generation: Generation
    replaced: tuple[str, ...]  # tars that were left out, because later ones contain their samples


@dataclass(frozen=True, slots=True)
class _Tar:
    folder: LocalStorage
    stem: str
    record: Mapping[str, Any]

    @property
    def age(self) -> tuple[int, str]:
        return int(self.record["generation"]), self.stem


def are_own(sources: Sequence[str]) -> bool:
    """Return whether all tars of the sources say which dataset they are of."""
    paths = find_tars(sources)
    foreign = [path for path in paths if _read(path) is None]
    if foreign and len(foreign) < len(paths):
        raise UsageError(
            f"{len(foreign)} of {len(paths)} tars are not a fastvid dataset's own",
            file=foreign[0],
            hint="index them into another folder",
        )
    return not foreign


def restore_dataset(sources: Sequence[str], out: str | None = None) -> Restored:
    """Make a dataset of fastvid's own tars without any other file of it.

    Classes (also those without samples), streams, extras, profiles, encoders and annotations with their types are as
    when the tars were written; signals are restored if
    their files are beside the tars. Of what the tars tell about the whole dataset, the tar of the newest generation is
    right. If a sample is in two tars, as after `fastvid compact`, the tar of the older generation is left out. Later
    relabels are lost, and removed samples come back unless `fastvid compact` deleted them or they are blocked in the
    folder.
    """
    tars = sorted(filter(None, map(_read, find_tars(sources))), key=lambda tar: tar.stem)
    storage = open_storage(out if out is not None else tars[0].folder.url)
    if not isinstance(storage, LocalStorage):
        raise UsageError("tars are indexed on a local disk", file=storage.url)
    stems = [tar.stem for tar in tars]
    if len(set(stems)) < len(stems) or (out is None and len({tar.folder.url for tar in tars}) > 1):
        raise UsageError("the tars are of several folders", file=storage.url, hint="restore one dataset at a time")
    with lock_folder(storage):
        if storage.exists(DATASET_JSON):
            raise UsageError("a dataset exists already", file=storage.url, hint="name a new folder with --out")
        chosen, replaced = _without_replaced(tars)
        newest = max(chosen, key=lambda tar: tar.age).record
        classes = list(newest["classes"])
        for tar in sorted(chosen, key=lambda tar: tar.age, reverse=True):
            classes += [name for name in tar.record["classes"] if name not in classes]
        blocked, shards, rows = read_blocked(storage), list[ShardRecord](), list[dict[str, Any]]()
        for tar in chosen:
            if tar.folder.url != storage.url:
                link_or_copy(tar.folder, f"{tar.stem}.tar", storage, f"{tar.stem}.tar", None)
            view = storage.map(f"{tar.stem}.tar")
            found = sha256(view)
            samples = index_shard(storage, tar.stem, streams=tuple(newest["streams"]), tar_sha256=found)
            rows += [_row(sample, tar, classes, sample.meta.get("source_sha256") in blocked) for sample in samples]
            profile, encoder = tar.record["profile"], tar.record["encoder"]
            frames = sum(sample.streams[0].info.num_frames for sample in samples)
            signals = _signals(storage, tar, frames) if SIGNALS in newest["extras"] else ""
            shards.append(ShardRecord(tar.stem, len(view), found, len(samples), profile, encoder, signals))
        extras = dict(newest["extras"])
        if not all(shard.signals for shard in shards) and extras.pop(SIGNALS, None) is not None:
            _LOG.warning("the dataset is restored without signals: their files are not beside all of the tars")
            shards = [replace(shard, signals="") for shard in shards]
        generation = Generation(
            1,
            tuple(shards),
            tuple(newest["streams"]),
            tuple(classes),
            note="fastvid index: restored from the tars",
            extras=extras,
        )
        dataset_id = digest({"tars": [[shard.name, shard.sha256] for shard in shards]})[:_ID_DIGITS]
        table = _typed(annotation_table(rows), newest.get("columns", ()))
        made = commit_generation(storage, dataset_id, generation, table)
    return Restored(storage.url, made, replaced)


def _read(path: str) -> _Tar | None:
    """Return a tar with its record of the dataset; None if it has none."""
    folder, name = os.path.split(path)
    storage = open_storage(folder)
    assert isinstance(storage, LocalStorage)  # `find_tars` refuses others
    view = storage.map(name)
    try:
        first = next((member for member in read_members(view) if member.suffix == "json"), None)
        meta = json.loads(bytes(view[first.offset : first.offset + first.size])) if first else None
    except (FormatError, ValueError, RecursionError):
        return None
    record = stored_record(meta) if isinstance(meta, dict) else None
    return None if record is None else _Tar(storage, name.removesuffix(".tar"), record)


def _signals(storage: LocalStorage, tar: _Tar, frames: int) -> str:
    """Take over the signals of a tar, which are in a file beside it; return their SHA-256, "" if there is no file."""
    name = signals_file(tar.stem)
    if not tar.folder.exists(name):
        return ""
    if tar.folder.url != storage.url:
        link_or_copy(tar.folder, name, storage, name, None)
    found = sha256(storage.map(name))
    read_signals(storage, ShardRecord(tar.stem, 0, "", 0, signals=found), frames)
    return found


def _without_replaced(tars: Sequence[_Tar]) -> tuple[list[_Tar], tuple[str, ...]]:
    """Return the tars without those whose samples a tar of a later generation has, and the names of these."""
    known: set[str] = set()
    chosen, replaced = [], []
    for tar in sorted(tars, key=lambda tar: tar.age, reverse=True):
        keys = {member.key for member in read_members(tar.folder.map(f"{tar.stem}.tar"))}
        if known.isdisjoint(keys):
            chosen.append(tar)
            known |= keys
        else:
            _LOG.info("%s is left out: a later tar contains its samples", tar.stem)
            replaced.append(tar.stem)
    return sorted(chosen, key=lambda tar: tar.stem), tuple(sorted(replaced))


def _row(sample: IndexedSample, tar: _Tar, classes: Sequence[str], is_blocked: bool) -> dict[str, Any]:
    """Return the annotations of a sample; its label is numbered in `classes`."""
    row, info = stored_row(sample.meta), sample.streams[0].info
    label, names = row.pop("label", None), tar.record["classes"]
    if label is not None and label < len(names):
        label = classes.index(names[label])
    facts = {
        "key": sample.key,
        "source_id": sample.meta.get("source_id", sample.key),
        "label": label,
        "removed": is_blocked,
        **fact_columns(info.num_frames, info.fps, info.width, info.height),
    }
    return facts | row


def _typed(table: pa.Table, columns: Sequence[tuple[str, str]]) -> pa.Table:
    """Return a table with columns in the order, and of the types, that the tars tell."""
    for name, text in columns:
        if name in ANNOTATION_FIELDS | FACT_FIELDS or (kind := _type(text)) is None:
            continue
        if name not in table.column_names:
            table = table.append_column(name, pa.nulls(table.num_rows, kind))
            continue
        try:
            made = table[name].cast(kind)
        except pa.ArrowInvalid:  # a tar of an earlier generation has values of another type
            continue
        table = table.set_column(table.column_names.index(name), name, made)
    told = [name for name, _ in columns if name in table.column_names]
    return table.select([*told, *(name for name in table.column_names if name not in told)])


def _type(text: str) -> pa.DataType | None:
    """Return the type that pyarrow prints as `text`; None for a type that a column is not restored to."""
    if text in _TYPES:
        return _TYPES[text]
    if found := re.fullmatch(r"list<\w+: (.*)>", text):
        inner = _type(found[1])
        return None if inner is None else pa.list_(inner)
    if found := re.fullmatch(r"timestamp\[(\w+), tz=(.+)\]", text):
        return pa.timestamp(found[1], found[2])
    if found := re.fullmatch(r"decimal128\((\d+), (-?\d+)\)", text):
        return pa.decimal128(int(found[1]), int(found[2]))
    return None
