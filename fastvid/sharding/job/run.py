"""Detects outages that are no fault of a source: a full or failing disk, or a store that is down or denies access.

On the web, a server that does not answer is an ordinary fault of one source. Sources in the user's own bucket all fail
together, for example when credentials expire during a job. Rejecting the rest would lose it, so the job stops and
resumes when it is run again. A source that was listed on a disk and cannot be read is never rejected by itself: its
disk may be unmounted or failing, so the job stops at its end, when everything else is done.

What a job does with the sources of a shard: the interface, and the work of jobs that encode.

A job: resumes the work of earlier runs, processes missing sources and writes complete shards.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import accumulate, chain
from typing import Any, Final, Protocol

from fastvid.errors import JobError, StorageError
from fastvid.format.schema import LEDGER_PARTS, shard_stem
from fastvid.format.shard import sample_members, write_shard
from fastvid.media.timing import Reason
from fastvid.runtime import faults
from fastvid.runtime.names import encode_name
from fastvid.runtime.progress import Progress
from fastvid.runtime.values import things
from fastvid.sharding.engines.local import Engine
from fastvid.sharding.job.ledger import PackedSample, Part, Row, ledger_row, part_stems, read_part, write_part
from fastvid.sharding.job.lock import Heartbeat, Staging, remove_scratch, scratch_folder
from fastvid.sharding.job.plan import JobPart, differences, file_order, job_identity, plan_shards
from fastvid.sharding.job.restore import annotate_members, annotation_row, dataset_record, with_record
from fastvid.sharding.sources.sources import Source, SourceList
from fastvid.sharding.work.tasks import Outcome, Settings, SourceTask
from fastvid.storage import LocalStorage, RemoteOptions, Storage
from fastvid.storage.urls import FileUrl, is_remote, open_root

MOST_IN_A_ROW: Final = 16
"""This many failures in a row stop a job before it tries all other sources."""

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
            # Clips of one file fail together.
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

        Returns whether it says something about the source; if not, `finish` raises.
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
        """Return whether a source of the same store that was read before can still be read."""
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


class ShardWork(Protocol):
    """Plans the shards of a job and writes them; `Job` does everything between."""

    suffix: str

    @property
    def identity(self) -> Mapping[str, Any]: ...

    @property
    def shards(self) -> Sequence[Sequence[Source]]: ...

    @property
    def stems(self) -> Sequence[str]: ...

    @property
    def scratch(self) -> LocalStorage | None:
        """Local folder of outcomes that wait for their shard; None for the job's own folder."""
        ...

    @property
    def encoder(self) -> Mapping[str, Any]:
        """The build that encodes; outcomes of another build are not reused. Empty if nothing is encoded."""
        ...

    @property
    def blocked(self) -> Collection[str]:
        """SHA-256 of the sources that are refused, hex."""
        ...

    def order(self, shard: int) -> Sequence[int]:
        """Return the slots of a shard in the order in which to process them."""
        ...

    def task(self, index: int, source: Source) -> SourceTask:
        """Return the task of a source, which is number `index` in the job."""
        ...

    def write(self, shard: int, outcomes: Iterator[Outcome]) -> Part:
        """Write a shard from the outcomes of its sources, in their order; return its record.

        Repeated, it writes the same bytes.
        """
        ...


