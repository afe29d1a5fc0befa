"""A job: resumes the work of earlier runs, processes missing sources and writes complete shards.

A `ShardWork` defines what is done with the sources. The slot of a source is its position among the sources of its
shard.

`OutageDetector` detects outages that are no fault of a source: a full or failing disk, or a store that is down or
denies access. On the web, a server that does not answer is an ordinary fault of one source. In contrast, all sources in
the user's own bucket fail together, for example when credentials expire during a job. So that they are not all
rejected, the job stops, and resumes when it is run again. A source on a disk that was listed but cannot be read is not
rejected either: the disk may be unmounted or failing. The job processes all other sources, and then stops.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import tempfile
import time
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from itertools import accumulate, islice
from typing import Any, Final

from fastvid.errors import JobError, StorageError
from fastvid.format.schema import LEDGER_PARTS, PICTURES, shard_stem
from fastvid.format.tar import TarDigest
from fastvid.media.reasons import Reason
from fastvid.runtime import faults
from fastvid.runtime.names import encode_name
from fastvid.runtime.progress import Progress
from fastvid.runtime.values import check_choice, check_integers, check_seconds, things
from fastvid.sharding.encode.profiles import Settings
from fastvid.sharding.engines.local import ENGINES, LocalEngine
from fastvid.sharding.job.ledger import PackedSample, Part, Row, ledger_row, part_stems, read_part, write_part
from fastvid.sharding.job.lock import JobLease, Staging
from fastvid.sharding.job.plan import SAMPLES_PER_SHARD, JobPart, differences, file_order, plan_shards
from fastvid.sharding.sources.sources import Source, SourceList
from fastvid.sharding.work.tasks import Outcome, SourceTask
from fastvid.storage import LocalStorage, RemoteOptions, Storage
from fastvid.storage.urls import FileUrl, is_remote, open_root

_LOG = logging.getLogger(__name__)

# Factor of the time limits when a source is retried alone, because it may have been too slow only in parallel.
_PATIENCE: Final = 4.0
# Number of parts of the ledger to read in parallel: each costs three round trips to an object store.
_READERS: Final = 16
# Fields that are copied from a source to its task.
_OF_SOURCE: Final = ("path", "key", "size", "start", "end", "member", "sound", "frames", "inside")


@dataclass(frozen=True, slots=True)
class How:
    """How a job runs. Nothing here changes the output of the job."""

    engine: str = "local"
    ray_address: str | None = None
    workers: int | None = None
    part: JobPart | str | None = None
    reject_unreadable: bool = False
    allow_encoder_change: bool = False
    command: str = "shard"  # for `fastvid status` and the history

    @property
    def mine(self) -> JobPart | None:
        """The part of the shards to make; None makes all."""
        return self.part if isinstance(self.part, JobPart | None) else JobPart.parse(str(self.part))

    def check(self, samples_per_shard: int, **seconds: float) -> None:
        """Raise a UsageError unless the numbers of workers, samples and seconds are positive."""
        check_integers(1, workers=self.workers, samples_per_shard=samples_per_shard)
        check_seconds(**seconds)

    def open_engine(self, settings: Settings, usual: int | None = None) -> Any:
        """Create the engine, one as `LocalEngine` or with `make_shards`, see `Job.run`; it starts no process yet.

        `usual`: default number of workers on this machine.
        """
        check_choice("unknown engine {}", self.engine, ENGINES)
        module, _, name = ENGINES[self.engine].partition(":")
        workers = self.workers or (usual if self.engine == "local" else None)
        return getattr(import_module(module), name)(settings, workers, self.ray_address)


class ShardWork(ABC):
    """Plans the shards of a job, and writes them from the outcomes of its sources; `Job` does everything between.

    Subclasses set `identity`, which is everything that determines what is written, and `profile`, for the records of
    the shards.
    """

    suffix = "tar"
    records: Storage | None = None  # folder of the records that mark the job as unfinished; None for that of the shards
    encoder: Mapping[str, Any] = {}  # the build that encodes; outcomes of another build are not reused
    scratch: LocalStorage | None = None  # folder of outcomes that wait for their shard; None for the job's own
    streams: tuple[str, ...] = (PICTURES,)  # video streams of every sample
    sources_per_sample = 1
    extras: Mapping[str, Any] = {}  # further fields of the generation
    workers: int | None = None  # default number of workers on this machine; None for one per core
    is_begun = False  # whether this process has recorded the job as a new one
    drop_duplicates = False  # whether to hide samples of sources with the same bytes as an earlier one
    seed = 0  # of the order in which sources are processed
    identity: Mapping[str, Any]
    profile: Mapping[str, Any]
    settings: Settings

    def __init__(self, storage: Storage, found: SourceList, shards: Sequence[Sequence[Source]]) -> None:
        self.storage, self.found, self.shards = storage, found, shards
        self.stems: Sequence[str] = [shard_stem(number) for number in range(len(shards))]

    def open_engine(self, how: How, blocked: tuple[str, ...]) -> Any:
        """Create the engine that processes the sources; None without sources. `blocked`: SHA-256 of blocked sources."""
        self.settings = replace(self.settings, blocked=blocked)
        return how.open_engine(self.settings, self.workers)

    def order(self, shard: int) -> Sequence[int]:
        """Return the slots of a shard in the order in which to process them."""
        # Clips of a file follow each other, also across shards, so that a worker reads it once.
        sources = self.shards[shard]
        return sorted(range(len(sources)), key=lambda slot: file_order(sources[slot], self.seed))

    def data(self, shard: int) -> str:
        """Return the name of a shard's data file, whose digest is in the shard's record."""
        return f"{self.stems[shard]}.{self.suffix}"

    def task(self, index: int, source: Source) -> SourceTask:
        """Return the task of a source. `index`: number of the source in the job."""
        same = {name: getattr(source, name) for name in _OF_SOURCE}
        parent = None if source.parent is None else encode_name(source.parent)
        return SourceTask(index, encode_name(source.id), parent=parent, tag=source.etag, **same)

    @abstractmethod
    def write(self, shard: int, outcomes: Iterator[Outcome]) -> Part:
        """Write a shard from the outcomes of its sources, in their order; return its record.

        Repeated, it writes the same bytes.
        """

    def row(self, source: Source, outcome: Outcome, stem: str) -> Row:
        """Return the ledger row of a source."""
        return ledger_row(source, outcome, stem)

    def write_signals(self, stem: str, packed: Sequence[PackedSample]) -> str:  # noqa: ARG002
        """Write the signals of a shard's samples; return their SHA-256, "" if there are none."""
        return ""

    def committed_identity(self, parts: Sequence[Part]) -> Mapping[str, Any]:  # noqa: ARG002
        """Return the identity that the dataset records."""
        return self.identity


