"""What a job does with the sources of a shard: the interface, and the work of jobs that encode."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Protocol

from fastvid.format.schema import shard_stem
from fastvid.format.write_shard import sample_members, write_shard
from fastvid.runtime import faults
from fastvid.runtime.file_names import encode_name
from fastvid.sharding.job.identity import job_identity
from fastvid.sharding.job.ledger import PackedSample, Part, Row, ledger_row
from fastvid.sharding.job.plan import file_order, plan_shards
from fastvid.sharding.job.scratch import scratch_folder
from fastvid.sharding.job.tar_annotations import annotate_members, annotation_row, dataset_record, with_record
from fastvid.sharding.sources.sources import Source, SourceList
from fastvid.sharding.work.messages import Outcome, Settings, SourceTask
from fastvid.storage import LocalStorage, Storage


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