class EncodeShards:
    """Encodes sources into new tars.

    `seed`: seed of the order of samples in the shards.
    """

    suffix = "tar"

    def __init__(
        self,
        storage: Storage,
        found: SourceList,
        settings: Settings,
        *,
        seed: int,
        samples_per_shard: int,
        scratch: str | os.PathLike[str] | None = None,
        drop_duplicates: bool = False,
        classes: Sequence[str] | None = None,
        labels: Mapping[str, int] | None = None,
        generation: int = 1,
    ) -> None:
        self._storage, self.scratch = storage, scratch_folder(storage, scratch)
        self.identity = job_identity(found, settings, seed=seed, samples_per_shard=samples_per_shard)
        if drop_duplicates:
            self.identity["drop_duplicates"] = True
        self._classes = found.classes if classes is None else tuple(classes)
        self._labels = {name: label for label, name in enumerate(self._classes)} if labels is None else labels
        self.blocked, self._seed = settings.blocked, seed
        self.encoder: Mapping[str, Any] = self.identity["encoder"]
        self._streams = settings.streams.video
        self._record = dataset_record(
            generation,
            streams=self._streams,
            classes=self._classes,
            extras=settings.streams.to_json(),
            profile=self.identity["profile"],
            encoder=self.encoder,
        )
        tried = [source for source in found.sources if source.problem is None]
        self.shards = plan_shards(tried, seed=seed, samples=samples_per_shard)
        self.stems = [shard_stem(number) for number in range(len(self.shards))]

    def order(self, shard: int) -> Sequence[int]:
        # Clips of a file follow each other, also across shards, so that a worker reads it once.
        sources = self.shards[shard]
        return sorted(range(len(sources)), key=lambda slot: file_order(sources[slot], self._seed))

    def task(self, index: int, source: Source) -> SourceTask:
        return SourceTask(
            index=index,
            source_id=encode_name(source.id),
            path=source.path,
            key=source.key,
            size=source.size,
            start=source.start,
            end=source.end,
            member=source.member,
            sound=source.sound,
            tag=source.tag,
            parent=None if source.parent is None else encode_name(source.parent),
        )

    def write(self, shard: int, outcomes: Iterator[Outcome]) -> Part:
        stem = self.stems[shard]
        rows: list[Row] = []
        packed: list[PackedSample] = []
        members = with_record(self._members(shard, outcomes, rows, packed), self._record)
        first = next(members, None)
        # If all sources of a shard are rejected, there is no tar and its number stays unused.
        digest = (
            None
            if first is None
            else write_shard(self._storage, stem, chain([first], members), streams=self._streams, scratch=self.scratch)
        )
        faults.reach("ledger")
        return Part(stem, rows, packed, digest, self.encoder)

    def _members(
        self, shard: int, outcomes: Iterator[Outcome], rows: list[Row], packed: list[PackedSample]
    ) -> Iterator[tuple[str, Mapping[str, bytes]]]:
        """Yield the samples of a shard in the order of its slots, and append their ledger rows."""
        for source, outcome in zip(self.shards[shard], outcomes, strict=True):
            rows.append(ledger_row(source, outcome, self.stems[shard]))
            for sample in outcome.samples:
                meta = sample.meta
                place = (meta.get(name) for name in ("parent", "start_seconds", "end_seconds", "bad_frames"))
                facts = (sample.num_frames, meta["fps"], meta["width"], meta["height"])
                packed.append(PackedSample(encode_name(source.id), sample.key, *facts, *place))
                row = annotation_row(packed[-1], source, self._labels)
                yield sample.key, annotate_members(sample_members(meta, sample.streams), row, self._classes)


_LOG = logging.getLogger(__name__)

# A source that was too slow when run in parallel gets this much more time when it is retried alone.
_PATIENCE: Final = 4.0
# Parts of the ledger read in parallel: each costs three round trips to an object store.
_READERS: Final = 16


def retry_alone(engine: Engine, task: SourceTask) -> Outcome:
    """Retry a task whose outcome was transient, without others in parallel, and return its final outcome.

    A source whose worker dies is tried once more: something else may have killed the worker just then.
    """
    for _ in range(2):
        (outcome,) = engine.run([replace(task, patience=_PATIENCE)])
        if outcome.reason is not Reason.CRASHED:
            break
    return replace(outcome, transient=False)


