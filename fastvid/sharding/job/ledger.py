"""The ledger: one row per source, written in parts, one after each shard, while a job runs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import pyarrow as pa

from fastvid.errors import FormatError
from fastvid.format.parquet import from_parquet, to_parquet
from fastvid.format.schema import LEDGER, LEDGER_PARTS, LEDGER_SCHEMA
from fastvid.format.tar import TarDigest
from fastvid.media.reasons import Reason
from fastvid.sharding.sources.sources import Source, encode_name, public_path
from fastvid.sharding.work.messages import Outcome
from fastvid.storage import Storage

_METADATA: Final = b"fastvid"

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class PackedSample:
    """A sample of a shard, for the annotations.

    Attributes:
        source_id: Its source.
        key: Its key.
        num_frames: Frames of its first video stream.
        fps: Frames per second of that stream, as a fraction such as ``30000/1001``.
        width: Width of its frames in pixels.
        height: Height of its frames in pixels.
        parent: The source that it is a segment of; None if it is a whole source.
        start_seconds: Start time of the segment in the parent.
        end_seconds: End time of the segment in the parent.
    """

    source_id: str
    key: str
    num_frames: int
    fps: str
    width: int
    height: int
    parent: str | None = None
    start_seconds: float | None = None
    end_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """The record of one finished shard.

    Attributes:
        stem: Name of the shard.
        rows: Ledger rows of the sources assigned to it.
        samples: Its samples, in the order of the tar.
        digest: Digest of its tar; None if none of its sources could be packed, so there is no tar.
        encoder: Build of the encoder that wrote it.
    """

    stem: str
    rows: Sequence[Row]
    samples: Sequence[PackedSample]
    digest: TarDigest | None
    encoder: Mapping[str, Any] = field(default_factory=dict)


def ledger_row(source: Source, outcome: Outcome, shard: str | None) -> Row:
    """Return the row of a source that was processed."""
    packed = outcome.reason is None
    streams = [data for sample in outcome.samples for data in sample.streams.values()]
    return {
        "source_id": encode_name(source.id),
        "path": encode_name(public_path(source.path)),
        "status": "packed" if packed else "rejected",
        "reason": None if outcome.reason is None else outcome.reason.value,
        "message": outcome.message or None,
        "key": source.key if packed else None,
        "shard": shard if packed else None,
        "bytes_in": outcome.bytes_in or source.size,
        "bytes_out": sum(map(len, streams)) if packed else None,
        "num_frames": sum(sample.num_frames for sample in outcome.samples) if packed else None,
        "seconds": outcome.seconds,
        "warnings": list(outcome.warnings),
    }


def problem_row(source: Source, reason: Reason, message: str) -> Row:
    """Return the row of a source that could not be processed at all."""
    return ledger_row(source, Outcome(-1, reason=reason, message=message), None)


def part_name(stem: str) -> str:
    """Return the file name of a shard's part."""
    return f"{LEDGER_PARTS}/{stem}.parquet"


def part_stems(storage: Storage) -> set[str]:
    """Return the shards that have a part."""
    names = storage.list(f"{LEDGER_PARTS}/data-")
    return {name.removeprefix(f"{LEDGER_PARTS}/").removesuffix(".parquet") for name in names}


def write_part(storage: Storage, part: Part) -> None:
    """Write the record of a finished shard atomically."""
    extra = {
        "samples": [asdict(sample) for sample in part.samples],
        "digest": None if part.digest is None else asdict(part.digest),
        "encoder": dict(part.encoder),
    }
    storage.write(part_name(part.stem), to_parquet(_table(part.rows, extra)))


def read_part(storage: Storage, stem: str) -> Part:
    """Return the part that `write_part` wrote.

    Raises:
        FormatError: If it is broken.
    """
    table, extra = _read(storage, part_name(stem))
    digest = extra["digest"]
    return Part(
        stem=stem,
        rows=table.to_pylist(),
        samples=[PackedSample(**sample) for sample in extra["samples"]],
        digest=None if digest is None else TarDigest(**digest),
        encoder=extra["encoder"],
    )


def write_ledger(storage: Storage, rows: Iterable[Row], identity: Mapping[str, Any]) -> pa.Table:
    """Write the ledger of a whole job, sorted by source, and return it."""
    table = _table(sorted(rows, key=lambda row: row["source_id"]), {"job": dict(identity)})
    storage.write(LEDGER, to_parquet(table))
    return table


def rows_table(rows: Iterable[Row]) -> pa.Table:
    """Return ledger rows as a table, sorted by source."""
    return _table(sorted(rows, key=lambda row: row["source_id"]), {})


def read_ledger(storage: Storage) -> tuple[pa.Table, dict[str, Any]]:
    """Return the ledger of a finished job, and that job's identity.

    Raises:
        StorageError: If there is no ledger.
        FormatError: If it is broken.
    """
    table, extra = _read(storage, LEDGER)
    return table, extra.get("job", {})


def _table(rows: Sequence[Row], extra: Mapping[str, Any]) -> pa.Table:
    schema = LEDGER_SCHEMA.with_metadata({_METADATA: json.dumps(extra, sort_keys=True).encode()})
    return pa.Table.from_pylist(list(rows), schema=schema)


def _read(storage: Storage, name: str) -> tuple[pa.Table, dict[str, Any]]:
    try:
        table = from_parquet(storage.read(name), file=name)
        metadata = (table.schema.metadata or {}).get(_METADATA, b"{}")
        return table, json.loads(metadata)
    except ValueError as error:
        raise FormatError(f"cannot parse the ledger: {error}", file=name) from error
