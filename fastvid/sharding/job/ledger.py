"""The ledger, with one row per source, and the block list. While a job runs, each finished shard adds a part of it.
The block list has the SHA-256 of the bytes of sources that were taken down, which no job packs again. It is one JSON
file, ``blocked.json``, swapped atomically; jobs read it when they begin and again when they commit.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Annotated, Any, Final, Literal

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from fastvid.errors import ConflictError, FormatError, UsageError
from fastvid.format.generations import Generation, ShardRecord, read_annotations, read_generation
from fastvid.format.schema import BLOCKED, LEDGER, LEDGER_PARTS, LEDGER_SCHEMA, from_parquet, read_facts, to_parquet
from fastvid.format.tar import TarDigest
from fastvid.media.reasons import Reason
from fastvid.runtime.names import encode_name
from fastvid.runtime.values import as_type
from fastvid.sharding.sources.sources import Source, bare_tag, public_path
from fastvid.sharding.work.tasks import EncodedSample, Outcome, parse_record
from fastvid.storage import Storage

_METADATA: Final = b"fastvid"
_ATTEMPTS: Final = 10
# Hex digits of a source's SHA-256 that replace its name. Of 37 datasets with a billion sources, one has a collision.
_ID_DIGITS: Final = 16
_GONE: Final = "removed:"
CLIP: Final = r"#[\d.]*-[\d.]*$"
"""Pattern of the end of a clip's source id: its start and end in seconds, either of which may be missing."""

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class PackedSample:
    """What the annotations need to know of a sample of a shard."""

    source_id: str
    key: str
    num_frames: int  # frames of its first video stream
    fps: str  # frames per second of that stream, as a fraction such as ``30000/1001``
    width: int  # width of its frames in pixels
    height: int  # height of its frames in pixels
    parent: str | None = None
    start_seconds: float | None = None
    end_seconds: float | None = None
    # frames of the parent that were left out because of damage; None if the parent is not damaged.
    bad_frames: int | None = None

    @classmethod
    def of(cls, source: Source, sample: EncodedSample) -> PackedSample:
        """Return what is known of a sample of a source."""
        told: dict[str, Any] = {one.name: sample.meta.get(one.name) for one in fields(cls)}
        told["source_id"], told["key"] = encode_name(source.id), sample.key
        return cls(**told)


@dataclass(frozen=True, slots=True)
class Part:
    """The record of one finished shard."""

    stem: str
    rows: Sequence[Row]  # ledger rows of the sources assigned to it
    samples: Sequence[PackedSample]  # its samples, in the order of the tar
    digest: TarDigest | None
    encoder: Mapping[str, Any] = field(default_factory=dict)
    signals: str = ""


def shard_records(parts: Sequence[Part], profile: Mapping[str, Any]) -> tuple[ShardRecord, ...]:
    """Return the shard records of a generation, for all parts that have a shard."""
    return tuple(
        ShardRecord(part.stem, tar.bytes, tar.sha256, tar.samples, profile, part.encoder, part.signals)
        for part in parts
        if (tar := part.digest) is not None
    )


def ledger_row(source: Source, outcome: Outcome, shard: str | None) -> Row:
    """Return the row of a source that was processed."""
    if outcome.reason is Reason.BLOCKED:
        return blocked_row(outcome.source_sha256) | {"seconds": outcome.seconds}
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
        "warnings": [*outcome.warnings, *source.notes],
        "source_sha256": outcome.source_sha256 or None,
        "source_tag": bare_tag(source.tag) if source.tag else None,
    }


def problem_row(source: Source, reason: Reason, message: str) -> Row:
    """Return the row of a source that could not be processed at all."""
    return ledger_row(source, Outcome(-1, reason=reason, message=message), None)


def blocked_row(digest: str) -> Row:
    """Return the row of a source that was refused because its hash is on the block list, without name and path."""
    return _nameless(f"{_GONE}{digest[:_ID_DIGITS]}", digest) | {
        "status": "rejected",
        "reason": Reason.BLOCKED.value,
        "message": Reason.BLOCKED.meaning,
    }


