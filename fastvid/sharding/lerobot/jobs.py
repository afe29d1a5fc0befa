"""Make a dataset of a LeRobot dataset: where it is, or encoded again."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from fastvid.errors import UsageError
from fastvid.format.schema import DATASET_JSON, IN_PLACE
from fastvid.media.ffmpeg import find_ffmpeg
from fastvid.media.in_place.index_video import Proof
from fastvid.media.limits import Limits
from fastvid.sharding.encode.profile import Profile
from fastvid.sharding.encode.profiles import get_profile
from fastvid.sharding.engines.engine import open_engine
from fastvid.sharding.in_place.run import waiting_workers
from fastvid.sharding.job.blocked import read_blocked
from fastvid.sharding.job.commit import commit_job
from fastvid.sharding.job.job import MAX_SECONDS, JobReport, check_amounts, choose_settings, finished_ledger
from fastvid.sharding.job.ledger import rows_table
from fastvid.sharding.job.lock import lock_folder
from fastvid.sharding.job.plan import JobPart
from fastvid.sharding.job.run import Job
from fastvid.sharding.lerobot.episodes import EPISODES_PER_SHARD, episode_sources, extras_of
from fastvid.sharding.lerobot.metadata import LeRobotDataset, read_lerobot
from fastvid.sharding.lerobot.shard_episodes import EncodeEpisodes, IndexEpisodes
from fastvid.sharding.sources.sources import SourceList
from fastvid.sharding.work.messages import Settings
from fastvid.storage import Storage, open_storage

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
    `fastvid.sharding.in_place.run.index_videos`.

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
