"""The sharding job: makes a dataset from a folder of raw videos; if killed at any moment, it resumes when run again.

Every source gets one ledger row. The output is a function of the sources, the profile and the encoder build; the number
of workers, the order in which they finish and interruptions do not change it.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

from fastvid.errors import UsageError
from fastvid.format.schema import DATASET_JSON, LEDGER
from fastvid.media.ffmpeg import find_ffmpeg
from fastvid.media.limits import Limits
from fastvid.media.reasons import Reason
from fastvid.sharding.encode.profile import Profile
from fastvid.sharding.encode.profiles import get_profile
from fastvid.sharding.encode.streams import PICTURES, choose_streams
from fastvid.sharding.engines.engine import open_engine
from fastvid.sharding.job.commit import commit_job
from fastvid.sharding.job.identity import differences
from fastvid.sharding.job.ledger import read_ledger, rows_table
from fastvid.sharding.job.lock import lock_folder
from fastvid.sharding.job.plan import SAMPLES_PER_SHARD, JobPart
from fastvid.sharding.job.run import Job
from fastvid.sharding.sources.tar_sources import gather_sources
from fastvid.sharding.work.messages import Settings
from fastvid.storage import Storage, open_storage

_LOG = logging.getLogger(__name__)

MAX_SECONDS: Final = 600.0
"""Longer videos are split into parts."""


@dataclass(frozen=True, slots=True)
class JobReport:
    """The result of a job.

    Attributes:
        dataset: The dataset's folder.
        ledger: One row per source, with the columns of LEDGER_SCHEMA; for a part of a job, those of its shards.
        ignored: Number of files that are not sources, by kind.
        part: The part that was made, after which there is no dataset yet; None for the whole job.
    """

    dataset: str
    ledger: pa.Table
    ignored: Mapping[str, int]
    part: JobPart | None = None

    @property
    def packed(self) -> int:
        """Number of sources that became samples."""
        return sum(status == "packed" for status in self.ledger["status"].to_pylist())

    @property
    def rejected(self) -> Mapping[Reason, int]:
        """Number of rejected sources, by reason."""
        return Counter(Reason(reason) for reason in self.ledger["reason"].to_pylist() if reason is not None)


def run_job(
    sources: Sequence[str | os.PathLike[str]] | str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    annotations: Sequence[str] | str | None = None,
    class_names: Sequence[str] = (),
    profile: str | Profile = "compact",
    streams: Sequence[str] | str = ("rgb",),
    audio: str = "drop",
    flow: str = "dis",
    flow_bound: float | None = None,
    engine: str = "local",
    ray_address: str | None = None,
    workers: int | None = None,
    samples_per_shard: int = SAMPLES_PER_SHARD,
    max_seconds: float = MAX_SECONDS,
    seed: int = 0,
    follow_links: bool = False,
    allow_encoder_change: bool = False,
    part: JobPart | str | None = None,
    scratch: str | os.PathLike[str] | None = None,
    reject_unreadable: bool = False,
    limits: Limits | None = None,
) -> JobReport:
    """Encode raw videos into an indexed WebDataset, as ``fastvid shard`` does.

    Run again with the same arguments after an interruption, it resumes; ``engine``, ``workers``, ``part`` and
    ``limits`` may differ.

    Args:
        sources: Folders of videos, single files, or webdataset tars with one video per sample; paths, or URLs:
            ``s3://`` and ``gs://`` folders and files, ``http(s)://`` files. Not needed if the annotations name URLs.
        out: Folder of the dataset: a path, or a ``s3://`` or ``gs://`` URL.
        annotations: ``format:path``, one or several; by default the class of a video is its folder.
        class_names: Names for integer labels.
        profile: How to encode, by name or as a `Profile`.
        streams: Video streams of every sample: "rgb", or "rgb,flow" to add optical flow.
        audio: "drop", "copy" (keep AAC and ALAC packets unchanged, encode other codecs) or "aac" (encode all).
        flow: Method of optical flow: "dis" or "tvl1".
        flow_bound: Largest stored motion, in pixels per frame; 20 by default.
        engine: Where to encode: "local", or "ray" for all nodes of a Ray cluster.
        ray_address: Address of the cluster's head; by default RAY_ADDRESS, or else a new cluster on this machine.
        workers: Sources encoded in parallel; by default one per core.
        samples_per_shard: Maximum number of sources in a shard.
        max_seconds: Longer videos are split into segments of equal length, none longer than this.
        seed: Seed of the order of samples in the shards.
        follow_links: Whether to follow symbolic links that point outside their folder.
        allow_encoder_change: Whether to resume a job that began with another build of ffmpeg; each shard records its
            build.
        part: Make only every N-th shard, from the I-th, as ``I/N``, without committing. Parts may run in parallel, on
            any machines that can access `out`; after they have finished, the same call without `part` makes the
            remaining shards and commits the dataset.
        scratch: Local folder for samples that wait to be packed; by default `out` itself, or for an object store the
            folder for temporary files. A resumed job finds its samples there.
        reject_unreadable: Reject sources that their disk does not deliver, even in a retry at the end. By default the
            job stops at its end and tries them again when it is resumed.
        limits: Limits per source.

    Returns:
        The report, also if sources were rejected.

    Raises:
        UsageError: If an argument is wrong, or there is nothing to do.
        MissingDependency: If there is no ffmpeg, or no Ray for engine "ray".
        JobError: If another job, or the same part, is running in `out`, the unfinished job there differs, or no source
            could be packed.
        StorageError: If `out` cannot be written or is full, or a disk or store does not deliver sources; run again to
            resume.
        WorkerError: If workers cannot be started, or the Ray cluster is gone; run again to resume.
    """
    check_amounts(workers=workers, samples_per_shard=samples_per_shard, max_seconds=max_seconds)
    mine = JobPart.parse(part) if isinstance(part, str) else part
    chosen = get_profile(profile) if isinstance(profile, str) else profile
    build = find_ffmpeg()
    if not chosen.runs_on(build):
        raise UsageError(f"{build.path} has no encoder {chosen.encoder!r}", hint="name another in FASTVID_FFMPEG")
    extras = choose_streams(streams, audio=audio, method=flow, bound=flow_bound)
    if chosen.copies and extras != PICTURES:
        raise UsageError(
            "profile 'copy' copies pictures unchanged, without audio or flow", hint="use --profile compact"
        )
    settings = Settings(chosen, build, limits or Limits(), max_seconds, extras)
    place = open_engine(engine, settings, workers=workers, address=ray_address)
    found = gather_sources(sources, annotations, class_names=class_names, follow_links=follow_links)
    storage = open_storage(out)
    with lock_folder(storage, mine) as check:
        job = Job(
            storage,
            found,
            settings,
            seed=seed,
            samples_per_shard=samples_per_shard,
            part=mine,
            scratch=scratch,
            reject_unreadable=reject_unreadable,
        )
        if storage.exists(DATASET_JSON):
            ledger = _finished(storage, job.identity)
        else:
            parts = job.run(place, check, allow_encoder_change=allow_encoder_change)
            if mine is not None:
                rows = rows_table(row for part in parts for row in part.rows)
                return JobReport(storage.url, rows, found.ignored, mine)
            ledger = commit_job(
                storage, job.identity, found, parts, profile=job.identity["profile"], extras=extras.to_json()
            )
        job.end()
    return JobReport(storage.url, ledger, found.ignored)


def check_amounts(*, workers: int | None, samples_per_shard: int, max_seconds: float) -> None:
    """Raise a UsageError unless all are positive."""
    if samples_per_shard < 1 or max_seconds <= 0 or (workers is not None and workers < 1):
        raise UsageError(
            f"{workers} workers, {samples_per_shard} samples per shard, {max_seconds} seconds: all must be positive"
        )


def _finished(storage: Storage, identity: Mapping[str, Any]) -> pa.Table:
    """Return the ledger of the existing dataset, if the same job made it."""
    name = "its ledger"
    if storage.exists(LEDGER):
        ledger, before = read_ledger(storage)
        changes = list(differences(before, identity))
        if not changes:
            _LOG.info("the dataset in %s is complete", storage.url)
            return ledger
        name = changes[0][0]
    raise UsageError(
        f"the folder contains a dataset made by a job that differs in {name}",
        file=storage.url,
        hint="choose another folder",
    )