def removed_row(digest: str | None, message: str, *, number: int = 0) -> Row:
    """Return the row of a source that was taken down, without name and path.

    `digest`: SHA-256 of the source's bytes, hex; None if it is unknown. `number`: distinguishes the rows of sources
    without a hash.
    """
    name = f"{_GONE}unknown-{number}" if digest is None else f"{_GONE}{digest[:_ID_DIGITS]}"
    return _nameless(name, digest) | {"status": "removed", "message": message}


def _nameless(name: str, digest: str | None) -> Row:
    return dict.fromkeys(LEDGER_SCHEMA.names) | {
        "source_id": name, "path": "", "warnings": [], "source_sha256": digest,
    }  # fmt: skip


def settle_rows(
    rows: Sequence[Row], blocked: Iterable[str], *, before: Iterable[Row] = (), drop_duplicates: bool = False
) -> tuple[list[Row], set[str]]:
    """Return the rows of a finished job as its ledger stores them, and the sources whose samples must be hidden.

    Samples of sources that were blocked after they had been encoded must be hidden; their rows lose their names. A
    source with the same bytes as another one (and, for a clip, the same seconds) gets the warning ``duplicate``. The
    one that is first by id is the original, so the result does not depend on the order of encoding.

    `blocked`: SHA-256 of blocked sources. `before`: rows of the dataset that the job adds to; their sources count as
    the originals. `drop_duplicates`: whether to hide duplicates. Their bytes stay in the shards until `fastvid
    compact`, because duplicates are known only after all machines have read all sources.
    """
    first, refused = dict[tuple[str, str], str](), frozenset(blocked)
    for row in sorted(before, key=lambda row: row["source_id"]):
        if (content := _content(row)) is not None:
            first.setdefault(content, row["source_id"])
    kept: dict[str, Row] = {}
    hidden: set[str] = set()
    # Rows of takedowns come first: they say when and why, which rows of copies that are blocked here do not.
    for row in sorted(rows, key=lambda row: (not is_nameless(row), row["source_id"])):
        if row["status"] == "packed" and row["source_sha256"] in refused:
            hidden.add(row["source_id"])
            row = blocked_row(row["source_sha256"]) | {"seconds": row["seconds"]}
        elif (content := _content(row)) is not None:
            original = first.setdefault(content, row["source_id"])
            if original != row["source_id"]:
                row = row | {"warnings": [*row["warnings"], "duplicate"], "message": f"the same bytes as {original}"}
                if drop_duplicates:
                    hidden.add(row["source_id"])
                    row["status"] = "removed"
        kept.setdefault(row["source_id"], row)
    return list(kept.values()), hidden


def is_nameless(row: Row) -> bool:
    """Return whether a row is of a source that was taken down or blocked, and so has no name."""
    return bool(row["source_id"].startswith(_GONE) and not row["path"])


def whole_name(source_id: str) -> str:
    """Return the name of a source's video: the id, for a clip without its start and end."""
    return re.sub(CLIP, "", source_id)


def _content(row: Row) -> tuple[str, str] | None:
    """Return a value that is equal for sources with the same content: the hash, and the seconds of a clip.

    None for a source without samples or without a hash.
    """
    if row["status"] != "packed" or row["source_sha256"] is None:
        return None
    clip = re.search(CLIP, row["source_id"])
    return row["source_sha256"], clip[0] if clip else ""


def part_name(stem: str) -> str:
    """Return the file name of a shard's part."""
    return f"{LEDGER_PARTS}/{stem}.parquet"


def part_stems(storage: Storage) -> set[str]:
    """Return the names of the shards that have a part of the ledger, which are finished."""
    names = (name.removeprefix(f"{LEDGER_PARTS}/") for name in storage.list(f"{LEDGER_PARTS}/"))
    return {name.removesuffix(".parquet") for name in names if "/" not in name and name.endswith(".parquet")}


