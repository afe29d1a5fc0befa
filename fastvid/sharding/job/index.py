"""Makes datasets of tars that other tools wrote, without changing them; and rebuilds sidecars of any dataset.

Each video is indexed and verified in a worker process (`fastvid.media.prove`); one that cannot be indexed gets a row in
the ledger. The dataset becomes visible with the last write, as in every job.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Final

import pyarrow as pa

from fastvid.errors import FormatError, StorageError, UsageError
from fastvid.format.dataset import change
from fastvid.format.facts import with_facts
from fastvid.format.generations import (
    Generation,
    ShardRecord,
    history,
    read_generation,
    read_head,
    upgrade_records,
)
from fastvid.format.indexed import IndexedSample, IndexedStream
from fastvid.format.parquet import from_parquet
from fastvid.format.schema import DATASET_JSON, FACT_FIELDS, FOREIGN, FORMAT_VERSION, annotations_file, shard_stem
from fastvid.format.shard import index_shard
from fastvid.format.tar import TarDigest, TarMember
from fastvid.media.ffmpeg import find_ffmpeg
from fastvid.media.limits import Limits
from fastvid.media.reasons import Reason
from fastvid.runtime.hashing import sha256
from fastvid.runtime.progress import Progress
from fastvid.sharding.encode.profiles import get_profile
from fastvid.sharding.engines.engine import Engine
from fastvid.sharding.engines.local_engine import LocalEngine
from fastvid.sharding.job.commit import commit_job, shard_records
from fastvid.sharding.job.job import MAX_SECONDS, JobReport
from fastvid.sharding.job.ledger import PackedSample, Part, Row, ledger_row, problem_row
from fastvid.sharding.job.outages import OutageDetector
from fastvid.sharding.job.run import retry_alone
from fastvid.sharding.sources.sources import Source, SourceList, encode_name
from fastvid.sharding.sources.tars import TarSample, find_tars, missing_video, read_tar, sample_keys
from fastvid.sharding.work.index_source import unpack_found
from fastvid.sharding.work.messages import Outcome, Settings, Task
from fastvid.storage import LocalStorage, Storage, open_storage

_ID_DIGITS: Final = 32
# A video that was too slow when run in parallel gets this much more time when it is retried alone.
_PATIENCE: Final = 4.0


@dataclass(frozen=True, slots=True)
class _Tar:
    """A tar to index: stem of its sidecars, path and samples, or why it cannot be read."""

    stem: str
    path: str
    samples: Sequence[TarSample] = ()
    problem: str = ""


def index_tars(
    sources: Sequence[str],
    out: str | None = None,
    *,
    class_names: Sequence[str] = (),
    workers: int | None = None,
    limits: Limits | None = None,
) -> JobReport:
    """Make a dataset of tars that other tools wrote, as ``fastvid index`` does.

    Args:
        sources: Tars, or folders of tars.
        out: Folder of the dataset: the tars are linked into it as ``data-000000.tar`` and so on. By default the dataset
            is made in the folder of the tars, which keep their names.
        class_names: Names for integer labels.
        workers: Worker processes; by default one per core.
        limits: Limits per video.

    Raises:
        UsageError: If there is no tar, a dataset exists already, or another tool's file would be overwritten.
        JobError: If no video could be indexed.
        StorageError: If the folder cannot be written.
        WorkerError: If workers cannot be started.
    """
    paths = find_tars(sources)
    storage = open_storage(out if out is not None else _common_folder(paths))
    if not isinstance(storage, LocalStorage):
        raise UsageError("tars are indexed on a local disk", file=storage.url)
    if storage.exists(DATASET_JSON):
        raise UsageError(
            "a dataset exists already", file=storage.url, hint="run `fastvid index` on it alone to rebuild it"
        )
    tars = []
    for number, path in enumerate(paths):
        stem = os.path.basename(path).removesuffix(".tar") if out is None else shard_stem(number)
        if out is None:
            _check_sidecar(storage, stem)
        else:
            _link(path, storage, stem)
        tars.append(_open_tar(storage, stem, path))
    work = _Work(storage, tars)
    with contextlib.closing(_engine(workers, limits)) as engine:
        parts = [work.index(tar, engine) for tar in tars]
        work.progress.finish()
    profile = {"name": FOREIGN}
    shards = [[record.name, record.bytes, record.sha256] for record in shard_records(parts, profile)]
    identity = {"tars": shards, "profile": FOREIGN}
    packed = {sample.source_id for part in parts for sample in part.samples}
    classes, labels = _number_labels([label for name, label in work.labels.items() if name in packed], class_names)
    found = SourceList(tuple(work.sources.values()), classes, {})
    ledger = commit_job(storage, identity, found, parts, profile=profile, labels=labels, note="fastvid index")
    return JobReport(storage.url, ledger, {})


def rebuild(
    url: str,
    *,
    shards: Collection[str] | None = None,
    workers: int | None = None,
    limits: Limits | None = None,
) -> tuple[str, ...]:
    """Recompute the sidecars of shards of a dataset from their tars, and upgrade a dataset of fastvid 0.1.

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
    records = {record.name: record for generation in generations for record in generation.shards}
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
        tars = [_open_tar(storage, stem, str(storage.path(f"{stem}.tar"))) for stem in foreign]
        # Keys must be unique among the samples of all tars, also of those that are not indexed now.
        work = _Work(storage, tars)
        tars = [tar for tar in tars if tar.stem in chosen]
        work.progress = Progress(sum(len(tar.samples) for tar in tars))
        with contextlib.closing(_engine(workers, limits)) as engine:
            for tar in tars:
                if tar.problem:
                    raise FormatError(tar.problem, shard=tar.stem)
                work.index(tar, engine, wanted[tar.stem])
            work.progress.finish()
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


