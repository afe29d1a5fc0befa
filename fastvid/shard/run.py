"""One run of a job: takes up what earlier runs have left, encodes what is missing, packs complete shards."""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import accumulate, chain
from typing import Any, Final

from fastvid import faults
from fastvid.errors import JobError
from fastvid.format.schema import shard_stem
from fastvid.format.shard import sample_members, write_shard
from fastvid.shard.engines import Engine
from fastvid.shard.ledger import PackedSample, Part, Row, ledger_row, part_name, read_part, write_part
from fastvid.shard.progress import Progress
from fastvid.shard.sources import Source, encode_name
from fastvid.shard.staging import Staging
from fastvid.shard.wire import Outcome, Task
from fastvid.storage import LocalStorage, Storage

_LOG = logging.getLogger(__name__)

# A source that was too slow among others gets this much more time when it is tried alone.
_PATIENCE: Final = 4.0

Members = tuple[str, Mapping[str, bytes]]


class Run:
    """Brings every shard of a plan to disk.

    Args:
        storage: Folder of the dataset.
        shards: Sources by shard and slot.
        encoder: Build of the encoder, recorded with each shard.
        streams: Video streams of every sample.
    """

    def __init__(
        self,
        storage: Storage,
        shards: Sequence[Sequence[Source]],
        encoder: Mapping[str, Any],
        streams: tuple[str, ...] = ("rgb",),
    ) -> None:
        self.storage, self.shards, self.encoder, self.streams = storage, shards, encoder, streams
        self.staging = Staging(storage)
        self.parts: dict[int, Part] = {}
        self.progress = Progress(sum(map(len, shards)))
        self._first = list(accumulate(map(len, shards), initial=0))
        self._missing: Counter[int] = Counter()
        self._again: list[tuple[int, int]] = []
        self._packing: list[Future[None]] = []

    def finish(self, engine: Engine) -> list[Part]:
        """Encodes and packs what is missing; gives the parts of all shards, in order.

        Raises:
            StorageError: The folder cannot be written, or is full.
            WorkerError: Workers cannot be started.
        """
        todo = list(self._take_stock())
        # Hashing, checksums and disk writes leave the interpreter's lock alone, so workers are fed while a shard is
        # written.
        with ThreadPoolExecutor(1, thread_name_prefix="pack") as packer:
            try:
                for shard in range(len(self.shards)):
                    if shard not in self.parts:
                        self._settle(shard, packer)
                for outcome in engine.run(self._task(shard, slot) for shard, slot in todo):
                    faults.reach("encode")
                    shard, slot = self._place(outcome.index)
                    if outcome.transient:
                        self.staging.put(shard_stem(shard), slot, outcome)
                        self._again.append((shard, slot))
                    else:
                        self._keep(shard, slot, outcome, packer)
                if self._again:
                    _LOG.info("%d sources failed in a way that may pass: trying each alone", len(self._again))
                for shard, slot in self._again:
                    for outcome in engine.run([replace(self._task(shard, slot), patience=_PATIENCE)]):
                        self._keep(shard, slot, replace(outcome, transient=False), packer)
                for future in self._packing:
                    future.result()
            finally:
                self.progress.finish()
        return [self.parts[shard] for shard in range(len(self.shards))]

    def _take_stock(self) -> Iterator[tuple[int, int]]:
        """Reads what earlier runs have left; gives the slots that are still to be encoded, in order."""
        if isinstance(self.storage, LocalStorage):
            self.storage.sweep()
        for shard, sources in enumerate(self.shards):
            stem = shard_stem(shard)
            if self.storage.exists(part_name(stem)):
                self.parts[shard] = part = read_part(self.storage, stem)
                self.staging.drop(stem)
                self.progress.take(len(sources), rejected=sum(row["status"] != "packed" for row in part.rows))
                continue
            self._missing[shard] = len(sources)
            staged = set(self.staging.slots(stem))
            for slot in range(len(sources)):
                outcome = self.staging.get(stem, slot) if slot in staged else None
                if outcome is None:
                    yield shard, slot
                elif outcome.transient:
                    self._again.append((shard, slot))
                else:
                    self._missing[shard] -= 1
                    self.progress.take(1, rejected=int(outcome.reason is not None))

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
        """Has a shard packed when it is complete, and fails if packing an earlier one has failed."""
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
        """Writes a complete shard and its part of the ledger. Done twice, it writes the same bytes."""
        stem = shard_stem(shard)
        rows: list[Row] = []
        packed: list[PackedSample] = []
        members = self._members(shard, rows, packed)
        first = next(members, None)
        # A shard of nothing but rejected sources leaves a gap.
        digest = (
            None if first is None else write_shard(self.storage, stem, chain([first], members), streams=self.streams)
        )
        faults.reach("ledger")
        part = Part(stem, rows, packed, digest, self.encoder)
        write_part(self.storage, part)
        self.parts[shard] = part
        self.staging.drop(stem)

    def _members(self, shard: int, rows: list[Row], packed: list[PackedSample]) -> Iterator[Members]:
        """The samples of a shard in the order of its slots; ledger rows are added along the way."""
        stem = shard_stem(shard)
        for slot, source in enumerate(self.shards[shard]):
            outcome = self.staging.get(stem, slot)
            if outcome is None:
                raise JobError(
                    "an encoded sample was damaged on disk while it waited to be packed",
                    shard=stem,
                    key=source.key,
                    hint="run the job again",
                )
            rows.append(ledger_row(source, outcome, stem))
            for sample in outcome.samples:
                meta = sample.meta
                parent, start = meta.get("parent"), meta.get("start_seconds")
                packed.append(PackedSample(encode_name(source.id), sample.key, sample.num_frames, parent, start))
                yield sample.key, sample_members(meta, sample.streams)