def write_part(storage: Storage, part: Part) -> None:
    """Write the record of a finished shard atomically."""
    extra = {name: value for name, value in asdict(part).items() if name not in ("stem", "rows")}
    storage.write(part_name(part.stem), to_parquet(_table(part.rows, extra)))


def read_part(storage: Storage, stem: str) -> Part:
    """Return the part that `write_part` wrote."""
    table, extra = _parse(storage.read(part_name(stem)), part_name(stem))
    return parse_record(extra | {"stem": stem, "rows": table.to_pylist()}, Part, part_name(stem))


def write_ledger(storage: Storage, rows: Iterable[Row], identity: Mapping[str, Any]) -> pa.Table:
    """Write the ledger of a whole job, sorted by source, and return it."""
    table = rows_table(rows, {"job": dict(identity)})
    storage.write(LEDGER, to_parquet(table))
    return table


def edit_ledger(storage: Storage, edit: Callable[[list[Row]], list[Row] | None]) -> None:
    """Replace the rows of a dataset's ledger by the result of `edit`, unless that is None.

    If another process changes the ledger meanwhile, `edit` is called again with the new rows.
    """
    for _ in range(_ATTEMPTS):
        content = storage.read(LEDGER)
        table, extra = _parse(content, LEDGER)
        rows = edit(table.to_pylist())
        if rows is None:
            return
        if storage.swap(LEDGER, to_parquet(rows_table(rows, extra)), content):
            return
    raise ConflictError("the ledger kept being changed by others", file=storage.url, hint="run the command again")


def follow_shards(storage: Storage) -> None:
    """Write where samples are now into ledger rows that name a shard of an earlier generation; null if nowhere."""

    def edit(rows: list[Row]) -> list[Row] | None:
        # Read the generation after the rows: an addition writes them after its generation.
        _, generation = read_generation(storage)
        names = {None, *(shard.name for shard in generation.shards)}
        now = sample_rows(generation, read_annotations(storage, generation))
        moved = [row for row in rows if row["shard"] not in names]
        for row in moved:
            row["shard"] = now[row["source_id"]]["shard"] if row["source_id"] in now else None
        return rows if moved else None

    if storage.exists(LEDGER):
        edit_ledger(storage, edit)


def rows_table(rows: Iterable[Row], extra: Mapping[str, Any] | None = None) -> pa.Table:
    """Return ledger rows as a table, sorted by source; `extra` is stored with it."""
    return _table(sorted(rows, key=lambda row: row["source_id"]), extra or {})


def read_ledger(storage: Storage) -> tuple[pa.Table, dict[str, Any]]:
    """Return the ledger of a finished job, and that job's identity."""
    table, extra = _parse(storage.read(LEDGER), LEDGER)
    return table, extra.get("job", {})


def ledger_rows(storage: Storage, generation: Generation) -> list[Row]:
    """Return the rows of a dataset's ledger; if there is none, derive rows from the annotations of its samples."""
    if storage.exists(LEDGER):
        known: list[Row] = read_ledger(storage)[0].to_pylist()
        return known
    return list(sample_rows(generation, read_annotations(storage, generation)).values())


def sample_rows(generation: Generation, table: pa.Table) -> dict[str, Row]:
    """Return what samples tell of their sources, by source: its first key and shard, and the frames of all.

    `table`: the annotations of the generation.
    """
    stems = [shard.name for shard in generation.shards for _ in range(shard.samples)]
    rows: dict[str, Row] = {}
    columns = (table[name].to_pylist() for name in ("source_id", "key", "num_frames"))
    for stem, source, key, frames in zip(stems, *columns, strict=True):
        if source in rows:
            rows[source]["num_frames"] += frames  # another segment of the same video
        else:
            packed = {"source_id": source, "path": source, "status": "packed", "key": key, "shard": stem}
            rows[source] = dict.fromkeys(LEDGER_SCHEMA.names) | packed | {"num_frames": frames, "warnings": []}
    return rows


