"""A job: resumes the work of earlier runs, processes missing sources and writes complete shards."""

from __future__ import annotations

import contextlib
import logging
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import accumulate
from typing import Final

from fastvid.errors import JobError
from fastvid.format.schema import LEDGER_PARTS
from fastvid.media.reasons import Reason
from fastvid.runtime import faults
from fastvid.runtime.file_names import encode_name
from fastvid.runtime.progress import Progress
from fastvid.sharding.engines.engine import Engine
from fastvid.sharding.job.heartbeat import Heartbeat
from fastvid.sharding.job.identity import differences
from fastvid.sharding.job.ledger import Part, part_stems, read_part, write_part
from fastvid.sharding.job.outages import OutageDetector
from fastvid.sharding.job.plan import JobPart
from fastvid.sharding.job.scratch import remove_scratch
from fastvid.sharding.job.shard_work import ShardWork
from fastvid.sharding.job.staging import Staging
from fastvid.sharding.work.messages import Outcome, SourceTask
from fastvid.storage import LocalStorage, Storage

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