View = tuple[Source, Outcome]


def joined(sources: Sequence[Source], outcomes: Iterator[Outcome], streams: int) -> Iterator[list[View]]:
    """Yield the sources of each sample, one for each stream, with their outcomes.

    If one source of a sample is rejected, the outcomes of all its sources become rejections.
    """
    pairs = zip(sources, outcomes, strict=True)
    while views := list(islice(pairs, streams)):
        bad = next((outcome for _, outcome in views if outcome.reason is not None), None)
        yield views if bad is None else [(source, _rejected(outcome, bad)) for source, outcome in views]


def _rejected(outcome: Outcome, bad: Outcome) -> Outcome:
    if outcome.reason is not None:
        return outcome
    # Give another reason to the other cameras: only the row of the blocked source may say that it is blocked.
    reason = Reason.DAMAGED if bad.reason is Reason.BLOCKED else bad.reason
    return replace(outcome, samples=(), reason=reason, message=f"another camera of its episode: {bad.message}")


class SourceWork(ShardWork):
    """Makes samples from the outcomes of sources. Subclasses define how a sample is made and how a shard is written.

    `seed`: seed of the order of samples in the shards. `shards`: the sources of each shard; by default `plan_shards`
    assigns them.
    """

    plan_options: Mapping[str, int] = {}  # further arguments of `plan_shards`

    def __init__(
        self,
        storage: Storage,
        found: SourceList,
        settings: Settings,
        *,
        samples_per_shard: int = SAMPLES_PER_SHARD,
        seed: int = 0,
        drop_duplicates: bool = False,
        shards: Sequence[Sequence[Source]] | None = None,
    ) -> None:
        plan = partial(plan_shards, found.tried, seed=seed, samples=samples_per_shard, **self.plan_options)
        super().__init__(storage, found, shards or found.shards or plan())
        self.settings, self.seed, self.drop_duplicates = settings, seed, drop_duplicates
        self.packing = {"seed": seed, "samples_per_shard": samples_per_shard}
        self.generation, self.classes = 1, found.classes  # number of the generation to make, and its classes
        self.labels: Mapping[str, int] = {name: number for number, name in enumerate(found.classes)}

    @abstractmethod
    def made(self, views: Sequence[View]) -> Iterator[tuple[PackedSample, Any]]:
        """Yield the samples of packed sources, each with its value for `pack`. `views`: one source for each stream."""

    @abstractmethod
    def pack(self, shard: int, samples: Iterator[Any]) -> TarDigest | None:
        """Write the file of a shard and its sidecars. Without samples return None: the shard's number is not used."""

    def write(self, shard: int, outcomes: Iterator[Outcome]) -> Part:
        """See `ShardWork`."""
        stem, rows, packed = self.stems[shard], list[Row](), list[PackedSample]()

        def samples() -> Iterator[Any]:
            for views in joined(self.shards[shard], outcomes, self.sources_per_sample):
                rows.extend(self.row(source, outcome, stem) for source, outcome in views)
                for sample, made in self.made(views) if views[0][1].reason is None else ():
                    packed.append(sample)
                    yield made

        digest = self.pack(shard, samples())
        faults.reach("ledger")
        return Part(stem, rows, packed, digest, self.encoder, self.write_signals(stem, packed))


