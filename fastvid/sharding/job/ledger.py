"""The ledger: one row for every source, and the parts of it that a running job leaves behind after each shard."""

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
    """A sample of a shard, as the annotations need it.

    Attributes:
        source_id: Its source.
        key: Its key.
        num_frames: Frames of its first video stream.
        parent: The source it is a part of, when it is only a part.
        start_seconds: Where in the parent it starts.
    """

    source_id: str
    key: str
    num_frames: int
    parent: str | None = None
    start_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """What is known of one finished shard.

    Attributes:
        stem: Name of the shard.
        rows: Ledger rows of the sources that were assigned to it.
        samples: Its samples, in the order of the tar.
        digest: Of its tar; None when no source of it could be packed, and there is no tar.
        encoder: Build of the encoder that wrote it.
    """

    stem: str
    rows: Sequence[Row]
    samples: Sequence[PackedSample]
    digest: TarDigest | None
    encoder: Mapping[str, Any] = field(default_factory=dict)


def ledger_row(source: Source, outcome: Outcome, shard: str | None) -> Row:
    """The row of a source that was tried."""
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
    """The row of a source that could not even be tried."""
    return ledger_row(source, Outcome(-1, reason=reason, message=message), None)


def part_name(stem: str) -> str:
    """File of a shard's part."""
    return f"{LEDGER_PARTS}/{stem}.parquet"


def part_stems(storage: Storage) -> set[str]:
    """Shards whose part is there."""
    names = storage.list(f"{LEDGER_PARTS}/data-")
    return {name.removeprefix(f"{LEDGER_PARTS}/").removesuffix(".parquet") for name in names}


def write_part(storage: Storage, part: Part) -> None:
    """Writes what is known of a finished shard, atomically."""
    extra = {
        "samples": [asdict(sample) for sample in part.samples],
        "digest": None if part.digest is None else asdict(part.digest),
        "encoder": dict(part.encoder),
    }
    storage.write(part_name(part.stem), to_parquet(_table(part.rows, extra)))


def read_part(storage: Storage, stem: str) -> Part:
    """What `write_part` wrote.

    Raises:
        FormatError: It is broken.
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
    """Writes the ledger of a whole job, sorted by source, and returns it."""
    table = _table(sorted(rows, key=lambda row: row["source_id"]), {"job": dict(identity)})
    storage.write(LEDGER, to_parquet(table))
    return table


def rows_table(rows: Iterable[Row]) -> pa.Table:
    """Ledger rows as a table, sorted by source."""
    return _table(sorted(rows, key=lambda row: row["source_id"]), {})


def read_ledger(storage: Storage) -> tuple[pa.Table, dict[str, Any]]:
    """The ledger of a finished job, and that job's identity.

    Raises:
        StorageError: There is none.
        FormatError: It is broken.
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
        raise FormatError(f"ledger does not parse: {error}", file=name) from error
