"""The sharding job: from a folder of raw videos to a dataset; killed at any moment, it goes on when run again.

Every source ends in one ledger row. What the job writes is a function of the sources, the profile and the encoder
build; the number of workers, the order in which they finish and how often the job was killed change nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

from fastvid.errors import JobError, StorageError, UsageError
from fastvid.format.schema import DATASET_JSON, LEDGER, shard_stem
from fastvid.shard.annotations import read_annotations
from fastvid.shard.commit import commit_job
from fastvid.shard.engines import open_engine
from fastvid.shard.ffmpeg import find_ffmpeg
from fastvid.shard.identity import differences, job_identity
from fastvid.shard.ledger import part_name, read_ledger
from fastvid.shard.limits import Limits
from fastvid.shard.plan import SAMPLES_PER_SHARD, plan_shards
from fastvid.shard.profiles import Profile, get_profile
from fastvid.shard.reasons import Reason
from fastvid.shard.run import Run
from fastvid.shard.staging import Staging
from fastvid.shard.streams import PICTURES, choose_streams
from fastvid.shard.tar_sources import gather_sources
from fastvid.shard.wire import Settings
from fastvid.storage import LocalStorage, Storage, open_storage

_LOG = logging.getLogger(__name__)

MAX_SECONDS: Final = 600.0
"""Longer videos are split into parts."""


@dataclass(frozen=True, slots=True)
class JobReport:
    """What a job did.

    Attributes:
        dataset: Where the dataset is.
        ledger: One row for every source, with the columns of LEDGER_SCHEMA.
        ignored: Number of files that were no sources, by kind.
    """

    dataset: str
    ledger: pa.Table
    ignored: Mapping[str, int]

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
    other_build: bool = False,
    limits: Limits | None = None,
) -> JobReport:
    """Encodes raw videos into an indexed WebDataset; what ``fastvid shard`` does.

    Run again after an interruption, with the same arguments, it goes on where it was; ``engine``, ``workers`` and
    ``limits`` may differ.

    Args:
        sources: Folders of videos, single files, or tars of samples with a video each, as webdataset writes them.
        out: Folder of the dataset.
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
        other_build: Go on although the job began with another build of ffmpeg; each shard records its own.
        limits: What one source may cost.

    Returns:
        The report, also when sources were rejected.

    Raises:
        UsageError: An argument is wrong, or there is nothing to do.
        MissingDependency: There is no ffmpeg, or no Ray for engine "ray".
        JobError: Another job works in `out`, an unfinished one there differs, or not a single source could be packed.
        StorageError: `out` cannot be written, or is full; the job can go on later.
        WorkerError: Workers cannot be started, or the Ray cluster is gone; the job can go on later.
    """
    if samples_per_shard < 1 or max_seconds <= 0 or (workers is not None and workers < 1):
        raise UsageError(
            f"{workers} workers, {samples_per_shard} samples a shard, {max_seconds} seconds: all must be positive"
        )
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
    specs = [annotations] if isinstance(annotations, str) else list(annotations or ())
    rows = read_annotations(specs, class_names) if specs else None
    roots = [sources] if isinstance(sources, str | os.PathLike) else list(sources)
    paths = [os.fspath(root) for root in roots]
    found = gather_sources(paths, rows, class_names=class_names, follow_links=follow_links)
    identity = job_identity(found, settings, seed=seed, samples_per_shard=samples_per_shard)
    storage = open_storage(out)
    with _alone(storage):
        staging = Staging(storage)
        if storage.exists(DATASET_JSON):
            ledger = _finished(storage, identity)
        else:
            tried = [source for source in found.sources if source.problem is None]
            shards = plan_shards(tried, seed=seed, samples=samples_per_shard)
            _begin(storage, staging, identity, len(shards), other_build=other_build)
            with contextlib.closing(place):
                parts = Run(storage, shards, identity["encoder"], extras.video).finish(place)
            ledger = commit_job(storage, identity, found, parts)
        staging.end()
    return JobReport(storage.url, ledger, found.ignored)


def _begin(storage: Storage, staging: Staging, identity: Mapping[str, Any], shards: int, *, other_build: bool) -> None:
    """Records the job, or checks that it is the one that is unfinished here."""
    before = staging.job()
    changes = [] if before is None else list(differences(before, identity))
    builds_only = all(name.startswith("encoder.") for name, _, _ in changes)
    if changes and not (builds_only and other_build):
        name, old, new = changes[0]
        raise JobError(
            f"the unfinished job here has {name} {old!r}, this one {new!r}",
            file=storage.url,
            hint="go on with the same sources, arguments and ffmpeg, or choose another folder"
            + ("; --other-build goes on with this ffmpeg" if builds_only else ""),
        )
    if changes:
        _LOG.warning("going on with another build of ffmpeg; samples of unfinished shards are encoded anew")
        for stem in map(shard_stem, range(shards)):
            if not storage.exists(part_name(stem)):
                staging.drop(stem)
    elif before is not None:
        _LOG.info("going on with the unfinished job in %s", storage.url)
    if before is None or changes:
        staging.begin(identity)


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


@contextlib.contextmanager
def _alone(storage: Storage) -> Iterator[None]:
    """Keeps a second job out of the folder while this one runs; a killed process lets go."""
    if not isinstance(storage, LocalStorage):
        yield
        return
    try:
        storage.root.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(storage.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise StorageError(f"folder cannot be made: {error.strerror}", file=storage.url) from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise JobError("another job is at work here", file=storage.url) from error
        yield
    finally:
        os.close(descriptor)