def retry_alone(engine: LocalEngine, task: SourceTask) -> Outcome:
    """Retry a task whose outcome was transient, without others in parallel, and return its final outcome.

    If its worker dies, the source is retried a second time, because something else may have killed the worker.
    """
    for _ in range(2):
        (outcome,) = engine.run([replace(task, patience=_PATIENCE)])
        if outcome.reason is not Reason.CRASHED:
            break
    return replace(outcome, transient=False)


MOST_IN_A_ROW: Final = 16
"""Number of failures in a row after which a job stops, without trying the other sources."""

_HINT: Final = "run the job again to resume it; nothing is lost"
_REJECT: Final = "or reject such sources with --reject-unreadable"


class OutageDetector:
    """Distinguishes an outage from faults of a few sources."""

    def __init__(self, *, reject_unreadable: bool = False) -> None:
        self._reject_unreadable = reject_unreadable
        self._in_a_row = 0
        self._failed = ""
        self._good: dict[str, Source] = {}
        self._unread: list[tuple[Source, Outcome]] = []

    def add_readable(self, sources: Iterable[Source]) -> None:
        """Record sources that an earlier run has read."""
        for source in sources:
            if _in_store(source):
                self._good[FileUrl.parse(source.path).root] = source
                return

    def add_outcome(self, source: Source, outcome: Outcome) -> None:
        """Record the first outcome of a source."""
        on_disk = self._is_unread(source, outcome)
        if on_disk:
            _check_folder(source)
        lost_store = outcome.reason is Reason.UNREACHABLE and _in_store(source)
        if on_disk or lost_store or outcome.reason is Reason.NO_SPACE:
            # Clips of one file fail together: count them once.
            self._in_a_row += source.path != self._failed
            self._failed = source.path
            if self._in_a_row >= MOST_IN_A_ROW:
                raise _stop(source, outcome, f"{self._in_a_row} sources in a row failed: ")
            return
        self._in_a_row, self._failed = 0, ""
        if outcome.reason is None:
            self.add_readable([source])

    def add_final_outcome(self, source: Source, outcome: Outcome) -> bool:
        """Record the final outcome of a source, after it was retried alone.

        Returns False if the outcome is the fault of a disk, not of the source; then `finish` raises.
        """
        if outcome.reason is Reason.NO_SPACE:
            raise _stop(source, outcome)
        if outcome.reason is Reason.UNREACHABLE and _in_store(source) and not self._store_answers(source):
            raise _stop(source, outcome)
        if self._is_unread(source, outcome):
            _check_folder(source)
            self._unread.append((source, outcome))
            return False
        return True

    def finish(self) -> None:
        """Raise a StorageError if a disk did not deliver a source."""
        if self._unread:
            raise _stop(*self._unread[0], f"{things(len(self._unread), 'source')} cannot be read, the first: ")

    def _is_unread(self, source: Source, outcome: Outcome) -> bool:
        unread = outcome.reason in (Reason.MISSING, Reason.UNREADABLE) and not is_remote(source.path)
        return unread and not self._reject_unreadable

    def _store_answers(self, source: Source) -> bool:
        """Return whether another source of the same store, which was read before, can still be read."""
        good = self._good.get(FileUrl.parse(source.path).root)
        if good is None:
            return False
        url = FileUrl.parse(good.path)
        try:
            open_root(url, RemoteOptions(cache="")).read_into(url.name, [(0, memoryview(bytearray(1)))])
        except StorageError:
            return False
        return True


