"""Merges finished shards of a job into an existing dataset: copies them, commits a generation, extends the ledger.

Every step is idempotent, so an interrupted merge can be repeated: a copy with the right checksum is reused, a
generation that contains the samples is not committed twice, and ledger rows replace themselves.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from fastvid.format.annotations.build_table import annotation_table
from fastvid.format.dataset import change
from fastvid.format.generations import Generation, ShardRecord, read_annotations, read_generation
from fastvid.format.in_place import common_root
from fastvid.format.schema import IN_PLACE, LEDGER, LEDGER_SCHEMA, shard_stem
from fastvid.runtime import faults
from fastvid.runtime.units import things
from fastvid.sharding.change.edit import ClassNames
from fastvid.sharding.job.blocked import read_blocked
from fastvid.sharding.job.commit import annotation_rows, hide_sources, shard_records
from fastvid.sharding.job.ledger import (
    Part,
    Row,
    edit_ledger,
    is_nameless,
    problem_row,
    read_ledger,
    settle_rows,
    write_ledger,
)
from fastvid.sharding.sources.sources import SourceList
from fastvid.storage import Storage
from fastvid.storage.transfer import copy_file, sha256_of


@dataclass(frozen=True, slots=True)
class KnownSource:
    """The ledger's record of a source."""

    path: str
    bytes_in: int  # size of the file in bytes
    key: str | None  # key of its samples; None if it was not packed
    reason: str | None
    seconds: float | None


def known_sources(storage: Storage, generation: Generation) -> dict[str, KnownSource]:
    """Return every known source by name. A dataset without a ledger gets one, built from its annotations."""
    if not storage.exists(LEDGER):
        write_ledger(storage, _ledger_of(storage, generation), {})
    names = ("source_id", "path", "bytes_in", "key", "reason", "seconds")
    ledger = read_ledger(storage)[0]
    columns = [ledger[name].to_pylist() for name in names]
    return {name: KnownSource(path, size or 0, *rest) for name, path, size, *rest in zip(*columns, strict=True)}


def merge_parts(
    storage: Storage,
    scratch: Storage,
    parts: Sequence[Part],
    found: SourceList,
    profile: Mapping[str, Any],
    *,
    drop_duplicates: bool = False,
) -> tuple[int, pa.Table]:
    """Add the shards of a finished job to a dataset.

    `drop_duplicates`: whether to hide samples of sources with the same bytes as an earlier one. Returns the number
    of the current generation, and the ledger rows of the job's sources.
    """
    _, generation = read_generation(storage)
    samples = [sample for part in parts for sample in part.samples]
    new = [row for part in parts for row in part.rows]
    known = {row["source_id"] for row in new}
    before = [row for row in read_ledger(storage)[0].to_pylist() if row["source_id"] not in known]
    present = set(read_annotations(storage, generation)["key"].to_pylist())
    if any(sample.key not in present for sample in samples):
        records = _copy_all(storage, scratch, parts, generation, profile)
        faults.reach("copied")

        def edit(old: Generation, table: pa.Table) -> tuple[Generation, pa.Table]:
            # Read again for every attempt: a takedown blocks a source before it hides the samples that it finds.
            _, hidden = settle_rows(new, read_blocked(storage), before=before, drop_duplicates=drop_duplicates)
            made, joined = _extended(old, table, records, parts, found, hidden)
            return replace(made, extras=_extras(made, records, found)), joined

        generation = change(storage, edit)
    return generation.number, _extend_ledger(storage, parts, found, generation, drop_duplicates=drop_duplicates)


def _ledger_of(storage: Storage, generation: Generation) -> list[Row]:
    """Return ledger rows for a dataset without a ledger, as far as its samples show."""
    table = read_annotations(storage, generation)
    stems = [shard.name for shard in generation.shards for _ in range(shard.samples)]
    rows: dict[str, Row] = {}
    columns = (table[name].to_pylist() for name in ("source_id", "key", "num_frames"))
    for stem, source, key, frames in zip(stems, *columns, strict=True):
        if source in rows:
            rows[source]["num_frames"] += frames  # another segment of the same video
        else:
            rows[source] = dict.fromkeys(LEDGER_SCHEMA.names) | {
                "source_id": source, "path": source, "status": "packed", "key": key, "shard": stem,
                "num_frames": frames, "warnings": [],
            }  # fmt: skip
    return list(rows.values())


def _copy_all(
    storage: Storage, scratch: Storage, parts: Sequence[Part], generation: Generation, profile: Mapping[str, Any]
) -> list[ShardRecord]:
    numbers = [int(found[1]) for shard in generation.shards if (found := re.match(r"data-(\d+)", shard.name))]
    number = max(numbers, default=-1) + 1
    records: list[ShardRecord] = []
    for part in parts:
        if part.digest is None:
            continue
        (record,) = shard_records([replace(part, stem=shard_stem(number))], profile)
        while storage.exists(record.data) and not _same(storage, record):
            number += 1
            record = replace(record, name=shard_stem(number))
        _copy(storage, scratch, part.stem, record)
        records.append(record)
        number += 1
    return records


