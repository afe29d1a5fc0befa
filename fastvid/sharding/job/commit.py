"""Commits a finished job: writes the ledger, the annotations and the first generation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import pyarrow as pa

from fastvid.errors import JobError
from fastvid.format.dataset import annotation_table
from fastvid.format.generations import Generation, ShardRecord, commit_generation
from fastvid.format.schema import LEDGER
from fastvid.sharding.job.identity import digest
from fastvid.sharding.job.ledger import PackedSample, Part, problem_row, write_ledger
from fastvid.sharding.sources.sources import Source, SourceList, encode_name
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
    labels: Mapping[str, int] | None = None,
    extras: Mapping[str, Any] | None = None,
    note: str = "fastvid shard",
) -> pa.Table:
    """Write the ledger, commit the first generation, and return the ledger.

    Args:
        storage: The dataset's folder, which contains the shards.
        identity: The job's identity; determines the dataset's id.
        found: The job's sources.
        parts: The records of the shards, in order.
        profile: How the shards were encoded.
        labels: Numbers of the sources' labels; by default their positions in the classes.
        extras: Streams stored in addition to pictures.
        note: Origin of the generation.

    Raises:
        JobError: If no source could be packed; the ledger is written and lists the reasons.
    """
    rows = [row for part in parts for row in part.rows]
    rows += [problem_row(source, *source.problem) for source in found.sources if source.problem is not None]
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
    if labels is None:
        labels = {name: number for number, name in enumerate(found.classes)}
    names = ("rgb", "flow") if extras and "flow" in extras else ("rgb",)
    generation = Generation(1, shards, names, found.classes, note=note, extras=extras or {})
    table = annotation_table(annotation_rows(parts, found, labels))
    commit_generation(storage, digest(identity)[:_ID_DIGITS], generation, table)
    return ledger


def shard_records(parts: Sequence[Part], profile: Mapping[str, Any]) -> tuple[ShardRecord, ...]:
    """Return the shard records of a generation, for all parts that have a shard."""
    return tuple(
        ShardRecord(part.stem, tar.bytes, tar.sha256, tar.samples, profile, part.encoder)
        for part in parts
        if (tar := part.digest) is not None
    )


def annotation_rows(parts: Sequence[Part], found: SourceList, labels: Mapping[str, int]) -> list[dict[str, Any]]:
    """Return one row of annotations for each sample of the parts, in order."""
    sources = {encode_name(source.id): source for source in found.sources}
    return [_row(sample, sources[sample.source_id], labels) for part in parts for sample in part.samples]


def _row(sample: PackedSample, source: Source, labels: Mapping[str, int]) -> dict[str, Any]:
    rate = Fraction(sample.fps)
    row: dict[str, Any] = {
        "key": sample.key,
        "source_id": sample.source_id,
        "label": None if source.label is None else labels[source.label],
        "num_frames": sample.num_frames,
        "removed": False,
        "fps": float(rate),
        "width": sample.width,
        "height": sample.height,
        "duration": float(sample.num_frames / rate),
    }
    # A table may have a column of our names for something else, such as its own count of frames.
    row |= {f"source_{name}" if name in row else name: value for name, value in source.columns.items()}
    if sample.parent is not None:
        row |= {"parent": sample.parent, "start_seconds": sample.start_seconds, "end_seconds": sample.end_seconds}
    asked = {"asked_start_seconds": source.start, "asked_end_seconds": source.end}
    row |= {name: seconds for name, seconds in asked.items() if seconds is not None}
    return row
