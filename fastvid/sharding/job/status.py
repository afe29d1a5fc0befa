"""Reads the progress of the job in a folder, while it runs or after it stopped, without disturbing it."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from typing import Annotated, Any, Final, Literal, TypeVar

from msgspec import DecodeError, Meta
from msgspec.json import decode

from fastvid.errors import StorageError, visible
from fastvid.format.generations import read_generation
from fastvid.format.schema import DATASET_JSON, LEDGER_PARTS
from fastvid.runtime.processes import is_dead
from fastvid.runtime.values import as_type
from fastvid.sharding.job.lock import LEASE_SECONDS, PROGRESS
from fastvid.storage import Storage, open_storage

_LOG = logging.getLogger(__name__)

T = TypeVar("T")

# Number of records to read in parallel; with 1,000 parts and 30 ms a request, all are read in a second.
_READERS: Final = 32
# An addition is a job in a folder of its own, inside that of the ledger's parts; see `fastvid.sharding.change.add`.
_JOBS: Final = {"job": f"{LEDGER_PARTS}/", "addition": f"{LEDGER_PARTS}/add/{LEDGER_PARTS}/"}


@dataclass(frozen=True, slots=True, kw_only=True)
class JobProgress:
    """The progress of one process, or of all processes of a job."""

    shards: int | None = None
    shards_done: int = 0
    sources: int = 0
    sources_done: int = 0
    rejected: int = 0
    reasons: Mapping[str, int] = field(default_factory=dict)
    bytes: int = 0
    sources_per_second: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PartStatus(JobProgress):
    """One process of a job, according to its last record."""

    part: Annotated[str, Meta(pattern=r"^[0-9]{1,9}/[0-9]{1,9}$")] | None = None
    command: str
    state: Literal["running", "stale", "failed", "finished"]
    host: str
    pid: int
    started: str
    last_sign: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Record(PartStatus):
    """The record of a process, see `fastvid.sharding.job.lock`. It is not trusted: anybody may have written it."""

    time: Annotated[datetime, Meta(tz=True)]
    namespace: str | None = None
    all_shards: int | None = None


@dataclass(frozen=True, slots=True)
class _Sources:
    number: int = 0


@dataclass(frozen=True, slots=True)
class _Identity:
    """The fields of a job's identity that its status needs."""

    sources: _Sources = field(default_factory=_Sources)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnfinishedJob(JobProgress):
    """A job that has not been committed."""

    kind: str
    command: str | None
    state: str
    packed: int  # number of its sources that became samples
    seconds_left: float | None
    parts: Sequence[PartStatus]


@dataclass(frozen=True, slots=True)
class DatasetStatus:
    """A committed dataset."""

    generation: int
    samples: int  # number of its samples, including removed ones
    shards: int
    bytes: int
    note: str
    changed: str | None


@dataclass(frozen=True, slots=True)
class FolderStatus:
    """What is in a folder: a dataset, an unfinished job, both or neither.

    Attributes:
        folder: The folder.
        time: When it was read, in UTC, ISO 8601.
        dataset: The dataset; None if there is none yet.
        job: The unfinished job; None if there is none.
    """

    folder: str
    time: str
    dataset: DatasetStatus | None
    job: UnfinishedJob | None

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON: the attributes, by name."""
        return asdict(self)


def read_status(folder: str) -> FolderStatus:
    """Return the state of a dataset's folder, as ``fastvid status`` prints it.

    It only reads, and takes no lock. In an object store it costs one listing of the ledger's parts (a request for each
    1,000 names), one request for each process of the job, and at most five more.
    """
    storage = open_storage(folder)
    now = datetime.now(UTC)
    names = storage.list(f"{LEDGER_PARTS}/")
    kind = next((kind for kind, prefix in _JOBS.items() if f"{prefix}job.json" in names), None)
    job = None if kind is None else _read_job(storage, kind, names, now)
    return FolderStatus(storage.url, f"{now:%Y-%m-%dT%H:%M:%SZ}", _read_dataset(storage), job)


def _read_dataset(storage: Storage) -> DatasetStatus | None:
    if not storage.exists(DATASET_JSON):
        return None
    generation = read_generation(storage)[1]
    size = sum(shard.bytes for shard in generation.shards)
    return DatasetStatus(
        generation=generation.number,
        samples=generation.num_samples,
        shards=len(generation.shards),
        bytes=size,
        note=generation.note,
        changed=generation.time or None,
    )


def _read_job(storage: Storage, kind: str, names: Sequence[str], now: datetime) -> UnfinishedJob | None:
    prefix = _JOBS[kind]
    identity = _read(storage, f"{prefix}job.json", _Identity)
    if identity is None:
        return None  # it has just been committed
    paths = [name for name in names if name.startswith(PROGRESS)]
    with ThreadPoolExecutor(_READERS, thread_name_prefix="status") as readers:
        records = [record for record in readers.map(lambda path: _read(storage, path, _Record), paths) if record]
    records = _last_division(records)
    parts = [_part(record, now) for record in records]
    parts.sort(key=lambda part: int((part.part or "0").partition("/")[0]))
    shards = records[0].all_shards if records else None
    made = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
    shards_done = sum("/" not in name and name.endswith(".parquet") for name in made)
    running = [part for part in parts if part.state == "running"]
    sources = identity.sources.number
    sums = {name: sum(getattr(part, name) for part in parts) for name in ("sources_done", "rejected", "bytes")}
    done = sums["sources_done"]
    reasons = sum((Counter(part.reasons) for part in parts), Counter[str]())
    rate = sum(part.sources_per_second for part in running)
    left = [(part.sources - part.sources_done) / part.sources_per_second for part in running if part.sources_per_second]
    state = "running" if running else "uncommitted" if shards_done == shards else "interrupted"
    return UnfinishedJob(
        kind=kind,
        command=parts[0].command if parts else None,
        state=state,
        shards=shards,
        shards_done=shards_done,
        sources=sources,
        packed=done - sums["rejected"],
        reasons=dict(sorted(reasons.items())),
        **sums,
        sources_per_second=rate,
        seconds_left=max([(sources - done) / rate, *left]) if rate else None,
        parts=parts,
    )


def _last_division(records: Sequence[_Record]) -> list[_Record]:
    """Return the records of the division into N parts that was started last.

    A job may have been started with another N before; its parts would count the same shards again.
    """
    divisions = [(record.part or "").partition("/")[2] for record in records]
    last = max(zip(records, divisions, strict=True), key=lambda pair: pair[0].started, default=(None, ""))[1]
    return [record for record, division in zip(records, divisions, strict=True) if division == last]


def _part(record: _Record, now: datetime) -> PartStatus:
    state, told = record.state, asdict(record)
    if state == "running":
        silent = (now - record.time).total_seconds() > LEASE_SECONDS
        state = "stale" if silent or is_dead(record.namespace, record.pid) else state
    shown = {one.name: told[one.name] for one in fields(PartStatus)}
    return PartStatus(**shown | {"state": state, "last_sign": f"{record.time:%Y-%m-%dT%H:%M:%SZ}"})


def _read(storage: Storage, name: str, kind: type[T]) -> T | None:
    """Return a record; None if it has just been deleted, or cannot be parsed, which is logged."""
    try:
        return as_type(decode(storage.read(name)), kind)
    except StorageError:
        return None
    except (DecodeError, UnicodeError, RecursionError) as error:
        _LOG.warning("%s is no record of a job: %s", visible(f"{storage.url}/{name}"), visible(str(error)))
        return None