def _same(storage: Storage, record: ShardRecord) -> bool:
    """Return whether a shard is there already, left by an interrupted run."""
    return storage.size(record.data) == record.bytes and sha256_of(storage, record.data) == record.sha256


def _copy(storage: Storage, scratch: Storage, stem: str, record: ShardRecord) -> None:
    if not storage.exists(record.data):
        copy_file(scratch, f"{stem}.{record.suffixes[0]}", storage, record.data)
    for suffix in record.suffixes[1:]:
        storage.write(f"{record.name}.{suffix}", scratch.read(f"{stem}.{suffix}"))


def _extras(old: Generation, records: Sequence[ShardRecord], found: SourceList) -> Mapping[str, Any]:
    """Return the extras of a generation with new shards, whose videos in place may be below another folder."""
    paths = [source.path for source in found.sources if source.problem is None]
    if not paths or not any(record.is_in_place for record in records):
        return old.extras
    known = [] if old.root is None else [f"{old.root}/file"]
    return {**old.extras, IN_PLACE: {"root": common_root([*known, *paths])}}


def number_labels(old: Generation, found: SourceList) -> tuple[tuple[str, ...], dict[str, int]]:
    """Return the classes of a generation with those of new sources, and the number of each label of the sources."""
    used = {name for source in found.sources for name in source.class_names}
    ordered = [name for name in found.classes if name in used]
    classes = ClassNames(old.classes, ordered, grow=not all(name.isdecimal() for name in ordered))
    labels = {name: label for name in ordered if (label := classes.index(name, "")) is not None}
    return tuple(classes.names), labels


def _extended(
    old: Generation,
    table: pa.Table,
    records: Sequence[ShardRecord],
    parts: Sequence[Part],
    found: SourceList,
    hidden: Collection[str],
) -> tuple[Generation, pa.Table]:
    """Return a generation with the new shards after the old ones."""
    samples = [sample for part in parts for sample in part.samples]
    classes, labels = number_labels(old, found)
    made = replace(
        old,
        shards=(*old.shards, *records),
        classes=classes,
        note=f"add {things(len(samples), 'sample')} of {things(len({s.source_id for s in samples}), 'source')}",
    )
    return made, _joined(table, hide_sources(annotation_table(annotation_rows(parts, found, labels)), hidden))


def _joined(old: pa.Table, new: pa.Table) -> pa.Table:
    """Concatenate the tables with the columns of both; a column whose types differ becomes text."""
    for name in set(old.column_names) & set(new.column_names):
        kinds = old.schema.field(name).type, new.schema.field(name).type
        if kinds[0] != kinds[1] and not any(pa.types.is_null(kind) for kind in kinds):
            old, new = _as_text(old, name), _as_text(new, name)
    return pa.concat_tables([old, new], promote_options="default").combine_chunks()


def _as_text(table: pa.Table, name: str) -> pa.Table:
    values = [None if value is None else str(value) for value in table[name].to_pylist()]
    return table.set_column(table.column_names.index(name), name, pa.array(values, pa.string()))


def _extend_ledger(
    storage: Storage, parts: Sequence[Part], found: SourceList, generation: Generation, *, drop_duplicates: bool
) -> pa.Table:
    """Write the ledger, extended by the rows of the job's sources, and return these rows."""
    names = {shard.sha256: shard.name for shard in generation.shards}
    made: list[Row] = []
    for part in parts:
        stem = None if part.digest is None else names.get(part.digest.sha256)
        made += [row | {"shard": None if row["shard"] is None else stem} for row in part.rows]
    made += [problem_row(source, *source.problem) for source in found.sources if source.problem is not None]
    known, blocked = {row["source_id"] for row in made}, read_blocked(storage)
    rows: list[Row] = []

    def edit(before: list[Row]) -> list[Row]:
        nonlocal rows
        others = [row for row in before if row["source_id"] not in known]
        rows, _ = settle_rows(made, blocked, before=others, drop_duplicates=drop_duplicates)
        # The row of a takedown says when and why, so a refused copy does not replace it.
        gone = {row["source_id"] for row in before if is_nameless(row)}
        others += [row for row in before if row["source_id"] in known & gone]
        return [*others, *(row for row in rows if row["source_id"] not in gone)]

    edit_ledger(storage, edit)
    faults.reach("merged")
    return pa.Table.from_pylist(sorted(rows, key=lambda row: row["source_id"]), schema=LEDGER_SCHEMA)
