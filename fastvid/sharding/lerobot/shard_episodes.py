"""Writes shards of episodes: of videos in place, or encoded into tars; their signals beside them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from fastvid.errors import FormatError
from fastvid.format.annotations.signals import write_signals
from fastvid.format.in_place import ListedFile
from fastvid.format.indexed import IndexedSample
from fastvid.format.schema import shard_stem
from fastvid.format.write_shard import sample_members, write_in_place
from fastvid.runtime import faults
from fastvid.runtime.file_names import encode_name
from fastvid.sharding.in_place.index_files import IndexFiles, indexed_source
from fastvid.sharding.job.identity import digest
from fastvid.sharding.job.ledger import PackedSample, Part, Row, ledger_row
from fastvid.sharding.job.shard_work import EncodeShards
from fastvid.sharding.job.tar_annotations import annotate_members, annotation_row, dataset_record
from fastvid.sharding.lerobot.episodes import episode_shards, extras_of, in_file_order, joined, kept_episodes
from fastvid.sharding.lerobot.metadata import LeRobotDataset, read_signals_of
from fastvid.sharding.sources.sources import Source, SourceList
from fastvid.sharding.work.messages import Outcome, Settings, SourceTask
from fastvid.storage import Storage

# What the JSON says of a stream that was copied beside cameras that were encoded.
_OWN: Final = ("width", "height", "pix_fmt", "conforms", "proved")


class IndexEpisodes(IndexFiles):
    """Indexes episodes in place: a `ShardWork` whose samples are episodes, with a stream for each camera."""

    def __init__(
        self, storage: Storage, dataset: LeRobotDataset, found: SourceList, settings: Settings, per_shard: int
    ) -> None:
        self._dataset = dataset
        shards = episode_shards(dataset, found, per_shard)
        super().__init__(storage, found, settings, seed=0, samples_per_shard=per_shard, shards=shards)
        self.identity = {**self.identity, "lerobot": _identity(dataset, found)}

    def order(self, shard: int) -> list[int]:
        """See `ShardWork`."""
        return in_file_order(self.shards[shard])

    def task(self, index: int, source: Source) -> SourceTask:
        """See `ShardWork`."""
        return replace(super().task(index, source), frames=source.frames)

    def write(self, shard: int, outcomes: Iterator[Outcome]) -> Part:
        """See `ShardWork`. An episode without one of its cameras is rejected."""
        stem, rows = self.stems[shard], list[Row]()
        packed, samples, files = list[PackedSample](), list[IndexedSample](), list[ListedFile]()
        cameras = self._dataset.cameras
        for views in joined(self.shards[shard], outcomes, len(cameras)):
            for source, outcome in views:
                # The digest of a file is not that of its episodes, which would be duplicates of each other.
                rows.append(ledger_row(source, outcome, stem) | {"source_sha256": None})
                if outcome.reason is None:
                    rows[-1]["bytes_out"] = 0  # the video stays where it is
            if views[0][1].reason is not None:
                continue
            made = [indexed_source(source, outcome) for source, outcome in views]
            samples.append(replace(made[0][0], streams=tuple(one.streams[0] for one, _, _ in made)))
            files += [file for _, file, _ in made]
            packed.append(made[0][2])
        digests = write_in_place(self._storage, stem, samples, files, cameras) if samples else None
        signals = _write_signals(self._storage, stem, self._dataset, packed)
        faults.reach("ledger")
        return Part(stem, rows, packed, digests, signals=signals)


class EncodeEpisodes(EncodeShards):
    """Encodes episodes into tars: a `ShardWork` whose samples have a stream for each camera.

    `settings`: how videos are encoded; the rate of frames stays.
    """

    def __init__(
        self,
        storage: Storage,
        dataset: LeRobotDataset,
        found: SourceList,
        settings: Settings,
        per_shard: int,
        *,
        scratch: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__(storage, found, settings, seed=0, samples_per_shard=per_shard, scratch=scratch)
        self._dataset, self._lengths = dataset, {episode.key: episode.length for episode in dataset.episodes}
        self.identity["lerobot"] = _identity(dataset, found)
        self._streams = dataset.cameras
        self._record = dataset_record(
            1,
            streams=dataset.cameras,
            classes=self._classes,
            extras=extras_of(dataset),
            profile=self.identity["profile"],
            encoder=self.encoder,
        )
        self.shards = episode_shards(dataset, found, per_shard)
        self.stems = [shard_stem(number) for number in range(len(self.shards))]

    def order(self, shard: int) -> Sequence[int]:
        """See `ShardWork`."""
        return in_file_order(self.shards[shard])

    def task(self, index: int, source: Source) -> SourceTask:
        """See `ShardWork`. Depth has more levels than a profile encodes, so its packets are copied."""
        return replace(super().task(index, source), frames=source.frames, copies=source.stream in self._dataset.depth)

    def write(self, shard: int, outcomes: Iterator[Outcome]) -> Part:
        """See `ShardWork`. An episode without one of its cameras is rejected."""
        part = super().write(shard, outcomes)
        return replace(part, signals=_write_signals(self._storage, part.stem, self._dataset, part.samples))

    def _members(
        self, shard: int, outcomes: Iterator[Outcome], rows: list[Row], packed: list[PackedSample]
    ) -> Iterator[tuple[str, Mapping[str, bytes]]]:
        for views in joined(self.shards[shard], outcomes, len(self._dataset.cameras)):
            rows += [
                ledger_row(source, outcome, self.stems[shard]) | {"source_sha256": None} for source, outcome in views
            ]
            pictures = [view for view in views if view[0].stream not in self._dataset.depth]
            source, outcome = (pictures or views)[0]
            if outcome.reason is not None:
                continue
            meta: dict[str, Any] = {
                name: value
                for name, value in outcome.samples[0].meta.items()
                if name not in ("parent", "start_seconds", "end_seconds", "source_sha256")
            }
            copied = {one.stream: result.samples[0].meta for one, result in views if (one, result) not in pictures}
            if copied:
                meta["streams"] = {name: {key: facts[key] for key in _OWN} for name, facts in copied.items()}
            counts = [one.samples[0].num_frames for _, one in views]
            if counts != [self._lengths[source.key]] * len(views):
                raise FormatError(
                    f"cameras were encoded to {', '.join(map(str, counts))} frames, the episode has"
                    f" {self._lengths[source.key]}",
                    key=source.key,
                )
            facts = (meta["num_frames"], meta["fps"], meta["width"], meta["height"])
            packed.append(PackedSample(encode_name(source.id), source.key, *facts))
            streams = {one.stream: result.samples[0].streams["rgb"] for one, result in views}
            row = annotation_row(packed[-1], source, self._labels)
            yield source.key, annotate_members(sample_members(meta, streams), row, self._classes)


def _identity(dataset: LeRobotDataset, found: SourceList) -> dict[str, Any]:
    sources = [(source.frames, source.stream) for source in found.sources]
    return {"episodes": len(dataset.episodes), "sha256": digest([dataset.info, dataset.stats, sources])}


def _write_signals(storage: Storage, stem: str, dataset: LeRobotDataset, packed: Sequence[PackedSample]) -> str:
    """Write the signals of the episodes of a shard; return their SHA-256, "" if there are none."""
    if not packed or not dataset.signals:
        return ""
    episodes = kept_episodes(dataset, [sample.key for sample in packed])
    return write_signals(storage, stem, read_signals_of(dataset, episodes))
