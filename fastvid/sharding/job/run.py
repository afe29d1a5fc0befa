"""A sharding job: resumes the work of earlier runs, encodes missing sources and packs complete shards."""

from __future__ import annotations

import contextlib
import logging
import os
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import accumulate, chain
from typing import Final

from fastvid.errors import JobError
from fastvid.format.schema import LEDGER_PARTS, shard_stem
from fastvid.format.shard import sample_members, write_shard
from fastvid.media.reasons import Reason
from fastvid.runtime import faults
from fastvid.runtime.progress import Progress
from fastvid.sharding.engines.engine import Engine
from fastvid.sharding.job.identity import differences, job_identity
from fastvid.sharding.job.ledger import PackedSample, Part, Row, ledger_row, part_stems, read_part, write_part
from fastvid.sharding.job.outages import OutageDetector
from fastvid.sharding.job.plan import JobPart, plan_shards
from fastvid.sharding.job.scratch import remove_scratch, scratch_folder
from fastvid.sharding.job.staging import Staging
from fastvid.sharding.sources.sources import SourceList, encode_name
from fastvid.sharding.work.messages import Outcome, Settings, Task
from fastvid.storage import LocalStorage, Storage

_LOG = logging.getLogger(__name__)

# A source that was too slow when run in parallel gets this much more time when it is retried alone.
_PATIENCE: Final = 4.0
# Parts of the ledger read in parallel: each costs three round trips to an object store.
_READERS: Final = 16

Members = tuple[str, Mapping[str, bytes]]


def retry_alone(engine: Engine, task: Task) -> Outcome:
    """Retry a task whose outcome was transient, without others in parallel, and return its final outcome.

    A source whose worker dies is tried once more: something else may have killed the worker just then.
    """
    for _ in range(2):
        (outcome,) = engine.run([replace(task, patience=_PATIENCE)])
        if outcome.reason is not Reason.CRASHED:
            break
    return replace(outcome, transient=False)


