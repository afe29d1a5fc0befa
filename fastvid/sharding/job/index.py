"""Indexes the videos of tars that other tools wrote: one shard for each tar, which stays as it is.

Makes a dataset of such tars, and rebuilds the sidecars of any dataset. Each video is indexed and verified in a worker
process (`fastvid.media.prove`). A video that cannot be indexed is rejected, and the ledger says why.
"""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from fastvid.errors import FormatError, StorageError, UsageError
from fastvid.format.dataset import change
from fastvid.format.generations import Generation, ShardRecord, history, read_generation, read_head, upgrade_records
from fastvid.format.schema import (
    DATASET_JSON,
    FACT_FIELDS,
    FOREIGN,
    FORMAT_VERSION,
    annotations_file,
    from_parquet,
    shard_stem,
)
from fastvid.format.selection import with_facts
from fastvid.format.tar import TarDigest, TarMember
from fastvid.format.writing import IndexedSample, IndexedStream, index_shard
from fastvid.media.ffmpeg import Limits
from fastvid.media.index_video import Proof
from fastvid.media.reasons import Reason
from fastvid.runtime.names import encode_name
from fastvid.runtime.processes import namespace
from fastvid.runtime.values import sha256
from fastvid.sharding.encode.profiles import Settings
from fastvid.sharding.job.job import JobReport, index_settings, run, shard_records
from fastvid.sharding.job.ledger import PackedSample, Part, Row
from fastvid.sharding.job.lock import Staging
from fastvid.sharding.job.plan import digest
from fastvid.sharding.job.run import How, Job, ShardWork, SourceWork, View
from fastvid.sharding.sources.sources import Source, SourceList
from fastvid.sharding.sources.tars import TarSample, find_tars, name_samples, read_tar, sample_keys
from fastvid.sharding.work.index import indexed_meta, unpack_found
from fastvid.sharding.work.tasks import Outcome
from fastvid.storage import LocalStorage, Storage, open_storage


@dataclass(frozen=True, slots=True)
class IndexedTar:
    """A tar to index."""

    stem: str
    path: str
    version: tuple[int, int]  # its size in bytes and modification time in nanoseconds
    samples: Sequence[TarSample] = ()  # its samples, in order
    problem: tuple[Reason, str] | None = None


def open_tar(storage: LocalStorage, stem: str, path: str) -> IndexedTar:
    """Return the tar `stem` in a folder, with its samples."""
    stat = storage.path(f"{stem}.tar").stat()
    version = stat.st_size, stat.st_mtime_ns
    try:
        return IndexedTar(stem, path, version, read_tar(storage.map(f"{stem}.tar")))
    except FormatError as error:
        problem = Reason.BROKEN_CONTAINER, f"the tar is broken: {error.message}"
        return IndexedTar(stem, path, version, problem=problem)


class IndexShards(SourceWork):
    """Indexes the videos of tars; each tar is a shard.

    `tars`: all tars of the dataset, among whose samples keys must be unique. `chosen`: the tars to index, each with the
    keys that an existing dataset lists; None to index all tars with any keys.
    """

    profile: Mapping[str, Any] = {"name": FOREIGN}

    def __init__(
        self,
        storage: LocalStorage,
        tars: Sequence[IndexedTar],
        settings: Settings,
        *,
        chosen: Mapping[str, Sequence[str]] | None = None,
        classes: Sequence[str] = (),
    ) -> None:
        self._folder, self._chosen = storage, chosen
        keys = sample_keys({tar.stem: tar.samples for tar in tars})
        self._inside: dict[str, tuple[Source, TarMember | None]] = {}
        shards: dict[str, list[Source]] = {}
        sources = [Source(os.path.basename(tar.path), tar.path, problem=tar.problem) for tar in tars if tar.problem]
        for tar in tars:
            shards[tar.stem] = []
            for sample in tar.samples:
                path = tar.path if sample.video is None else f"{tar.path}/{sample.video.name}"
                source = sample.source(*keys[tar.stem, sample.first], path)
                self._inside[source.id] = source, sample.video
                if sample.problem is None:
                    # The worker opens the tar in the dataset's folder: if the folder is gone too, a disk is missing.
                    shards[tar.stem].append(replace(source, path=str(storage.path(f"{tar.stem}.tar"))))
        sources += [source for source, _ in self._inside.values()]
        stems = [stem for stem in shards if chosen is None or stem in chosen]
        found = SourceList(tuple(sources), tuple(classes), {})
        super().__init__(storage, found, settings, [shards[stem] for stem in stems])
        self.stems = stems
        tried = [source for shard in self.shards for source in shard]
        notes = [(encode_name(s.id), s.key, s.member, s.label, dict(s.columns)) for s, _ in self._inside.values()]
        self.identity = {
            "format": ".".join(map(str, FORMAT_VERSION)),
            "profile": self.profile,
            "tars": {"number": len(tars), "sha256": digest([(tar.stem, tar.version) for tar in tars])},
            "sources": {"number": len(tried), "bytes": sum(source.size for source in tried)},
            "annotations": {"number": len(notes), "sha256": digest([notes, list(classes)])},
        }

    def order(self, shard: int) -> Sequence[int]:
        """See `ShardWork`: in the order of the tar."""
        return range(len(self.shards[shard]))

    def committed_identity(self, parts: Sequence[Part]) -> Mapping[str, Any]:
        """Return the identity that the dataset records: names, sizes and SHA-256 of the tars, not their paths."""
        records = shard_records(parts, self.profile)
        return {"tars": [[record.name, record.bytes, record.sha256] for record in records], "profile": FOREIGN}

    def row(self, source: Source, outcome: Outcome, stem: str) -> Row:
        """See `ShardWork`. The video stays unchanged, so `bytes_out` is its size."""
        row = super().row(self._inside[source.id][0], outcome, stem)
        return row | {"bytes_out": source.size if outcome.reason is None else None}

    def made(self, views: Sequence[View]) -> Iterator[tuple[PackedSample, IndexedSample]]:
        """See `SourceWork`."""
        ((source, outcome),) = views
        info, records, _ = unpack_found(outcome.samples[0])
        member = self._inside[source.id][1]
        assert member is not None
        sample = IndexedSample(
            source.key, indexed_meta(source, outcome), (IndexedStream("rgb", member, info, records),)
        )
        facts = (info.num_frames, str(info.fps), info.width, info.height)
        yield PackedSample(encode_name(source.id), source.key, *facts), sample

    def pack(self, shard: int, samples: Iterator[IndexedSample]) -> TarDigest | None:
        """Write the sidecars of a tar, unless it has no sample that could be indexed."""
        stem, found = self.stems[shard], list(samples)
        if self._chosen is not None:
            _check_keys(stem, [sample.key for sample in found], self._chosen[stem])
        if not found:
            return None
        view = self._folder.map(f"{stem}.tar")
        tar_sha256 = sha256(view)
        index_shard(self._folder, stem, samples=found, tar_sha256=tar_sha256)
        return TarDigest(len(view), tar_sha256, len(found))


