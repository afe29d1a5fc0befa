"""Makes a fastvid dataset from a LeRobot dataset: indexed where it is, or encoded again.

Each episode is a sample with a stream for each camera; signals are in files next to the shards.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

from fastvid.errors import FormatError, UsageError
from fastvid.format.annotations import write_signals
from fastvid.format.generations import Generation, read_generation
from fastvid.format.schema import DATASET_JSON, LEROBOT
from fastvid.media.ffmpeg import Limits
from fastvid.media.index_video import Proof
from fastvid.sharding.encode.profiles import Profile, Settings, get_profile
from fastvid.sharding.in_place import IndexFiles
from fastvid.sharding.job.job import UNDIVIDED, EncodeShards, JobReport, choose_settings, index_settings, run
from fastvid.sharding.job.ledger import PackedSample, Row
from fastvid.sharding.job.plan import digest
from fastvid.sharding.job.run import How, SourceWork, View
from fastvid.sharding.lerobot import read
from fastvid.sharding.lerobot.read import EPISODES_PER_SHARD, LeRobotDataset
from fastvid.sharding.sources.sources import LEROBOT_INFO, Source
from fastvid.sharding.work.tasks import EncodedSample, Outcome, SourceTask
from fastvid.storage import Storage, open_storage

# Fields of a sample's JSON about a stream that was copied, while the other cameras were encoded.
_OWN: Final = ("width", "height", "pix_fmt", "conforms", "proved")
# Fields that the JSON of an episode does not have, unlike that of a video.
_NOT_OF_EPISODES: Final = ("parent", "start_seconds", "end_seconds", "source_sha256")


class _Episodes(SourceWork):
    """Common to episodes that are encoded or indexed in place: signals, and a stream for each camera."""

    def __init__(self, storage: Storage, dataset: LeRobotDataset, settings: Settings, most: int, **more: Any) -> None:
        found = read.episode_sources(dataset)
        more["shards"] = read.episode_shards(dataset, found, most)
        super().__init__(storage, found, settings, samples_per_shard=most, **more)
        self.dataset, self.streams, self.sources_per_sample = dataset, dataset.cameras, len(dataset.cameras)
        self.extras = {**self.extras, **read.extras_of(dataset)}
        sources = [(source.frames, source.stream) for source in found.sources]
        known = {"episodes": len(dataset.episodes), "sha256": digest([dataset.info, dataset.stats, sources])}
        self.identity = {**self.identity, "lerobot": known}

    def row(self, source: Source, outcome: Outcome, stem: str) -> Row:
        """See `ShardWork`."""
        # A file contains several episodes; with its digest, they would look like duplicates of each other.
        return super().row(source, outcome, stem) | {"source_sha256": None}

    def write_signals(self, stem: str, packed: Sequence[PackedSample]) -> str:
        """See `ShardWork`."""
        if not packed or not self.dataset.signals:
            return ""
        by_key = {episode.key: episode for episode in self.dataset.episodes}
        kept = [by_key[sample.key] for sample in packed]
        return write_signals(self.storage, stem, read.read_signals_of(self.dataset, kept))


class IndexEpisodes(_Episodes, IndexFiles):
    """Indexes episodes in place."""


class EncodeEpisodes(_Episodes, EncodeShards):
    """Encodes episodes into tars, without changing the frame rate."""

    def task(self, index: int, source: Source) -> SourceTask:
        """See `ShardWork`. Packets of depth cameras are copied, because depth has more levels than profiles encode."""
        return replace(super().task(index, source), copies=source.stream in self.dataset.depth)

    def _samples(self, views: Sequence[View]) -> Iterator[tuple[Source, EncodedSample]]:
        """Yield the episode of these views, one per camera. Its facts are those of the first encoded camera."""
        made = {source.stream: outcome.samples[0] for source, outcome in views}
        depth = self.dataset.depth
        source = next((one for one, _ in views if one.stream not in depth), views[0][0])
        counts, length = [sample.num_frames for sample in made.values()], (source.frames or (0, 0))[1]
        if counts != [length] * len(views):
            raise FormatError(
                f"cameras were encoded to {', '.join(map(str, counts))} frames, the episode has {length}",
                key=source.key,
            )
        meta = {name: value for name, value in made[source.stream].meta.items() if name not in _NOT_OF_EPISODES}
        if depth:
            meta["streams"] = {name: {key: made[name].meta[key] for key in _OWN} for name in made if name in depth}
        yield source, EncodedSample(source.key, meta, {name: sample.streams["rgb"] for name, sample in made.items()})


def _run(
    source: str, out: str | os.PathLike[str], how: How, make: Callable[[Storage, LeRobotDataset], _Episodes]
) -> JobReport:
    """Run the work that `make` returns; raise UsageError if there is a dataset with another number of episodes."""
    dataset, storage = read.read_lerobot(source), open_storage(out)
    known = _known_episodes(read_generation(storage)[1]) if storage.exists(DATASET_JSON) else None
    if known not in (None, len(dataset.episodes)):
        raise UsageError(
            f"the LeRobot dataset has {len(dataset.episodes)} episodes, the dataset here was made of {known}",
            file=storage.url,
            hint="choose a new folder: episodes are not added to a dataset",
        )
    work = make(storage, dataset)
    return run(storage, how, lambda: work)


def _known_episodes(generation: Generation) -> int | None:
    info = generation.extras.get(LEROBOT, {}).get("info", {})
    return info.get("total_episodes") if isinstance(info, Mapping) else None


def new_episodes(url: str) -> tuple[str, int]:
    """Return where the LeRobot dataset is from which a dataset in place was made, and how many episodes it has gained.

    The number is negative if episodes are gone. Returns "" and 0 if the dataset was not made so, or cannot be found.
    """
    generation = read_generation(open_storage(url))[1]
    known, found = _known_episodes(generation), re.fullmatch(r"(.*)/videos(/.*)?", generation.root or "")
    if known is None or found is None or not open_storage(found[1]).exists(LEROBOT_INFO):
        return "", 0
    return found[1], len(read.read_lerobot(f"{read.SCHEME}{found[1]}").episodes) - known


def index_lerobot(
    source: str,
    out: str | os.PathLike[str],
    *,
    proof: str = Proof.SAMPLE,
    episodes_per_shard: int = EPISODES_PER_SHARD,
    limits: Limits | None = None,
    **how: Any,
) -> JobReport:
    """Index a LeRobot dataset in place, as ``fastvid index lerobot:ROOT --out DIR`` does.

    Each episode is a sample, ``episode_000000``; its cameras are its streams, features that are numbers its signals.
    Run again with the same arguments after an interruption, it resumes. Arguments that are not listed are those of
    `fastvid.sharding.in_place.index_videos`.

    Args:
        source: ``lerobot:`` and the folder or URL of the LeRobot dataset, version 3.0 or 2.1.
        out: Folder of the dataset: a path, or a ``s3://`` or ``gs://`` URL.
        episodes_per_shard: Most episodes of a shard.
        how: ``engine``, ``ray_address``, ``workers``, ``part`` and ``reject_unreadable``.

    Raises:
        UsageError: If an argument is wrong, or there is no LeRobot dataset.
        FormatError: If its metadata contradicts itself or its files.
        JobError: If another job, or the same part, is running in `out`, the unfinished job there differs, or no episode
            could be indexed.
        StorageError: If `out` cannot be written, or a disk or store does not deliver files; run again to resume.
        WorkerError: If workers cannot be started, or the Ray cluster is gone; run again to resume.
    """
    chosen = How(**how, command="index")
    chosen.check(episodes_per_shard)
    settings = index_settings(limits, proof)
    return _run(source, out, chosen, partial(IndexEpisodes, settings=settings, most=episodes_per_shard))


def shard_lerobot(
    source: str,
    out: str | os.PathLike[str],
    *,
    profile: str | Profile = "compact",
    episodes_per_shard: int = EPISODES_PER_SHARD,
    scratch: str | os.PathLike[str] | None = None,
    limits: Limits | None = None,
    **how: Any,
) -> JobReport:
    """Encode a LeRobot dataset into shards, as ``fastvid shard lerobot:ROOT --out DIR --profile NAME`` does.

    Samples, streams and signals are those of `index_lerobot`. Episodes are cut by the numbers of their frames, never
    by seconds. Run again with the same arguments after an interruption, it resumes. Arguments that are not listed are
    those of `fastvid.sharding.job.job.run_job`.

    `profile`: how to encode, by name or as a `Profile`; it must keep the rate of the frames.
    """
    chosen_how = How(**how, command="shard")
    chosen_how.check(episodes_per_shard)
    chosen = get_profile(profile)
    if chosen.fps:
        raise UsageError(
            f"the rate of episodes cannot change to {chosen.fps}: each frame has its row of signals",
            hint="omit --fps, and choose frames by frames=Deltas(...) or AtFps(...) when loading",
        )
    if chosen.copies:
        raise UsageError(
            f"profile {chosen.name!r} does not encode", hint="use `fastvid index lerobot:ROOT`, or another profile"
        )
    settings = choose_settings(chosen, max_seconds=UNDIVIDED, limits=limits)  # episodes are never divided
    make = partial(EncodeEpisodes, settings=settings, most=episodes_per_shard, scratch=scratch)
    return _run(source, out, chosen_how, make)