def _in_store(source: Source) -> bool:
    return is_remote(source.path) and FileUrl.parse(source.path).is_listable


def _check_folder(source: Source) -> None:
    """Raise a StorageError if the folder of a source is gone, or empty like that of an unmounted disk."""
    folder = os.path.dirname(source.path)
    try:
        problem = "" if os.listdir(folder) else "it is empty"
    except OSError as error:
        problem = error.strerror or str(error)
    if problem:
        raise StorageError(
            f"folder of the sources is gone: {problem}",
            file=encode_name(folder),
            source=encode_name(source.id),
            hint=f"mount or restore it, then {_HINT}",
        )


def _stop(source: Source, outcome: Outcome, before: str = "") -> StorageError:
    said, name = f"{before}{outcome.message}", encode_name(source.id)
    if outcome.reason is Reason.NO_SPACE:
        hint = f"free some space, or name another folder in TMPDIR; {_HINT}"
        return StorageError(said, file=tempfile.gettempdir(), source=name, hint=hint)
    if is_remote(source.path):
        return StorageError(said, file=FileUrl.parse(source.path), hint=_HINT)
    hint = f"repair the disk, or restore the file or its permissions, then {_HINT}; {_REJECT}"
    return StorageError(said, file=encode_name(source.path), source=name, hint=hint)