class _Work:
    """Indexes tars one by one."""

    def __init__(self, storage: LocalStorage, tars: Sequence[_Tar]) -> None:
        self.storage = storage
        keys = sample_keys({tar.stem: tar.samples for tar in tars})
        self.sources: dict[tuple[str, int], Source] = {}
        self.labels: dict[str, str | int] = {}
        for tar in tars:
            for sample in tar.samples:
                source = _source(tar, sample, *keys[tar.stem, sample.first])
                self.sources[tar.stem, sample.first] = source
                if sample.label is not None:
                    self.labels[encode_name(source.id)] = sample.label
        self.progress = Progress(len(self.sources))

    def index(self, tar: _Tar, engine: Engine, wanted: Sequence[str] | None = None) -> Part:
        """Write the sidecars of a tar; its part has no digest if there is nothing to index.

        Raises:
            FormatError: If the tar's samples do not have the keys in `wanted`.
        """
        if tar.problem:
            broken = Source(os.path.basename(tar.path), tar.path)
            row = problem_row(broken, Reason.BROKEN_CONTAINER, f"the tar is broken: {tar.problem}")
            return Part(tar.stem, [row], (), None)
        outcomes = self._outcomes(tar, engine)
        rows: list[Row] = []
        packed: list[PackedSample] = []
        found: dict[int, IndexedSample] = {}
        for number, sample in enumerate(tar.samples):
            source, outcome = self.sources[tar.stem, sample.first], outcomes[number]
            row = ledger_row(source, outcome, tar.stem)
            # The video stays unchanged; the blobs of the outcome are its index.
            row["bytes_out"] = source.size if outcome.reason is None else None
            row["warnings"] = [*outcome.warnings, *sample.notes]
            rows.append(row)
            if outcome.reason is None:
                indexed = found[sample.first] = _indexed(sample, source, outcome)
                info = indexed.streams[0].info
                facts = (info.num_frames, str(info.fps), info.width, info.height)
                packed.append(PackedSample(encode_name(source.id), source.key, *facts))
        if wanted is not None:
            _check_keys(tar, [sample.key for sample in packed], wanted)
        if not found:
            return Part(tar.stem, rows, (), None)

        def indexer(
            _view: memoryview, _name: str, members: Sequence[TarMember], _streams: tuple[str, ...]
        ) -> IndexedSample | None:
            return found.get(members[0].offset)

        view = self.storage.map(f"{tar.stem}.tar")
        digest = sha256(view)
        samples = index_shard(self.storage, tar.stem, indexer=indexer, tar_sha256=digest)
        return Part(tar.stem, rows, packed, TarDigest(len(view), digest, len(samples)))

    def _outcomes(self, tar: _Tar, engine: Engine) -> dict[int, Outcome]:
        """Return the outcome of each sample, by its number in the tar."""
        outcomes: dict[int, Outcome] = {}
        tasks: dict[int, Task] = {}
        path = str(self.storage.path(f"{tar.stem}.tar"))

        def keep(outcome: Outcome) -> None:
            outcomes[outcome.index] = outcome
            self.progress.advance(rejected=outcome.reason is not None)

        for number, sample in enumerate(tar.samples):
            source, problem = self.sources[tar.stem, sample.first], missing_video(sample)
            if problem is not None:
                keep(Outcome(number, reason=problem[0], message=problem[1]))
                continue
            name, place = encode_name(source.id), source.member
            tasks[number] = Task(number, name, path, source.key, size=source.size, member=place, indexes=True)
        again, outages = [], OutageDetector()
        for outcome in engine.run(tasks.values()):
            outages.add_outcome(Source(tasks[outcome.index].source_id, path), outcome)
            if outcome.transient:
                again.append(outcome.index)
            else:
                keep(outcome)
        for number in again:
            outcome = retry_alone(engine, tasks[number])
            if outages.add_final_outcome(Source(tasks[number].source_id, path), outcome):
                keep(outcome)
        outages.finish()
        return outcomes


