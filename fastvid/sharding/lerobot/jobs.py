"""Writes shards of episodes: of videos in place, or encoded into tars; their signals beside them.

Make a dataset of a LeRobot dataset: where it is, or encoded again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from fastvid.errors import FormatError, UsageError
from fastvid.format.annotations import write_signals
from fastvid.format.in_place import IndexedSample, ListedFile
from fastvid.format.schema import DATASET_JSON, IN_PLACE, shard_stem
from fastvid.format.shard import sample_members, write_in_place
from fastvid.media.ffmpeg import Limits, find_ffmpeg
from fastvid.media.index_video import Proof
from fastvid.runtime import faults
from fastvid.runtime.names import encode_name
from fastvid.sharding.encode.profile import Profile
from fastvid.sharding.encode.profiles import get_profile
from fastvid.sharding.engines.local import open_engine
from fastvid.sharding.in_place import IndexFiles, indexed_source, waiting_workers
from fastvid.sharding.job.job import MAX_SECONDS, JobReport, check_amounts, choose_settings, commit_job, finished_ledger
from fastvid.sharding.job.ledger import PackedSample, Part, Row, ledger_row, read_blocked, rows_table
from fastvid.sharding.job.lock import lock_folder
from fastvid.sharding.job.plan import JobPart, digest
from fastvid.sharding.job.restore import annotate_members, annotation_row, dataset_record
from fastvid.sharding.job.run import EncodeShards, Job
from fastvid.sharding.lerobot.read import (
    EPISODES_PER_SHARD,
    LeRobotDataset,
    episode_shards,
    episode_sources,
    extras_of,
    in_file_order,
    joined,
    kept_episodes,
    read_lerobot,
    read_signals_of,
)
from fastvid.sharding.sources.sources import Source, SourceList
from fastvid.sharding.work.tasks import Outcome, Settings, SourceTask
from fastvid.storage import Storage, open_storage

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


# Longer than any episode, in seconds: episodes are never divided.
_UNDIVIDED = 1e9


def index_lerobot(
    source: str,
    out: str | os.PathLike[str],
    *,
    proof: str = Proof.SAMPLE,
    engine: str = "local",
    ray_address: str | None = None,
    workers: int | None = None,
    episodes_per_shard: int = EPISODES_PER_SHARD,
    part: JobPart | str | None = None,
    reject_unreadable: bool = False,
    limits: Limits | None = None,
) -> JobReport:
    """Make a dataset of a LeRobot dataset where it is, as ``fastvid index lerobot:ROOT --out DIR`` does.

    Each episode is a sample, ``episode_000000``; its cameras are its streams, features that are numbers its signals.
    Run again with the same arguments after an interruption, it resumes. Arguments that are not listed are those of
    `fastvid.sharding.in_place.index_videos`.

    Args:
        source: ``lerobot:`` and the folder or URL of the LeRobot dataset, version 3.0 or 2.1.
        out: Folder of the dataset: a path, or a ``s3://`` or ``gs://`` URL.
        episodes_per_shard: Most episodes of a shard.

    Raises:
        UsageError: If an argument is wrong, or there is no LeRobot dataset.
        FormatError: If its metadata contradicts itself or its files.
        JobError: If another job, or the same part, is running in `out`, the unfinished job there differs, or no episode
            could be indexed.
        StorageError: If `out` cannot be written, or a disk or store does not deliver files; run again to resume.
        WorkerError: If workers cannot be started, or the Ray cluster is gone; run again to resume.
    """
    check_amounts(workers=workers, samples_per_shard=episodes_per_shard, max_seconds=MAX_SECONDS)
    if proof not in list(Proof):
        raise UsageError(f"invalid proof {proof!r}", hint=f"use {', '.join(Proof)}")
    dataset = read_lerobot(source)
    found, storage = episode_sources(dataset), open_storage(out)
    settings = Settings(
        get_profile("compact"),  # nothing is encoded
        find_ffmpeg(),
        limits or Limits(),
        MAX_SECONDS,
        blocked=read_blocked(storage),
        proof=Proof(proof),
    )
    if workers is None and engine == "local":
        workers = waiting_workers(found.sources)
    work = IndexEpisodes(storage, dataset, found, settings, episodes_per_shard)
    return _run(
        storage,
        dataset,
        found,
        settings,
        work,
        engine=engine,
        ray_address=ray_address,
        workers=workers,
        part=part,
        reject_unreadable=reject_unreadable,
        profile={"name": IN_PLACE, "proof": proof},
        extras={IN_PLACE: {"root": work.root}},
        command="index",
    )


def shard_lerobot(
    source: str,
    out: str | os.PathLike[str],
    *,
    profile: str | Profile = "compact",
    engine: str = "local",
    ray_address: str | None = None,
    workers: int | None = None,
    episodes_per_shard: int = EPISODES_PER_SHARD,
    part: JobPart | str | None = None,
    scratch: str | os.PathLike[str] | None = None,
    reject_unreadable: bool = False,
    allow_encoder_change: bool = False,
    limits: Limits | None = None,
) -> JobReport:
    """Encode a LeRobot dataset into shards, as ``fastvid shard lerobot:ROOT --out DIR --profile NAME`` does.

    Samples, streams and signals are those of `index_lerobot`. Episodes are cut by the numbers of their frames, never
    by seconds. Run again with the same arguments after an interruption, it resumes. Arguments that are not listed are
    those of `fastvid.sharding.job.job.run_job`.

    Args:
        source: ``lerobot:`` and the folder or URL of the LeRobot dataset, version 3.0 or 2.1.
        out: Folder of the dataset: a path, or a ``s3://`` or ``gs://`` URL.
        profile: How to encode, by name or as a `Profile`; it must keep the rate of the frames.
        episodes_per_shard: Most episodes of a shard.

    Raises:
        UsageError: If an argument is wrong, or there is no LeRobot dataset.
        FormatError: If its metadata contradicts itself or its files.
        MissingDependency: If there is no ffmpeg, or no Ray for engine "ray".
        JobError: If another job, or the same part, is running in `out`, the unfinished job there differs, or no episode
            could be encoded.
        StorageError: If `out` cannot be written, or a disk or store does not deliver files; run again to resume.
        WorkerError: If workers cannot be started, or the Ray cluster is gone; run again to resume.
    """
    check_amounts(workers=workers, samples_per_shard=episodes_per_shard, max_seconds=_UNDIVIDED)
    chosen = get_profile(profile) if isinstance(profile, str) else profile
    if chosen.fps:
        raise UsageError(
            f"the rate of episodes cannot change to {chosen.fps}: each frame has its row of signals",
            hint="omit --fps, and choose frames by frames=Deltas(...) or AtFps(...) when loading",
        )
    if chosen.copies:
        raise UsageError(
            f"profile {chosen.name!r} does not encode", hint="use `fastvid index lerobot:ROOT`, or another profile"
        )
    settings = choose_settings(
        chosen,
        streams=("rgb",),
        audio="drop",
        flow="dis",
        flow_bound=None,
        max_seconds=_UNDIVIDED,
        max_bad_frames=None,
        limits=limits,
    )
    dataset = read_lerobot(source)
    found, storage = episode_sources(dataset), open_storage(out)
    work = EncodeEpisodes(storage, dataset, found, settings, episodes_per_shard, scratch=scratch)
    return _run(
        storage,
        dataset,
        found,
        settings,
        work,
        engine=engine,
        ray_address=ray_address,
        workers=workers,
        part=part,
        reject_unreadable=reject_unreadable,
        allow_encoder_change=allow_encoder_change,
        profile=work.identity["profile"],
        extras={},
        command="shard",
    )


def _run(
    storage: Storage,
    dataset: LeRobotDataset,
    found: SourceList,
    settings: Settings,
    work: IndexEpisodes | EncodeEpisodes,
    *,
    engine: str,
    ray_address: str | None,
    workers: int | None,
    part: JobPart | str | None,
    reject_unreadable: bool,
    profile: Mapping[str, Any],
    extras: Mapping[str, Any],
    command: str,
    allow_encoder_change: bool = False,
) -> JobReport:
    mine = JobPart.parse(part) if isinstance(part, str) else part
    with lock_folder(storage, mine) as check:
        job = Job(storage, work, part=mine, reject_unreadable=reject_unreadable, command=command)
        if storage.exists(DATASET_JSON):
            ledger = finished_ledger(storage, job.identity)
        else:
            place = open_engine(engine, settings, workers=workers, address=ray_address)
            parts = job.run(place, check, allow_encoder_change=allow_encoder_change)
            if mine is not None:
                rows = rows_table(row for one in parts for row in one.rows)
                return JobReport(storage.url, rows, found.ignored, mine)
            ledger = commit_job(
                storage,
                job.identity,
                found,
                parts,
                profile=profile,
                streams=dataset.cameras,
                extras={**extras, **extras_of(dataset)},
                note=f"fastvid {command}",
            )
        job.end()
    return JobReport(storage.url, ledger, found.ignored)