class Job:
    """Makes the shards of a dataset; see `fastvid.sharding.job.job.run`."""

    def __init__(self, work: ShardWork, how: How) -> None:
        self.storage, self.work, self._how = work.records or work.storage, work, how
        self.identity, self.shards, self.stems = work.identity, work.shards, work.stems
        self.staging = Staging(self.storage, work.scratch, work.encoder)
        self.outages = OutageDetector(reject_unreadable=how.reject_unreadable)
        self.parts: dict[int, Part] = {}
        self._lease: JobLease | None = None
        part = how.mine
        self._whole = part is None
        self._mine = [number for number in range(len(self.shards)) if part is None or part.has(number)]
        self.progress = Progress(sum(len(self.shards[number]) for number in self._mine))
        self.reasons: Counter[Reason] = Counter()
        self._first = list(accumulate(map(len, self.shards), initial=0))
        self._missing: Counter[int] = Counter()
        self._again: list[tuple[int, int]] = []
        self._packing: list[Future[None]] = []

    def run(self, lease: JobLease | None = None, blocked: tuple[str, ...] = ()) -> list[Part]:
        """Process and write what is missing; return the records of the shards, in order.

        The engine of the work is one as `LocalEngine`; None if no source has to be processed; or one with a method
        `make_shards`, which makes whole shards elsewhere: it writes the shards with the given numbers and their parts
        of the ledger, and yields the number of each finished shard. `lease`: the lease on the dataset; it is checked
        before each shard is written. `blocked`: SHA-256 of blocked sources.
        """
        engine, self._lease = self.work.open_engine(self._how, blocked), lease
        self._begin()
        with contextlib.closing(engine) if engine else contextlib.nullcontext():
            if lease is not None:
                lease.report(self._record)
            self._find_parts()
            try:
                if hasattr(engine, "make_shards"):
                    self._make_elsewhere(engine)
                else:
                    self.make(engine)
            finally:
                if self.progress.total:
                    self.progress.finish()
        return [self.parts[shard] for shard in self._mine]

    def _check_lease(self) -> None:
        if self._lease is not None:
            self._lease.check()

    def _record(self) -> dict[str, Any]:
        progress, parts = self.progress, list(self.parts.values())
        return {
            "shards": len(self._mine),
            "all_shards": len(self.shards),
            "shards_done": len(parts),
            "sources": progress.total,
            "sources_done": progress.done,
            "rejected": progress.rejected,
            "reasons": {reason.value: count for reason, count in sorted(self.reasons.items())},
            "bytes": sum(part.digest.bytes for part in parts if part.digest is not None),
            "sources_per_second": round(progress.rate(time.monotonic()), 4),
        }

    def end(self) -> None:
        """Delete all temporary files of the job."""
        self.staging.end()
        if self.work.scratch is not None:
            shutil.rmtree(self.work.scratch.root, ignore_errors=True)

    def _begin(self) -> None:
        """Record the job, or check that it matches the unfinished one."""
        before = None if self.work.is_begun else self.staging.job() or self.staging.begin(self.identity)
        if before is None:
            return
        what, folder = "job" if self.work.records is None else "addition", self.work.storage.url
        changes = list(differences(before, self.identity))
        builds_only = all(name.startswith("encoder.") for name, _, _ in changes)
        if changes and not (builds_only and self._how.allow_encoder_change):
            name, old, new = changes[0]
            way_out = "choose another folder" if what == "job" else f"delete {LEDGER_PARTS}/add to abandon it"
            raise JobError(
                f"the unfinished {what} here has {name} {old!r}, this one {new!r}",
                file=folder,
                hint=f"resume it with the same sources, arguments and ffmpeg (--enlarge if 0.2 began it), or {way_out}"
                + ("; or continue with this ffmpeg by --allow-encoder-change" if builds_only else ""),
            )
        if changes:
            _LOG.warning("resuming with another build of ffmpeg; samples of unfinished shards are encoded again")
            # Other parts may still resume with the build that the job began with.
            if self._whole:
                self.staging.begin(self.identity, replace=True)
        else:
            _LOG.info("resuming the unfinished %s in %s", what, folder)

    def make(self, engine: LocalEngine | None) -> None:
        """Make the missing shards with an engine that processes sources."""
        todo = list(self._take_stock())
        # A thread writes shards. Hashing, checksums and disk writes release the GIL, so workers get tasks meanwhile.
        packer = ThreadPoolExecutor(1, thread_name_prefix="pack")
        try:
            for shard in self._mine:
                if shard not in self.parts:
                    self._settle(shard, packer)
            for outcome in engine.run(self._task(shard, slot) for shard, slot in todo) if engine else ():
                faults.reach("encode")
                shard = bisect_right(self._first, outcome.index) - 1
                slot = outcome.index - self._first[shard]
                self.outages.add_outcome(self.shards[shard][slot], outcome)
                if outcome.transient:
                    self.staging.put(self.stems[shard], slot, outcome)
                    self._again.append((shard, slot))
                else:
                    self._keep(shard, slot, outcome, packer)
            if self._again:
                _LOG.info("retrying each of %d sources alone: their errors may be transient", len(self._again))
            for shard, slot in self._again:
                assert engine is not None
                outcome = retry_alone(engine, self._task(shard, slot))
                if self.outages.add_final_outcome(self.shards[shard][slot], outcome):
                    self._keep(shard, slot, outcome, packer)
            for future in self._packing:
                future.result()
            self.outages.finish()
        finally:
            packer.shutdown(cancel_futures=True)

    def _make_elsewhere(self, engine: Any) -> None:
        """Make the missing shards with an engine that makes whole shards."""
        todo = [shard for shard in self._mine if shard not in self.parts]
        for shard in engine.make_shards(self.work, self._how, todo):
            self._check_lease()
            part = read_part(self.storage, self.stems[shard])
            rejected = self._add(shard, part)
            for row in rejected:
                _LOG.warning("%s: %s: %s", row["source_id"], row["reason"], row["message"])
            for number in range(len(self.shards[shard])):
                self.progress.advance(rejected=number < len(rejected))

    def _find_parts(self) -> None:
        """Delete half-written files of killed runs, and load the records of shards that earlier runs have finished."""
        for folder in (self.work.storage, self.work.scratch):
            if isinstance(folder, LocalStorage):
                # Other commands may write to a dataset while samples are added to it.
                if self._whole and self.work.records is None:
                    folder.sweep()
                else:
                    folder.sweep_dead()
        found = part_stems(self.storage)
        known = [shard for shard in self._mine if self.stems[shard] in found]
        with ThreadPoolExecutor(_READERS, thread_name_prefix="parts") as readers:
            parts = readers.map(self._finished, known)
            done = [(shard, part) for shard, part in zip(known, parts, strict=True) if part is not None]
        for shard, part in done:
            packed = {row["source_id"] for row in part.rows if row["status"] == "packed"}
            self.outages.add_readable(one for one in self.shards[shard] if encode_name(one.id) in packed)
            self.progress.take(len(self.shards[shard]), rejected=len(self._add(shard, part)))

    def _add(self, shard: int, part: Part) -> list[Row]:
        """Record a finished shard, and return the ledger rows of its rejected sources."""
        self.parts[shard] = part
        rejected = [row for row in part.rows if row["status"] != "packed"]
        self.reasons.update(Reason(row["reason"]) for row in rejected)
        return rejected

    def _take_stock(self) -> Iterator[tuple[int, int]]:
        """Count the stored outcomes of earlier runs; yield the shard and slot of sources to process, in order."""
        staged = self.staging.slots()
        for shard in self._mine:
            stem, sources = self.stems[shard], self.shards[shard]
            if shard in self.parts:
                if stem in staged:
                    self.staging.drop(stem)
                continue
            self._missing[shard] = len(sources)
            for slot in self.work.order(shard):
                outcome = self.staging.get(stem, slot) if slot in staged.get(stem, ()) else None
                if outcome is None:
                    yield shard, slot
                elif outcome.transient:
                    self._again.append((shard, slot))
                else:
                    self._missing[shard] -= 1
                    self.progress.take(1, rejected=int(outcome.reason is not None))
                    if outcome.reason is not None:
                        self.reasons[outcome.reason] += 1

    def _finished(self, shard: int) -> Part | None:
        """Return the record of a finished shard; None if its file is missing, as in an incomplete copy of a folder."""
        part, name, folder = read_part(self.storage, self.stems[shard]), self.work.data(shard), self.work.storage
        if part.digest is None or (folder.exists(name) and folder.size(name) == part.digest.bytes):
            return part
        _LOG.warning("%s does not match its part of the ledger: its shard is made again", name)
        return None

    def _task(self, shard: int, slot: int) -> SourceTask:
        return self.work.task(self._first[shard] + slot, self.shards[shard][slot])

    def _keep(self, shard: int, slot: int, outcome: Outcome, packer: ThreadPoolExecutor) -> None:
        self.staging.put(self.stems[shard], slot, outcome)
        if outcome.reason is not None:
            source = self.shards[shard][slot]
            _LOG.warning("%s: %s: %s", encode_name(source.id), outcome.reason.value, outcome.message)
            self.reasons[outcome.reason] += 1
        self._missing[shard] -= 1
        self.progress.advance(rejected=outcome.reason is not None)
        self._settle(shard, packer)

    def _settle(self, shard: int, packer: ThreadPoolExecutor) -> None:
        """Submit a shard for packing if it is complete; raise if packing an earlier one has failed."""
        if not self._missing[shard]:
            self._packing.append(packer.submit(self._pack, shard))
        for future in [future for future in self._packing if future.done()]:
            future.result()
            self._packing.remove(future)

    def _pack(self, shard: int) -> None:
        """Write a complete shard and its part of the ledger. Idempotent: repeated, it writes the same bytes."""
        self._check_lease()
        part = self.work.write(shard, self._outcomes(shard))
        write_part(self.storage, part)
        self.parts[shard] = part
        self.staging.drop(part.stem)

    def _outcomes(self, shard: int) -> Iterator[Outcome]:
        """Yield what became of each source of a complete shard, in the order of the shard."""
        stem = self.stems[shard]
        for slot, source in enumerate(self.shards[shard]):
            outcome = self.staging.get(stem, slot)
            if outcome is None:
                raise JobError(
                    "an outcome was damaged on disk before its shard was written",
                    shard=stem,
                    key=source.key,
                    hint="run the job again to process its source again",
                )
            if outcome.source_sha256 in self.work.settings.blocked:
                # It was processed before it was blocked.
                outcome = replace(outcome, reason=Reason.BLOCKED, samples=())
            yield outcome