def source_hashes(storage: Storage, generation: Generation) -> pa.ChunkedArray:
    """Return the SHA-256 of each sample's source, hex, in the order of the annotations; null where it is unknown."""
    columns = [pa.array([], pa.string())]
    for shard in generation.shards:
        facts = read_facts(storage, shard.name, ["stream", "source_sha256"])
        columns.append(facts.filter(pc.equal(facts["stream"], generation.streams[0]))["source_sha256"].combine_chunks())
    return pa.chunked_array(columns, pa.string())


def keep_ledger(storage: Storage, generation: Generation) -> None:
    """Write a ledger of the annotations if the dataset has none."""
    if not storage.exists(LEDGER):
        write_ledger(storage, ledger_rows(storage, generation), {})


def _table(rows: Sequence[Row], extra: Mapping[str, Any]) -> pa.Table:
    schema = LEDGER_SCHEMA.with_metadata({_METADATA: json.dumps(extra, sort_keys=True).encode()})
    return pa.Table.from_pylist(list(rows), schema=schema)


def _parse(data: bytes, name: str) -> tuple[pa.Table, dict[str, Any]]:
    try:
        table = from_parquet(data, file=name)
        for field_ in LEDGER_SCHEMA:
            # A ledger of an earlier version lacks columns that came later.
            if field_.name not in table.column_names:
                table = table.append_column(field_, pa.nulls(table.num_rows, field_.type))
        table.validate(full=True)  # checks that texts are valid UTF-8
        metadata = (table.schema.metadata or {}).get(_METADATA, b"{}")
        return table, json.loads(metadata)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"cannot parse the ledger: {error}", file=name) from error


_Hash = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]


@dataclass(frozen=True, slots=True)
class _Blocked:
    format: Literal["fastvid-blocked"]
    version: Literal[1]
    revision: int
    sha256: tuple[_Hash, ...]


_NONE_BLOCKED: Final = _Blocked("fastvid-blocked", 1, 0, ())


def read_blocked(storage: Storage) -> tuple[str, ...]:
    """Return the SHA-256 of blocked sources, hex, sorted; none if the folder has no block list."""
    return _parse_blocked(storage.read(BLOCKED), storage).sha256 if storage.exists(BLOCKED) else ()


def block(storage: Storage, hashes: Iterable[str]) -> tuple[str, ...]:
    """Add SHA-256 of sources, hex, to the block list, and return the whole list. Entries are never deleted.

    When a dataset is made from others, their lists must be added to its own.
    """
    new = set(hashes)
    check_hashes(new)
    for _ in range(_ATTEMPTS):
        old = storage.read(BLOCKED) if storage.exists(BLOCKED) else None
        before = _NONE_BLOCKED if old is None else _parse_blocked(old, storage)
        after = replace(before, revision=before.revision + 1, sha256=tuple(sorted(new.union(before.sha256))))
        record = (json.dumps(asdict(after), indent=1) + "\n").encode()
        if after.sha256 == before.sha256 or storage.swap(BLOCKED, record, old):
            return after.sha256
    raise ConflictError("the block list kept being changed by others", file=storage.url, hint="run the command again")


def check_hashes(hashes: Iterable[str]) -> None:
    """Raise a UsageError unless all are SHA-256 in lowercase hex."""
    for text in hashes:
        if not re.fullmatch("[0-9a-f]{64}", text):
            raise UsageError(f"{text!r} is not a SHA-256", hint="write 64 hex digits, as `sha256sum FILE` prints them")


def _parse_blocked(data: bytes, storage: Storage) -> _Blocked:
    try:
        record = as_type(msgspec.json.decode(data), _Blocked)
    except (ValueError, RecursionError) as error:
        raise FormatError(
            f"the block list is damaged: {error}",
            file=f"{storage.url}/{BLOCKED}",
            hint="restore the file from a copy of the dataset; without it sources that were taken down could return",
        ) from error
    return replace(record, sha256=tuple(sorted(record.sha256)))
