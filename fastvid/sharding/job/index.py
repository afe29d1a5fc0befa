"""Makes datasets of tars that other tools wrote, without changing them; and rebuilds sidecars of any dataset.

Each video is indexed and verified in a worker process (`fastvid.media.prove`); one that cannot be indexed gets a row in
the ledger. The dataset becomes visible with the last write, as in every job.
"""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Collection, Sequence
from dataclasses import replace

import pyarrow as pa

from fastvid.errors import FormatError, StorageError, UsageError
from fastvid.format.commit_record import read_head
from fastvid.format.dataset import change
from fastvid.format.facts import with_facts
from fastvid.format.generations import Generation, ShardRecord, history, read_generation, upgrade_records
from fastvid.format.parquet import from_parquet
from fastvid.format.schema import DATASET_JSON, FACT_FIELDS, FOREIGN, FORMAT_VERSION, annotations_file, shard_stem
from fastvid.format.write_shard import index_shard
from fastvid.media.ffmpeg import find_ffmpeg
from fastvid.media.limits import Limits
from fastvid.runtime.hashing import sha256
from fastvid.runtime.liveness import namespace
from fastvid.sharding.encode.profiles import get_profile
from fastvid.sharding.engines.engine import Engine, open_engine
from fastvid.sharding.job.blocked import read_blocked
from fastvid.sharding.job.commit import commit_job, shard_records
from fastvid.sharding.job.index_shards import IndexedTar, IndexShards, open_tar
from fastvid.sharding.job.job import MAX_SECONDS, JobReport
from fastvid.sharding.job.ledger import read_ledger, rows_table
from fastvid.sharding.job.lock import lock_folder
from fastvid.sharding.job.plan import JobPart
from fastvid.sharding.job.run import Job
from fastvid.sharding.sources.sources import SourceList
from fastvid.sharding.sources.tars import find_tars, name_classes
from fastvid.sharding.work.messages import Settings
from fastvid.storage import LocalStorage, Storage, open_storage


def index_tars(
    sources: Sequence[str],
    out: str | None = None,
    *,
    class_names: Sequence[str] = (),
    engine: str = "local",
    ray_address: str | None = None,
    workers: int | None = None,
    part: JobPart | str | None = None,
    limits: Limits | None = None,
) -> JobReport:
    """Make a dataset of tars that other tools wrote, as ``fastvid index`` does.

    Run again with the same arguments after an interruption, it resumes: finished tars are not indexed again.
    ``engine``, ``workers``, ``part`` and ``limits`` may differ.

    Args:
        sources: Tars, or folders of tars.
        out: Folder of the dataset: the tars are linked into it as ``data-000000.tar`` and so on. By default the dataset
            is made in the folder of the tars, which keep their names.
        class_names: Names for integer labels.
        engine: Where to index: "local", or "ray" for all nodes of a Ray cluster, which need the tars at the same paths.
        ray_address: Address of the cluster's head; by default RAY_ADDRESS, or else a new cluster on this machine.
        workers: Videos indexed in parallel; by default one per core.
        part: Index only every N-th tar, from the I-th, as ``I/N``, without committing. Parts may run in parallel, on
            any machines that share the folder; after they have finished, the same call without `part` indexes the
            remaining tars and commits the dataset. Every part reads the headers of all tars, because keys are unique
            among all.
        limits: Limits per video.

    Raises:
        UsageError: If there is no tar, a dataset exists already, or another tool's file would be overwritten.
        MissingDependency: If there is no Ray for engine "ray".
        JobError: If another job, or the same part, is running here, the unfinished job differs, or no video could be
            indexed.
        StorageError: If the folder cannot be written, or a disk does not deliver a tar; run again to resume.
        WorkerError: If workers cannot be started, or the Ray cluster is gone; run again to resume.
    """
    mine = JobPart.parse(part) if isinstance(part, str) else part
    paths = find_tars(sources)
    storage = open_storage(out if out is not None else _common_folder(paths))
    if not isinstance(storage, LocalStorage):
        raise UsageError("tars are indexed on a local disk", file=storage.url)
    with lock_folder(storage, mine) as check:
        blocked = read_blocked(storage)
        place = _open_engine(engine, workers, limits, address=ray_address, blocked=blocked)
        tars = _tars(storage, paths, linked=out is not None)
        classes, named = name_classes({tar.stem: tar.samples for tar in tars}, class_names)
        tars = [replace(tar, samples=named[tar.stem]) for tar in tars]
        work = IndexShards(storage, tars, classes=classes, blocked=blocked)
        job = Job(storage, work, part=mine, command="index")
        if storage.exists(DATASET_JSON):
            # Killed after its commit, the job only has to delete its files.
            if job.staging.job() != job.identity:
                raise UsageError(
                    "a dataset exists already", file=storage.url, hint="run `fastvid index` on it alone to rebuild it"
                )
            ledger = read_ledger(storage)[0]
        else:
            parts = job.run(place, check)
            if mine is not None:
                return JobReport(storage.url, rows_table(row for part in parts for row in part.rows), {}, mine)
            profile = {"name": FOREIGN}
            shards = [[record.name, record.bytes, record.sha256] for record in shard_records(parts, profile)]
            identity = {"tars": shards, "profile": FOREIGN}
            found = SourceList(work.sources, classes, {})
            ledger = commit_job(storage, identity, found, parts, profile=profile, note="fastvid index")
        job.end()
    return JobReport(storage.url, ledger, {})


