"""Commits a finished job: writes the ledger, the annotations and the first generation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from fastvid.errors import JobError
from fastvid.format.annotations.build_table import annotation_table
from fastvid.format.generations import Generation, ShardRecord, commit_generation
from fastvid.format.schema import LEDGER
from fastvid.runtime.file_names import encode_name
from fastvid.sharding.job.blocked import read_blocked
from fastvid.sharding.job.identity import digest
from fastvid.sharding.job.ledger import Part, problem_row, settle_rows, write_ledger
from fastvid.sharding.job.tar_annotations import annotation_row
from fastvid.sharding.sources.sources import SourceList
from fastvid.storage import Storage

# Hex digits of the job's identity that form the dataset's id, so that the same job makes the same dataset.
_ID_DIGITS = 32


def commit_job(
    storage: Storage,
    identity: Mapping[str, Any],
    found: SourceList,
    parts: Sequence[Part],
    *,
    profile: Mapping[str, Any],
    streams: Sequence[str] = ("rgb",),
    extras: Mapping[str, Any] | None = None,
    note: str,
    drop_duplicates: bool = False,
) -> pa.Table:
    """Write the ledger, commit the first generation, and return the ledger.

    `extras`: what else the generation says of its samples, such as how flow and sound were made. `drop_duplicates`:
    whether to hide samples of sources with the same bytes as an earlier one.
    """
    rows = [row for part in parts for row in part.rows]
    rows += [problem_row(source, *source.problem) for source in found.sources if source.problem is not None]
    rows, hidden = settle_rows(rows, read_blocked(storage), drop_duplicates=drop_duplicates)
    ledger = write_ledger(storage, rows, identity)
    shards = shard_records(parts, profile)
    if not shards:
        reasons = Counter(ledger["reason"].to_pylist()).most_common()
        raise JobError(
            f"none of {ledger.num_rows} sources could be packed: "
            + ", ".join(f"{count} {reason}" for reason, count in reasons),
            file=storage.url,
            hint=f"see {LEDGER} for the reason of each",
        )
    labels = {name: number for number, name in enumerate(found.classes)}
    generation = Generation(1, shards, tuple(streams), found.classes, note=note, extras=extras or {})
    table = hide_sources(annotation_table(annotation_rows(parts, found, labels)), hidden)
    commit_generation(storage, digest(identity)[:_ID_DIGITS], generation, table)
    return ledger


def hide_sources(annotations: pa.Table, sources: Collection[str]) -> pa.Table:
    """Return annotations in which all samples of some sources, given by their ids, are removed."""
    named = pc.is_in(annotations["source_id"], value_set=pa.array(sorted(sources), pa.string()))
    return hide_rows(annotations, named) if sources else annotations


def hide_rows(annotations: pa.Table, rows: Any) -> pa.Table:
    """Return annotations in which some rows, given as a boolean for each, are removed in addition to those that are."""
    index = annotations.column_names.index("removed")
    removed = pc.or_(annotations["removed"], rows)
    return annotations.set_column(index, annotations.schema.field(index), removed)


def shard_records(parts: Sequence[Part], profile: Mapping[str, Any]) -> tuple[ShardRecord, ...]:
    """Return the shard records of a generation, for all parts that have a shard."""
    return tuple(
        ShardRecord(part.stem, tar.bytes, tar.sha256, tar.samples, profile, part.encoder, part.signals)
        for part in parts
        if (tar := part.digest) is not None
    )


def annotation_rows(parts: Sequence[Part], found: SourceList, labels: Mapping[str, int]) -> list[dict[str, Any]]:
    """Return one row of annotations for each sample of the parts, in order."""
    sources = {encode_name(source.id): source for source in found.sources}
    return [annotation_row(sample, sources[sample.source_id], labels) for part in parts for sample in part.samples]
