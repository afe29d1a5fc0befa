"""The sharding job: from a folder of raw videos to a dataset; killed at any moment, it goes on when run again.

Every source ends in one ledger row. What the job writes is a function of the sources, the profile and the encoder
build; the number of workers, the order in which they finish and how often the job was killed change nothing.
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
from fastvid.sharding.job.lock import alone
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
    """What a job did.

    Attributes:
        dataset: Where the dataset is.
        ledger: One row for every source, with the columns of LEDGER_SCHEMA; for a part of a job, those of its shards.
        ignored: Number of files that were no sources, by kind.
        part: The part that was done, after which there is no dataset yet; None for the whole job.
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
        """Number of sources that did not, by reason."""
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
    limits: Limits | None = None,
) -> JobReport:
    """Encodes raw videos into an indexed WebDataset; what ``fastvid shard`` does.

    Run again after an interruption, with the same arguments, it goes on where it was; ``engine``, ``workers``,
    ``part`` and ``limits`` may differ.

    Args:
        sources: Folders of videos, single files, or tars of samples with a video each, as webdataset writes them;
            paths, or URLs: ``s3://`` and ``gs://`` folders and files, ``http(s)://`` files. None is needed when the
            annotations name URLs.
        out: Folder of the dataset: a path, or a ``s3://`` or ``gs://`` URL.
        annotations: ``format:path``, one or several; by default the class of a video is its folder.
        class_names: Names for integer labels.
        profile: How to encode, by name or as a `Profile`.
        streams: Video streams of every sample: "rgb", or "rgb,flow" for optical flow beside the picture.
        audio: "drop", "copy" (the packets of AAC and ALAC as they are, other codecs encoded) or "aac" (all encoded).
        flow: How optical flow is estimated: "dis" or "tvl1".
        flow_bound: Largest motion that is kept, in pixels a frame; 20 by default.
        engine: Where to encode: "local", or "ray" for all nodes of a Ray cluster.
        ray_address: Of the cluster's head; by default RAY_ADDRESS, or else a cluster on this machine for this job.
        workers: Sources encoded at the same time; by default one for each core.
        samples_per_shard: Most sources in a shard.
        max_seconds: Longer videos are split into parts of equal length, none longer than this.
        seed: Of the order of samples in the shards.
        follow_links: Take symbolic links that lead out of their folder.
        allow_encoder_change: Go on although the job began with another build of ffmpeg; each shard records its own.
        part: Do only every N-th shard, from the I-th, as ``I/N``, and commit nothing. Parts may run at once, on any
            machines that see `out`; when they have ended, the same call without `part` does what they left undone and
            makes the dataset.
        scratch: Local folder for what waits to be packed; by default `out` itself, and for an object store the folder
            for temporary files. A job that goes on finds it there.
        limits: What one source may cost.

    Returns:
        The report, also when sources were rejected.

    Raises:
        UsageError: An argument is wrong, or there is nothing to do.
        MissingDependency: There is no ffmpeg, or no Ray for engine "ray".
        JobError: Another job, or this part of one, works in `out`, an unfinished one there differs, or not a single
            source could be packed.
        StorageError: `out` cannot be written, or is full; the job can go on later.
        WorkerError: Workers cannot be started, or the Ray cluster is gone; the job can go on later.
    """
    check_amounts(workers=workers, samples_per_shard=samples_per_shard, max_seconds=max_seconds)
    mine = JobPart.parse(part) if isinstance(part, str) else part
    chosen = get_profile(profile) if isinstance(profile, str) else profile
    build = find_ffmpeg()
    if not chosen.runs_on(build):
        raise UsageError(f"{build.path} has no encoder {chosen.encoder!r}", hint="name another one in FASTVID_FFMPEG")
    extras = choose_streams(streams, audio=audio, method=flow, bound=flow_bound)
    if chosen.copies and extras != PICTURES:
        raise UsageError(
            "profile 'copy' takes pictures over as they are, without sound or flow", hint="--profile compact"
        )
    settings = Settings(chosen, build, limits or Limits(), max_seconds, extras)
    place = open_engine(engine, settings, workers=workers, address=ray_address)
    found = gather_sources(sources, annotations, class_names=class_names, follow_links=follow_links)
    storage = open_storage(out)
    with alone(storage, mine) as check:
        job = Job(storage, found, settings, seed=seed, samples_per_shard=samples_per_shard, part=mine, scratch=scratch)
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
    """Raise a UsageError unless all of them are positive."""
    if samples_per_shard < 1 or max_seconds <= 0 or (workers is not None and workers < 1):
        raise UsageError(
            f"{workers} workers, {samples_per_shard} samples a shard, {max_seconds} seconds: all must be positive"
        )


def _finished(storage: Storage, identity: Mapping[str, Any]) -> pa.Table:
    """The ledger of the dataset that is here, if the very same job has made it."""
    name = "its ledger"
    if storage.exists(LEDGER):
        ledger, before = read_ledger(storage)
        changes = list(differences(before, identity))
        if not changes:
            _LOG.info("the dataset in %s is complete", storage.url)
            return ledger
        name = changes[0][0]
    raise UsageError(
        f"there is a dataset already, made by a job that differs in {name}",
        file=storage.url,
        hint="choose another folder",
    )