def _engine(workers: int | None, limits: Limits | None) -> LocalEngine:
    # The profile is irrelevant, because nothing is encoded.
    return LocalEngine(Settings(get_profile("compact"), find_ffmpeg(), limits or Limits(), MAX_SECONDS), workers)


def _open_tar(storage: Storage, stem: str, path: str) -> _Tar:
    try:
        return _Tar(stem, path, read_tar(storage.map(f"{stem}.tar")))
    except FormatError as error:
        return _Tar(stem, path, problem=error.message)


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
    target = storage.path(f"{stem}.tar")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)
        try:
            os.link(os.path.realpath(path), target)
        except OSError:  # another file system
            target.symlink_to(os.path.realpath(path))
    except OSError as error:
        raise StorageError(f"tar cannot be linked: {error.strerror}", file=str(target)) from error


def _source(tar: _Tar, sample: TarSample, name: str, key: str) -> Source:
    """Return a sample as a source for the ledger and the annotations."""
    label, video = None if sample.label is None else str(sample.label), sample.video
    if video is None:
        return Source(name, tar.path, 0, label, sample.columns, key=key)
    place = (video.offset, video.size)
    return Source(name, f"{tar.path}/{video.name}", video.size, label, sample.columns, member=place, key=key)


def _indexed(sample: TarSample, source: Source, outcome: Outcome) -> IndexedSample:
    assert sample.video is not None
    info, records, facts = unpack_found(outcome.samples[0])
    meta = {"source_id": encode_name(source.id), "pix_fmt": facts["pix_fmt"]}
    return IndexedSample(source.key, meta, (IndexedStream("rgb", sample.video, info, records),))


def _check_keys(tar: _Tar, keys: Sequence[str], wanted: Sequence[str]) -> None:
    if keys != wanted:
        lost = sorted(set(wanted) - set(keys))
        raise FormatError(
            f"the tar contains {len(keys)} samples, the dataset lists {len(wanted)}"
            + (f"; {lost[0]!r} can no longer be indexed" if lost else ""),
            shard=tar.stem,
        )


def _number_labels(labels: Sequence[str | int], class_names: Sequence[str]) -> tuple[tuple[str, ...], dict[str, int]]:
    """Return the classes, and the number of each label by its text.

    Raises:
        UsageError: If a number has no class name, or a name is not among the class names.
    """
    numbers = [label for label in labels if isinstance(label, int)]
    if len(numbers) == len(labels):
        if class_names and numbers and max(numbers) >= len(class_names):
            raise UsageError(f"label {max(numbers)} has no name: there are {len(class_names)} class names")
        return tuple(class_names), {str(number): number for number in numbers}
    names = [str(label) for label in labels]
    classes = tuple(class_names) or tuple(sorted(set(names)))
    unknown = next((label for label in labels if str(label) not in classes), None)
    if unknown is not None:
        raise UsageError(f"unknown label {unknown!r}: it is none of the {len(classes)} class names")
    return classes, {name: number for number, name in enumerate(classes)}