def _check_keys(stem: str, keys: Sequence[str], wanted: Sequence[str]) -> None:
    if keys != wanted:
        lost = sorted(set(wanted) - set(keys))
        raise FormatError(
            f"the tar contains {len(keys)} samples, the dataset lists {len(wanted)}"
            + (f"; {lost[0]!r} can no longer be indexed" if lost else ""),
            shard=stem,
            hint="index the tars again into a new folder",
        )


def index_tars(
    sources: Sequence[str],
    out: str | None = None,
    *,
    class_names: Sequence[str] = (),
    limits: Limits | None = None,
    **how: Any,
) -> JobReport:
    """Make a dataset of tars that other tools wrote, as ``fastvid index`` does.

    Run again with the same arguments after an interruption, it resumes: finished tars are not indexed again.
    ``how`` and ``limits`` may differ.

    Args:
        sources: Tars, or folders of tars.
        out: Folder of the dataset: the tars are linked into it as ``data-000000.tar`` and so on. By default the dataset
            is made in the folder of the tars, which keep their names.
        class_names: Names for integer labels.
        how: ``engine``, ``ray_address``, ``workers`` and ``part``, as for `fastvid.shard`. The nodes of a Ray cluster
            need the tars at the same paths. A part is every N-th tar, from the I-th; every part reads the headers of
            all tars, because keys are unique among all.
        limits: Limits per video.

    Raises:
        UsageError: If there is no tar, a dataset exists already, or another tool's file would be overwritten.
        MissingDependency: If there is no Ray for engine "ray".
        JobError: If another job, or the same part, is running here, the unfinished job differs, or no video could be
            indexed.
        StorageError: If the folder cannot be written, or a disk does not deliver a tar; run again to resume.
        WorkerError: If workers cannot be started, or the Ray cluster is gone; run again to resume.
    """
    chosen, settings = How(**how, command="index"), index_settings(limits, Proof.ALL)
    paths = find_tars(sources)
    storage = open_storage(out if out is not None else _common_folder(paths))
    if not isinstance(storage, LocalStorage):
        raise UsageError("tars are indexed on a local disk", file=storage.url)
    folder = storage

    def prepare() -> ShardWork:
        tars = _tars(folder, paths, linked=out is not None)
        classes, named = name_samples({tar.stem: tar.samples for tar in tars}, class_names)
        tars = [replace(tar, samples=named[tar.stem]) for tar in tars]
        work = IndexShards(folder, tars, settings, classes=classes)
        if folder.exists(DATASET_JSON) and Staging(folder).job() != work.identity:
            raise UsageError(
                "a dataset exists already", file=folder.url, hint="run `fastvid index` on it alone to rebuild it"
            )
        return work

    return run(storage, chosen, prepare)


def rebuild(
    url: str,
    *,
    shards: Collection[str] | None = None,
    workers: int | None = None,
) -> tuple[str, ...]:
    """Recompute the sidecars of shards of a dataset from their tars, and upgrade a dataset of fastvid 0.1.

    Shards of videos in place are left to `fastvid.sharding.in_place`.

    Returns the names of the shards.
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
                raise FormatError(tar.problem[1], shard=tar.stem)
        # Keys must be unique among the samples of all tars, also of those that are not indexed now.
        settings, how = index_settings(None, Proof.ALL), How(workers=workers, command="index")
        work = IndexShards(storage, tars, settings, chosen={stem: wanted[stem] for stem in foreign if stem in chosen})
        # Records are in a temporary folder, so an interrupted rebuild starts from the beginning. Blocked samples are
        # indexed too, because the annotations have rows for them; hidden samples stay hidden.
        with tempfile.TemporaryDirectory(prefix="fastvid-") as folder:
            Job(work, how, records=LocalStorage(folder)).run(how.open_engine(settings))
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


def _tars(storage: LocalStorage, paths: Sequence[str], *, linked: bool) -> list[IndexedTar]:
    """Return the tars: linked into the folder under the names of shards, or unchanged if they are there already."""
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
    """Raise UsageError if a sidecar would overwrite another tool's table.

    For example, video2dataset writes ``00000.parquet`` next to ``00000.tar``.
    """
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
    # Link under a temporary name and rename: other parts of the job may be reading or linking the tar at this moment.
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