class Job:
    """Encodes sources into shards of a folder, for `run_job` and `fastvid.sharding.change.add`.

    Args:
        storage: Folder of the shards, and of the record that marks them as unfinished.
        found: The sources.
        settings: How they are encoded.
        seed: Seed of the order of samples in the shards.
        samples_per_shard: Maximum number of sources in a shard.
        part: The part of the shards to make; None makes all.
        scratch: See `scratch_folder`.
        reject_unreadable: See `OutageDetector`.
        added_to: The dataset that the shards are added to afterwards; None if they become a new one.
    """

    def __init__(
        self,
        storage: Storage,
        found: SourceList,
        settings: Settings,
        *,
        seed: int,
        samples_per_shard: int,
        part: JobPart | None = None,
        scratch: str | os.PathLike[str] | None = None,
        reject_unreadable: bool = False,
        added_to: Storage | None = None,
    ) -> None:
        self.identity = job_identity(found, settings, seed=seed, samples_per_shard=samples_per_shard)
        self.storage, self.streams, self.encoder = storage, settings.streams.video, self.identity["encoder"]
        self.scratch = scratch_folder(storage, scratch)
        self.staging = Staging(storage, self.scratch, self.encoder)
        self.outages = OutageDetector(reject_unreadable=reject_unreadable)
        self.parts: dict[int, Part] = {}
        self._added_to, self._whole = added_to, part is None
        tried = [source for source in found.sources if source.problem is None]
        self.shards = plan_shards(tried, seed=seed, samples=samples_per_shard)
        self._mine = [number for number in range(len(self.shards)) if part is None or part.has(number)]
        self.progress = Progress(sum(len(self.shards[number]) for number in self._mine))
        self._first = list(accumulate(map(len, self.shards), initial=0))
        self._missing: Counter[int] = Counter()
        self._again: list[tuple[int, int]] = []
        self._packing: list[Future[None]] = []

    def run(self, engine: Engine, check: Callable[[], None], *, allow_encoder_change: bool = False) -> list[Part]:
        """Encode and pack what is missing; return the records of the shards, in order. Closes the engine.

        Args:
            engine: Where to encode.
            check: Called before each shard is written; raises if another job has taken over the folder.
            allow_encoder_change: Whether to resume a job that began with another build of ffmpeg.

        Raises:
            JobError: If the unfinished job in the folder is another one.
            StorageError: If the folder cannot be written or is full, or a disk or store does not deliver sources.
            WorkerError: If workers cannot be started.
        """
        self._check = check
        self._begin(allow_encoder_change=allow_encoder_change)
        with contextlib.closing(engine):
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
                        self.staging.put(shard_stem(shard), slot, outcome)
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
        """Load the results of earlier runs; yield the slots that must still be encoded, in order."""
        for folder in (self.storage, self.scratch):
            if isinstance(folder, LocalStorage):
                if self._whole:
                    folder.sweep()
                else:
                    folder.sweep_dead()
        found, staged = part_stems(self.storage), self.staging.slots()
        known = [shard for shard in self._mine if shard_stem(shard) in found]
        with ThreadPoolExecutor(_READERS, thread_name_prefix="parts") as readers:
            done = dict(zip(known, readers.map(self._finished, map(shard_stem, known)), strict=True))
        for shard in self._mine:
            stem, sources, part = shard_stem(shard), self.shards[shard], done.get(shard)
            if part is not None:
                self.parts[shard] = part
                if stem in staged:
                    self.staging.drop(stem)
                packed = {row["source_id"] for row in part.rows if row["status"] == "packed"}
                self.outages.add_readable(source for source in sources if encode_name(source.id) in packed)
                self.progress.take(len(sources), rejected=sum(row["status"] != "packed" for row in part.rows))
                continue
            self._missing[shard] = len(sources)
            for slot in range(len(sources)):
                outcome = self.staging.get(stem, slot) if slot in staged.get(stem, ()) else None
                if outcome is None:
                    yield shard, slot
                elif outcome.transient:
                    self._again.append((shard, slot))
                else:
                    self._missing[shard] -= 1
                    self.progress.take(1, rejected=int(outcome.reason is not None))

    def _finished(self, stem: str) -> Part | None:
        """Return the part of a finished shard; None if its tar is missing, as in an incomplete copy of the folder."""
        part, name = read_part(self.storage, stem), f"{stem}.tar"
        if part.digest is None or (self.storage.exists(name) and self.storage.size(name) == part.digest.bytes):
            return part
        _LOG.warning("%s does not match its part of the ledger: its shard is encoded again", name)
        return None

    def _task(self, shard: int, slot: int) -> Task:
        source = self.shards[shard][slot]
        return Task(
            index=self._first[shard] + slot,
            source_id=encode_name(source.id),
            path=source.path,
            key=source.key,
            size=source.size,
            start=source.start,
            end=source.end,
            member=source.member,
            tag=source.tag,
            parent=None if source.parent is None else encode_name(source.parent),
        )

    def _place(self, index: int) -> tuple[int, int]:
        shard = bisect_right(self._first, index) - 1
        return shard, index - self._first[shard]

    def _keep(self, shard: int, slot: int, outcome: Outcome, packer: ThreadPoolExecutor) -> None:
        self.staging.put(shard_stem(shard), slot, outcome)
        if outcome.reason is not None:
            source = self.shards[shard][slot]
            _LOG.warning("%s: %s: %s", encode_name(source.id), outcome.reason.value, outcome.message)
        self._missing[shard] -= 1
        self.progress.advance(rejected=outcome.reason is not None)
        self._settle(shard, packer)

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
        stem = shard_stem(shard)
        rows: list[Row] = []
        packed: list[PackedSample] = []
        members = self._members(shard, rows, packed)
        first = next(members, None)
        # If all sources of a shard are rejected, there is no tar and its number stays unused.
        digest = (
            None
            if first is None
            else write_shard(self.storage, stem, chain([first], members), streams=self.streams, scratch=self.scratch)
        )
        faults.reach("ledger")
        part = Part(stem, rows, packed, digest, self.encoder)
        write_part(self.storage, part)
        self.parts[shard] = part
        self.staging.drop(stem)

    def _members(self, shard: int, rows: list[Row], packed: list[PackedSample]) -> Iterator[Members]:
        """Yield the samples of a shard in the order of its slots, and append their ledger rows."""
        stem = shard_stem(shard)
        for slot, source in enumerate(self.shards[shard]):
            outcome = self.staging.get(stem, slot)
            if outcome is None:
                raise JobError(
                    "an encoded sample was damaged on disk before it was packed",
                    shard=stem,
                    key=source.key,
                    hint="run the job again to encode it again",
                )
            rows.append(ledger_row(source, outcome, stem))
            for sample in outcome.samples:
                meta = sample.meta
                place = (meta.get("parent"), meta.get("start_seconds"), meta.get("end_seconds"))
                facts = (sample.num_frames, meta["fps"], meta["width"], meta["height"])
                packed.append(PackedSample(encode_name(source.id), sample.key, *facts, *place))
                yield sample.key, sample_members(meta, sample.streams)
