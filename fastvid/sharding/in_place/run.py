"""Makes a dataset of videos in place: nothing of them is copied or encoded."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from fastvid.errors import UsageError
from fastvid.format.schema import DATASET_JSON, IN_PLACE
from fastvid.media.ffmpeg import find_ffmpeg
from fastvid.media.in_place.index_video import Proof
from fastvid.media.limits import Limits
from fastvid.runtime.cores import available_cores
from fastvid.sharding.encode.profiles import get_profile
from fastvid.sharding.engines.engine import open_engine
from fastvid.sharding.in_place.index_files import IndexFiles
from fastvid.sharding.job.blocked import read_blocked
from fastvid.sharding.job.commit import commit_job
from fastvid.sharding.job.job import MAX_SECONDS, JobReport, check_amounts, finished_ledger
from fastvid.sharding.job.ledger import rows_table
from fastvid.sharding.job.lock import lock_folder
from fastvid.sharding.job.plan import SAMPLES_PER_SHARD, JobPart
from fastvid.sharding.job.run import Job
from fastvid.sharding.sources.sources import Source
from fastvid.sharding.sources.tar_sources import gather_sources
from fastvid.sharding.work.messages import Settings
from fastvid.storage import open_storage
from fastvid.storage.urls import is_remote


def index_videos(
    sources: Sequence[str | os.PathLike[str]] | str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    annotations: Sequence[str] | str | None = None,
    columns: str | Mapping[str, str] | None = None,
    class_names: Sequence[str] = (),
    proof: str = Proof.SAMPLE,
    engine: str = "local",
    ray_address: str | None = None,
    workers: int | None = None,
    samples_per_shard: int = SAMPLES_PER_SHARD,
    seed: int = 0,
    follow_links: bool = False,
    part: JobPart | str | None = None,
    reject_unreadable: bool = False,
    limits: Limits | None = None,
) -> JobReport:
    """Make a dataset of videos where they are, as ``fastvid index SOURCE --out DIR`` does.

    Only lists, indexes and annotations are written. Run again with the same arguments after an interruption, it
    resumes; ``engine``, ``workers``, ``part`` and ``limits`` may differ. Arguments that are not listed are those of
    `fastvid.sharding.job.job.run_job`.
    """
    check_amounts(workers=workers, samples_per_shard=samples_per_shard, max_seconds=MAX_SECONDS)
    if proof not in list(Proof):
        raise UsageError(f"invalid proof {proof!r}", hint=f"use {', '.join(Proof)}")
    mine = JobPart.parse(part) if isinstance(part, str) else part
    found = gather_sources(sources, annotations, columns=columns, class_names=class_names, follow_links=follow_links)
    inside = next((source for source in found.sources if source.member is not None), None)
    if inside is not None:
        raise UsageError("videos inside tars are not indexed in place", file=inside.path, hint="name the tars alone")
    storage = open_storage(out)
    with lock_folder(storage, mine) as check:
        blocked = read_blocked(storage)
        # The profile is irrelevant, because nothing is encoded.
        settings = Settings(
            get_profile("compact"), find_ffmpeg(), limits or Limits(), MAX_SECONDS, blocked=blocked, proof=Proof(proof)
        )
        work = IndexFiles(storage, found, settings, seed=seed, samples_per_shard=samples_per_shard)
        job = Job(storage, work, part=mine, reject_unreadable=reject_unreadable, command="index")
        if storage.exists(DATASET_JSON):
            ledger = finished_ledger(storage, job.identity)
        else:
            if workers is None and engine == "local":
                workers = waiting_workers(found.sources)
            parts = job.run(open_engine(engine, settings, workers=workers, address=ray_address), check)
            if mine is not None:
                rows = rows_table(row for part in parts for row in part.rows)
                return JobReport(storage.url, rows, found.ignored, mine)
            ledger = commit_job(
                storage,
                job.identity,
                found,
                parts,
                profile={"name": IN_PLACE, "proof": proof},
                extras={IN_PLACE: {"root": work.root}},
                note="fastvid index",
            )
        job.end()
    return JobReport(storage.url, ledger, found.ignored)


def waiting_workers(sources: Sequence[Source]) -> int | None:
    """Return how many workers index files: more than cores if they are remote; None for the usual number."""
    if not any(is_remote(source.path) for source in sources):
        return None
    # Of a remote file a worker waits for five answers or more, one after another; each worker takes about 100 MB.
    cores = available_cores()
    return cores + min(3 * cores, 32)
