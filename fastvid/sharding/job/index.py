"""Indexes the videos of tars that other tools wrote: one shard for each tar, which stays as it is.

Makes a dataset of such tars, restores one from fastvid's own tars alone, and rebuilds the sidecars of any dataset. Each
video is indexed and verified in a worker process (`fastvid.media.prove`). A video that cannot be indexed is rejected,
and the ledger says why.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import secrets
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from fastvid.errors import FormatError, StorageError, UsageError
from fastvid.format import schema
from fastvid.format.annotations import annotation_table, fact_columns, read_signals, signals_file
from fastvid.format.generations import Generation, ShardRecord, commit_generation, read_annotations, read_generation
from fastvid.format.tar import TarDigest, TarMember, read_members
from fastvid.format.writing import IndexedSample, IndexedStream, index_shard
from fastvid.media.ffmpeg import Limits
from fastvid.media.index_video import Proof
from fastvid.media.reasons import Reason
from fastvid.runtime.names import encode_name
from fastvid.runtime.processes import namespace
from fastvid.runtime.values import sha256
from fastvid.sharding.encode.profiles import Settings
from fastvid.sharding.job.job import JobReport, dataset_id, index_settings, run
from fastvid.sharding.job.ledger import PackedSample, Part, Row, read_blocked, shard_records
from fastvid.sharding.job.lock import Staging, lock_folder
from fastvid.sharding.job.members import record_in, stored_row
from fastvid.sharding.job.plan import digest
from fastvid.sharding.job.run import How, Job, ShardWork, SourceWork, View
from fastvid.sharding.sources.sources import Source, SourceList
from fastvid.sharding.sources.tars import find_tars, read_tars
from fastvid.sharding.work.index import indexed_meta, unpack_found
from fastvid.sharding.work.tasks import Outcome
from fastvid.storage import LocalStorage, Storage, open_storage
from fastvid.storage.urls import link_or_copy

_LOG = logging.getLogger(__name__)


class IndexShards(SourceWork):
    """Indexes the videos of tars; each tar is a shard.

    `tars`: path of each tar of the dataset, by the name of its shard; keys are unique among all their samples.
    `chosen`: the tars to index, each with the keys that an existing dataset lists; None to index all tars with any
    keys.
    """

    profile: Mapping[str, Any] = {"name": schema.FOREIGN}

    def __init__(
        self,
        storage: LocalStorage,
        tars: Mapping[str, str],
        settings: Settings,
        *,
        chosen: Mapping[str, Sequence[str]] | None = None,
        class_names: Sequence[str] = (),
    ) -> None:
        self._folder, self._chosen = storage, chosen
        self._inside: dict[str, tuple[Source, TarMember | None]] = {}
        classes, samples = read_tars(tars, class_names)
        shards: dict[str, list[Source]] = {stem: [] for stem in tars}
        for stem, (source, video) in ((stem, one) for stem, some in samples.items() for one in some):
            named = source if video is None else replace(source, path=f"{source.path}/{video.name}")
            self._inside[source.id] = named, video
            if source.problem is None:
                # The worker opens the tar in the dataset's folder: if the folder is gone too, a disk is missing.
                shards[stem].append(replace(source, path=str(storage.path(f"{stem}.tar"))))
        found = SourceList(tuple(source for source, _ in self._inside.values()), classes, {})
        stems = [stem for stem in shards if chosen is None or stem in chosen]
        super().__init__(storage, found, settings, shards=[shards[stem] for stem in stems])
        self.stems = stems
        tried = [source for shard in self.shards for source in shard]
        stats = [(stem, storage.path(f"{stem}.tar").stat()) for stem in tars]
        notes = [
            (encode_name(s.id), s.key, s.member, s.label, dict(s.columns))
            for s in found.sources
            if s.problem is None or s.problem[0] is not Reason.BROKEN_CONTAINER
        ]
        self.identity = {
            "format": ".".join(map(str, schema.FORMAT_VERSION)),
            "profile": self.profile,
            "tars": {
                "number": len(tars),
                "sha256": digest([(stem, (stat.st_size, stat.st_mtime_ns)) for stem, stat in stats]),
            },
            "sources": {"number": len(tried), "bytes": sum(source.size for source in tried)},
            "annotations": {"number": len(notes), "sha256": digest([notes, list(classes)])},
        }

    def order(self, shard: int) -> Sequence[int]:
        """See `ShardWork`: in the order of the tar."""
        return range(len(self.shards[shard]))

    def committed_identity(self, parts: Sequence[Part]) -> Mapping[str, Any]:
        """Return the identity that the dataset records: names, sizes and SHA-256 of the tars, not their paths."""
        records = shard_records(parts, self.profile)
        return {"tars": [[record.name, record.bytes, record.sha256] for record in records], "profile": schema.FOREIGN}

    def row(self, source: Source, outcome: Outcome, stem: str) -> Row:
        """See `ShardWork`. The video stays unchanged, so `bytes_out` is its size."""
        row = super().row(self._inside[source.id][0], outcome, stem)
        return row | {"bytes_out": source.size if outcome.reason is None else None}

    def made(self, views: Sequence[View]) -> Iterator[tuple[PackedSample, IndexedSample]]:
        """See `SourceWork`."""
        ((source, outcome),) = views
        info, records = unpack_found(outcome.samples[0])
        member = self._inside[source.id][1]
        assert member is not None
        sample = IndexedSample(
            source.key, indexed_meta(source, outcome), (IndexedStream("rgb", member, info, records),)
        )
        yield PackedSample.of(source, outcome.samples[0]), sample

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
    folders = sorted({os.path.dirname(path) for path in paths})
    if out is None and len(folders) > 1:
        raise UsageError(f"the tars are in {len(folders)} folders", file=folders[0], hint="name a folder with --out")
    folder = _on_disk(open_storage(folders[0] if out is None else out))

    def prepare() -> ShardWork:
        tars = _tars(folder, paths, linked=out is not None)
        work = IndexShards(folder, tars, settings, class_names=class_names)
        if folder.exists(schema.DATASET_JSON) and Staging(folder).job() != work.identity:
            raise UsageError(
                "a dataset exists already", file=folder.url, hint="run `fastvid index` on it alone to rebuild it"
            )
        return work

    return run(folder, chosen, prepare)


def _on_disk(storage: Storage) -> LocalStorage:
    if not isinstance(storage, LocalStorage):
        raise UsageError("tars are indexed on a local disk", file=storage.url)
    return storage


def rebuild(
    url: str,
    *,
    shards: Collection[str] | None = None,
    workers: int | None = None,
) -> tuple[str, ...]:
    """Recompute the sidecars of shards of a dataset from their tars.

    Shards of videos in place are left to `fastvid.sharding.in_place`.

    Returns the names of the shards.
    """
    storage = open_storage(url)
    generation = read_generation(storage)[1]
    records = {record.name: record for record in generation.shards if not record.is_in_place}
    foreign = [record.name for record in records.values() if record.profile.get("name") == schema.FOREIGN]
    chosen = [name for name in records if shards is None or name in shards]
    for stem in chosen:
        _check_tar(storage, records[stem])
        if stem not in foreign:
            index_shard(storage, stem, streams=generation.streams, tar_sha256=records[stem].sha256)
    if set(foreign) & set(chosen):
        storage = _on_disk(storage)
        wanted: dict[str, list[str]] = {}
        keys, start = read_annotations(storage, generation)["key"].to_pylist(), 0
        for record in generation.shards:
            wanted[record.name] = keys[start : start + record.samples]
            start += record.samples
        tars = {stem: str(storage.path(f"{stem}.tar")) for stem in foreign}
        # Keys must be unique among the samples of all tars, also of those that are not indexed now.
        some = {stem: wanted[stem] for stem in foreign if stem in chosen}
        work = IndexShards(storage, tars, index_settings(None, Proof.ALL), chosen=some)
        # Records are in a temporary folder, so an interrupted rebuild starts from the beginning. Blocked samples are
        # indexed too, because the annotations have rows for them; hidden samples stay hidden.
        with tempfile.TemporaryDirectory(prefix="fastvid-") as folder:
            work.records = LocalStorage(folder)
            Job(work, How(workers=workers)).run()
    return tuple(chosen)


def _check_tar(storage: Storage, record: ShardRecord) -> None:
    """Raise FormatError if a tar is not the one that was committed: new sidecars would make the damage look right."""
    view = storage.map(f"{record.name}.tar")
    if len(view) != record.bytes or sha256(view) != record.sha256:
        raise FormatError(
            f"tar of {len(view)} bytes is not the one of {record.bytes} bytes that the generation lists",
            shard=record.name,
            hint="restore the tar from a copy of the dataset",
        )


def _tars(storage: LocalStorage, paths: Sequence[str], *, linked: bool) -> dict[str, str]:
    """Return the path of each tar by the name of its shard.

    The tars are linked into the folder under the names of shards, or keep their names if they are there already.
    """
    if linked:
        tars = {schema.shard_stem(number): path for number, path in enumerate(paths)}
        for stem, path in tars.items():
            _link(path, storage, stem)
        return tars
    tars = {os.path.basename(path).removesuffix(".tar"): path for path in paths}
    for stem in tars:
        _check_sidecar(storage, stem)
    return tars


def _check_sidecar(storage: Storage, stem: str) -> None:
    """Raise UsageError if a sidecar would overwrite another tool's table.

    For example, video2dataset writes ``00000.parquet`` next to ``00000.tar``.
    """
    name = f"{stem}.parquet"
    if not storage.exists(name):
        return
    try:
        schema.from_parquet(storage.read(name), file=name, columns=["member_offset"])
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


@dataclass(frozen=True, slots=True)
class Restored:
    """The result of `restore_dataset`."""

    dataset: str
    generation: Generation
    replaced: tuple[str, ...]  # names of tars that were left out, because newer ones contain their samples


@dataclass(frozen=True, slots=True)
class _Tar:
    folder: LocalStorage
    stem: str
    record: Mapping[str, Any]

    @property
    def age(self) -> tuple[int, str]:
        return int(self.record["generation"]), self.stem


def are_own(sources: Sequence[str]) -> bool:
    """Return whether all tars of the sources were written by fastvid; raise UsageError if only some were."""
    paths = find_tars(sources)
    foreign = [path for path in paths if _read(path) is None]
    if foreign and len(foreign) < len(paths):
        raise UsageError(
            f"{len(foreign)} of {len(paths)} tars were not written by fastvid",
            file=foreign[0],
            hint="index them into another folder",
        )
    return not foreign


def restore_dataset(sources: Sequence[str], out: str | None = None) -> Restored:
    """Make a dataset from fastvid's own tars, without any other file of the original dataset.

    Classes (also those without samples), streams, extras, profiles, encoders and annotations with their types are as
    when the tars were written. Signals are restored if their files are next to the tars. If tars disagree about the
    whole dataset, that of the newest generation is used. If two tars have the same sample, as after `fastvid compact`,
    the tar of the older generation is left out. Later relabels are lost, and removed samples come back unless `fastvid
    compact` deleted them or they are blocked in the folder.
    """
    tars = sorted(filter(None, map(_read, find_tars(sources))), key=lambda tar: tar.stem)
    storage = _on_disk(open_storage(out if out is not None else tars[0].folder.url))
    stems = [tar.stem for tar in tars]
    if len(set(stems)) < len(stems) or (out is None and len({tar.folder.url for tar in tars}) > 1):
        raise UsageError("the tars are of several folders", file=storage.url, hint="restore one dataset at a time")
    with lock_folder(storage):
        if storage.exists(schema.DATASET_JSON):
            raise UsageError("a dataset exists already", file=storage.url, hint="name a new folder with --out")
        chosen, replaced = _without_replaced(tars)
        newest = max(chosen, key=lambda tar: tar.age).record
        every = [newest, *(tar.record for tar in sorted(chosen, key=lambda tar: tar.age, reverse=True))]
        names = dict.fromkeys(name for record in every for name in record["classes"])
        classes = {name: number for number, name in enumerate(names)}
        blocked, shards, rows = set(read_blocked(storage)), list[ShardRecord](), list[dict[str, Any]]()
        for tar in chosen:
            if tar.folder.url != storage.url:
                link_or_copy(tar.folder, f"{tar.stem}.tar", storage, f"{tar.stem}.tar", None)
            view = storage.map(f"{tar.stem}.tar")
            found = sha256(view)
            samples = index_shard(storage, tar.stem, streams=tuple(newest["streams"]), tar_sha256=found)
            rows += [_row(sample, tar, classes, sample.meta.get("source_sha256") in blocked) for sample in samples]
            profile, encoder = tar.record["profile"], tar.record["encoder"]
            frames = sum(sample.streams[0].info.num_frames for sample in samples)
            signals = _signals(storage, tar, frames) if schema.SIGNALS in newest["extras"] else ""
            shards.append(ShardRecord(tar.stem, len(view), found, len(samples), profile, encoder, signals))
        extras = dict(newest["extras"])
        if not all(shard.signals for shard in shards) and extras.pop(schema.SIGNALS, None) is not None:
            _LOG.warning("the dataset is restored without signals: their files are not beside all of the tars")
            shards = [replace(shard, signals="") for shard in shards]
        generation = Generation(
            1,
            tuple(shards),
            tuple(newest["streams"]),
            tuple(classes),
            note="fastvid index: restored from the tars",
            extras=extras,
        )
        table = _typed(annotation_table(rows), newest.get("columns", ()))
        identity = {"tars": [[shard.name, shard.sha256] for shard in shards]}
        made = commit_generation(storage, dataset_id(identity), generation, table)
    return Restored(storage.url, made, replaced)


def _read(path: str) -> _Tar | None:
    """Return a tar with its record of the dataset; None if it has none."""
    folder, name = os.path.split(path)
    storage = _on_disk(open_storage(folder))
    view = storage.map(name)
    try:
        first = next((member for member in read_members(view) if member.suffix == "json"), None)
        meta = json.loads(bytes(view[first.offset : first.offset + first.size])) if first else None
    except (FormatError, ValueError, RecursionError):
        return None
    record = record_in(meta)
    return None if record is None else _Tar(storage, name.removesuffix(".tar"), record)


def _signals(storage: LocalStorage, tar: _Tar, frames: int) -> str:
    """Copy the signals of a tar, which are in a file next to it; return their SHA-256, "" if there is no file."""
    name = signals_file(tar.stem)
    if not tar.folder.exists(name):
        return ""
    if tar.folder.url != storage.url:
        link_or_copy(tar.folder, name, storage, name, None)
    found = sha256(storage.map(name))
    read_signals(storage, ShardRecord(tar.stem, 0, "", 0, signals=found), frames)
    return found


def _without_replaced(tars: Sequence[_Tar]) -> tuple[list[_Tar], tuple[str, ...]]:
    """Leave out tars whose samples are in a tar of a later generation.

    Returns the other tars, and the names of those that are left out.
    """
    known: set[str] = set()
    chosen, replaced = [], []
    for tar in sorted(tars, key=lambda tar: tar.age, reverse=True):
        keys = {member.key for member in read_members(tar.folder.map(f"{tar.stem}.tar"))}
        if known.isdisjoint(keys):
            chosen.append(tar)
            known |= keys
        else:
            _LOG.info("%s is left out: a later tar contains its samples", tar.stem)
            replaced.append(tar.stem)
    return sorted(chosen, key=lambda tar: tar.stem), tuple(sorted(replaced))


def _row(sample: IndexedSample, tar: _Tar, classes: Mapping[str, int], is_blocked: bool) -> dict[str, Any]:
    """Return the annotations of a sample, with the number of its class."""
    row, info = stored_row(sample.meta), sample.streams[0].info
    label, names = row.pop("label", None), tar.record["classes"]
    if label is not None and label < len(names):
        label = classes[names[label]]
    facts = {
        "key": sample.key,
        "source_id": sample.meta.get("source_id", sample.key),
        "label": label,
        "removed": is_blocked,
        **fact_columns(info.num_frames, info.fps, info.width, info.height),
    }
    return facts | row


def _typed(table: pa.Table, columns: Sequence[tuple[str, str]]) -> pa.Table:
    """Return a table with columns in the order and of the types in `columns`, which the tars contain."""
    for name, text in columns:
        if name in (*schema.ANNOTATION_FIELDS, *schema.FACT_FIELDS, schema.CLASS) or (kind := _type(text)) is None:
            continue
        if name not in table.column_names:
            table = table.append_column(name, pa.nulls(table.num_rows, kind))
        with contextlib.suppress(pa.ArrowInvalid):  # a tar of an earlier generation may have values of another type
            table = table.set_column(table.column_names.index(name), name, table[name].cast(kind))
    told = [name for name, _ in columns if name in table.column_names]
    return table.select([*told, *(name for name in table.column_names if name not in told)])


def _type(text: str) -> pa.DataType | None:
    """Return the type that pyarrow prints as `text`; None for a type that a column is not restored to."""
    with contextlib.suppress(ValueError):
        return pa.type_for_alias(text)
    if found := re.fullmatch(r"list<\w+: (.*)>", text):
        inner = _type(found[1])
        return None if inner is None else pa.list_(inner)
    if found := re.fullmatch(r"timestamp\[(\w+), tz=(.+)\]", text):
        return pa.timestamp(found[1], found[2])
    if found := re.fullmatch(r"decimal128\((\d+), (-?\d+)\)", text):
        return pa.decimal128(int(found[1]), int(found[2]))
    return None