def rebuild(
    url: str,
    *,
    shards: Collection[str] | None = None,
    workers: int | None = None,
    limits: Limits | None = None,
) -> tuple[str, ...]:
    """Recompute the sidecars of shards of a dataset from their tars, and upgrade a dataset of fastvid 0.1.

    Shards of videos in place are left to `fastvid.sharding.in_place.reindex`.

    Args:
        url: The dataset's folder.
        shards: The shards; by default all of the current generation. An upgrade ignores it and includes those of older
            generations.
        workers: Worker processes for tars of other tools; by default one per core.
        limits: Limits per video of those tars.

    Returns:
        The names of the shards.

    Raises:
        StorageError: If there is no dataset, or it cannot be written.
        FormatError: If a tar is not the one that was committed, or no longer contains the samples that the dataset
            lists.
    """
    storage = open_storage(url)
    head = read_head(storage, oldest=1)
    is_old = head.major < FORMAT_VERSION[0]
    generations = list(history(storage, head)) if is_old else [read_generation(storage)[1]]
    records = {
        record.name: record for generation in generations for record in generation.shards if not record.is_in_place
    }
    foreign = [record.name for record in records.values() if record.profile.get("name") == FOREIGN]
    chosen = [name for name in records if is_old or shards is None or name in shards]
    for stem in chosen:
        _check_tar(storage, records[stem])
        if stem not in foreign:
            index_shard(storage, stem, streams=generations[0].streams, tar_sha256=records[stem].sha256)
    if set(foreign) & set(chosen):
        if not isinstance(storage, LocalStorage):
            raise UsageError("tars are indexed on a local disk", file=storage.url)
        wanted: dict[str, list[str]] = {}
        for generation in generations:
            name = annotations_file(generation.number)
            keys, start = from_parquet(storage.read(name), file=name, columns=["key"])["key"].to_pylist(), 0
            for record in generation.shards:
                wanted[record.name] = keys[start : start + record.samples]
                start += record.samples
        tars = [open_tar(storage, stem, str(storage.path(f"{stem}.tar"))) for stem in foreign]
        for tar in tars:
            if tar.problem and tar.stem in chosen:
                raise FormatError(tar.problem, shard=tar.stem)
        # Keys must be unique among the samples of all tars, also of those that are not indexed now.
        work = IndexShards(storage, tars, chosen={stem: wanted[stem] for stem in foreign if stem in chosen})
        # A rebuild begins anew after an interruption: its records are not kept with the dataset.
        # It keeps blocked samples too, because the rows of the annotations belong to them; hidden ones stay hidden.
        with tempfile.TemporaryDirectory(prefix="fastvid-") as folder:
            Job(LocalStorage(folder), work, command="index").run(_open_engine("local", workers, limits), lambda: None)
    if is_old:
        upgrade_records(storage, head)
    _add_facts(storage)
    return tuple(chosen)