class Job:
    """Makes the shards of a dataset, for `run_job`, `index_tars` and `fastvid.sharding.change.add`.

    Args:
        storage: Folder of the job's records, which mark it as unfinished, and of the shards.
        work: Plans the shards and writes them.
        part: The part of the shards to make; None makes all.
        reject_unreadable: See `OutageDetector`.
        added_to: The dataset that the shards are added to afterwards; None if they become a new one.
        command: The command that runs it, for ``fastvid status``.
    """

    def __init__(
        self,
        storage: Storage,
        work: ShardWork,
        *,
        part: JobPart | None = None,
        reject_unreadable: bool = False,
        added_to: Storage | None = None,
        command: str = "shard",
    ) -> None:
        self.identity, self.shards, self.stems = work.identity, work.shards, work.stems
        self.storage, self.work = storage, work
        self.scratch = work.scratch
        self.staging = Staging(storage, self.scratch, work.encoder)
        self.outages = OutageDetector(reject_unreadable=reject_unreadable)
        self.parts: dict[int, Part] = {}
        self._added_to, self._whole = added_to, part is None
        self._mine = [number for number in range(len(self.shards)) if part is None or part.has(number)]
        self.progress = Progress(sum(len(self.shards[number]) for number in self._mine))
        self.heartbeat = Heartbeat(
            storage, command, part, self.progress, parts=self.parts, shards=len(self._mine), all_shards=len(self.shards)
        )
        self._first = list(accumulate(map(len, self.shards), initial=0))
        self._missing: Counter[int] = Counter()
        self._again: list[tuple[int, int]] = []
        self._packing: list[Future[None]] = []

    def run(self, engine: Engine, check: Callable[[], None], *, allow_encoder_change: bool = False) -> list[Part]:
        """Process and write what is missing; return the records of the shards, in order. Closes the engine.

        Args:
            engine: Where to process sources.
            check: Called before each shard is written; raises if another job has taken over the folder.
            allow_encoder_change: Whether to resume a job that began with another build of ffmpeg.

        Raises:
            JobError: If the unfinished job in the folder is another one.
            StorageError: If the folder cannot be written or is full, or a disk or store does not deliver sources.
            WorkerError: If workers cannot be started.
        """
        self._check = check
        self._begin(allow_encoder_change=allow_encoder_change)
        with contextlib.closing(engine), self.heartbeat:
            return self._finish(engine)

    def end(self) -> None:
        """Delete all temporary files of the job."""
        self.staging.end()
        remove_scratch(self.scratch)

    def _begin(self, *, allow_encoder_change: bool) -> None:
        """Record the job, or check that it matches the unfinished one."""
        before = self.staging.job() or self.staging.begin(self.identity)
        if before is None:
            return
        what, where = ("job", self.storage) if self._added_to is None else ("addition", self._added_to)
        changes = list(differences(before, self.identity))
        builds_only = all(name.startswith("encoder.") for name, _, _ in changes)
        if changes and not (builds_only and allow_encoder_change):
            name, old, new = changes[0]
            way_out = "choose another folder" if what == "job" else f"delete {LEDGER_PARTS}/add to abandon it"
            raise JobError(
                f"the unfinished {what} here has {name} {old!r}, this one {new!r}",
                file=where.url,
                hint=f"resume it with the same sources, arguments and ffmpeg, or {way_out}"
                + ("; or continue with this ffmpeg by --allow-encoder-change" if builds_only else ""),
            )
        if changes:
            _LOG.warning("resuming with another build of ffmpeg; samples of unfinished shards are encoded again")
            # Other parts may still resume with the build that the job began with.
            if self._whole:
                self.staging.begin(self.identity, replace=True)
        else:
            _LOG.info("resuming the unfinished %s in %s", what, where.url)

    def _finish(self, engine: Engine) -> list[Part]:
        todo = list(self._take_stock())
        # Hashing, checksums and disk writes release the GIL, so workers get tasks while a shard is written.
        with ThreadPoolExecutor(1, thread_name_prefix="pack") as packer:
            try:
                for shard in self._mine:
                    if shard not in self.parts:
                        self._settle(shard, packer)
                for outcome in engine.run(self._task(shard, slot) for shard, slot in todo):
                    faults.reach("encode")
                    shard, slot = self._place(outcome.index)
                    self.outages.add_outcome(self.shards[shard][slot], outcome)
                    if outcome.transient:
                        self.staging.put(self.stems[shard], slot, outcome)
                        self._again.append((shard, slot))
                    else:
                        self._keep(shard, slot, outcome, packer)
                if self._again:
                    _LOG.info("retrying each of %d sources alone: their errors may be transient", len(self._again))
                for shard, slot in self._again:
                    outcome = retry_alone(engine, self._task(shard, slot))
                    if self.outages.add_final_outcome(self.shards[shard][slot], outcome):
                        self._keep(shard, slot, outcome, packer)
                for future in self._packing:
                    future.result()
                self.outages.finish()
            finally:
                self.progress.finish()
        return [self.parts[shard] for shard in self._mine]

    def _take_stock(self) -> Iterator[tuple[int, int]]:
        """Load the results of earlier runs; yield the slots that must still be processed, in order."""
        for folder in (self.storage, self.scratch):
            if isinstance(folder, LocalStorage):
                if self._whole:
                    folder.sweep()
                else:
                    folder.sweep_dead()
        found, staged = part_stems(self.storage), self.staging.slots()
        known = [shard for shard in self._mine if self.stems[shard] in found]
        with ThreadPoolExecutor(_READERS, thread_name_prefix="parts") as readers:
            done = dict(zip(known, readers.map(self._finished, (self.stems[shard] for shard in known)), strict=True))
        for shard in self._mine:
            stem, sources, part = self.stems[shard], self.shards[shard], done.get(shard)
            if part is not None:
                self.parts[shard] = part
                if stem in staged:
                    self.staging.drop(stem)
                packed = {row["source_id"] for row in part.rows if row["status"] == "packed"}
                self.outages.add_readable(source for source in sources if encode_name(source.id) in packed)
                rejected = [Reason(row["reason"]) for row in part.rows if row["status"] != "packed"]
                self.heartbeat.reasons.update(rejected)
                self.progress.take(len(sources), rejected=len(rejected))
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
                    self._count(outcome)

    def _finished(self, stem: str) -> Part | None:
        """Return the part of a finished shard; None if its file is missing, as in an incomplete copy of the folder."""
        part, name = read_part(self.storage, stem), f"{stem}.{self.work.suffix}"
        if part.digest is None or (self.storage.exists(name) and self.storage.size(name) == part.digest.bytes):
            return part
        _LOG.warning("%s does not match its part of the ledger: its shard is made again", name)
        return None

    def _task(self, shard: int, slot: int) -> SourceTask:
        return self.work.task(self._first[shard] + slot, self.shards[shard][slot])

    def _place(self, index: int) -> tuple[int, int]:
        shard = bisect_right(self._first, index) - 1
        return shard, index - self._first[shard]

    def _keep(self, shard: int, slot: int, outcome: Outcome, packer: ThreadPoolExecutor) -> None:
        self.staging.put(self.stems[shard], slot, outcome)
        if outcome.reason is not None:
            source = self.shards[shard][slot]
            _LOG.warning("%s: %s: %s", encode_name(source.id), outcome.reason.value, outcome.message)
        self._missing[shard] -= 1
        self.progress.advance(rejected=outcome.reason is not None)
        self._count(outcome)
        self._settle(shard, packer)

    def _count(self, outcome: Outcome) -> None:
        if outcome.reason is not None:
            self.heartbeat.reasons[outcome.reason] += 1

    def _settle(self, shard: int, packer: ThreadPoolExecutor) -> None:
        """Submit a shard for packing if it is complete; raise if packing an earlier one has failed."""
        if not self._missing[shard]:
            self._packing.append(packer.submit(self._pack, shard))
        waiting = []
        for future in self._packing:
            if future.done():
                future.result()
            else:
                waiting.append(future)
        self._packing = waiting

    def _pack(self, shard: int) -> None:
        """Write a complete shard and its part of the ledger. Idempotent: repeated, it writes the same bytes."""
        self._check()
        part = self.work.write(shard, self._outcomes(shard))
        write_part(self.storage, part)
        self.parts[shard] = part
        self.staging.drop(part.stem)

    def _outcomes(self, shard: int) -> Iterator[Outcome]:
        """Yield the outcomes of a complete shard, in the order of its slots."""
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
            if outcome.source_sha256 in self.work.blocked:
                # It was processed before it was blocked.
                outcome = replace(outcome, reason=Reason.BLOCKED, samples=())
            yield outcome