def _add_facts(storage: Storage) -> None:
    """Add frame rate, size and duration to the annotations of a dataset that 0.1 made, in a new generation."""

    def edit(generation: Generation, table: pa.Table) -> tuple[Generation, pa.Table] | None:
        if set(FACT_FIELDS) <= set(table.column_names):
            return None
        names = [shard.name for shard in generation.shards]
        new = replace(generation, note=f"add {', '.join(FACT_FIELDS)} to the annotations")
        return new, with_facts(storage, names, generation.streams[0], table)

    change(storage, edit)


def _check_tar(storage: Storage, record: ShardRecord) -> None:
    """Raise FormatError if a tar is not the one that was committed: new sidecars would make the damage look right."""
    view = storage.map(f"{record.name}.tar")
    if len(view) != record.bytes or sha256(view) != record.sha256:
        raise FormatError(
            f"tar of {len(view)} bytes is not the one of {record.bytes} bytes that the generation lists",
            shard=record.name,
            hint="restore the tar from a copy of the dataset",
        )


def _open_engine(
    name: str, workers: int | None, limits: Limits | None, *, address: str | None = None, blocked: tuple[str, ...] = ()
) -> Engine:
    # The profile is irrelevant, because nothing is encoded.
    settings = Settings(get_profile("compact"), find_ffmpeg(), limits or Limits(), MAX_SECONDS, blocked=blocked)
    return open_engine(name, settings, workers=workers, address=address)


def _tars(storage: LocalStorage, paths: Sequence[str], *, linked: bool) -> list[IndexedTar]:
    """Return the tars, linked into the folder under the names of shards, or as they are there."""
    tars = []
    for number, path in enumerate(paths):
        stem = shard_stem(number) if linked else os.path.basename(path).removesuffix(".tar")
        if linked:
            _link(path, storage, stem)
        else:
            _check_sidecar(storage, stem)
        tars.append(open_tar(storage, stem, path))
    return tars


def _common_folder(paths: Sequence[str]) -> str:
    folders = sorted({os.path.dirname(path) for path in paths})
    if len(folders) > 1:
        raise UsageError(f"the tars are in {len(folders)} folders", file=folders[0], hint="name a folder with --out")
    return folders[0]


def _check_sidecar(storage: Storage, stem: str) -> None:
    """Refuse to overwrite another tool's table: video2dataset writes ``00000.parquet`` next to ``00000.tar``."""
    name = f"{stem}.parquet"
    if not storage.exists(name):
        return
    try:
        from_parquet(storage.read(name), file=name, columns=["member_offset"])
    except FormatError as error:
        raise UsageError(
            "another tool's file has the name of a sidecar",
            file=name,
            hint="name another folder with --out; the tars are linked into it, not copied",
        ) from error


def _link(path: str, storage: LocalStorage, stem: str) -> None:
    target, source = storage.path(f"{stem}.tar"), os.path.realpath(path)
    # Other parts of the job may be reading the tar under this name, or linking it at this moment.
    new = target.with_name(f"{target.name}.{namespace()}-{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.exists() and os.path.samefile(source, target):
            return
        try:
            os.link(source, new)
        except OSError:  # another file system
            new.symlink_to(source)
        new.replace(target)
    except OSError as error:
        raise StorageError(f"tar cannot be linked: {error.strerror}", file=str(target)) from error
