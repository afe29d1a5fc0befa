"""Indexes the videos of a dataset in place again: those that changed, or all of them where they are now."""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Final

import pyarrow as pa

from fastvid.errors import FormatError, UsageError
from fastvid.format.dataset import change
from fastvid.format.generations import Generation, ShardRecord, read_annotations, read_generation
from fastvid.format.in_place import Root, common_root, parse_root
from fastvid.format.open_shards import open_shard
from fastvid.format.schema import IN_PLACE, StreamFlag, later_stem
from fastvid.format.shard import Shard
from fastvid.media.ffmpeg import find_ffmpeg
from fastvid.media.in_place.index_video import Proof
from fastvid.media.limits import Limits
from fastvid.runtime.file_names import decode_name
from fastvid.runtime.units import things
from fastvid.sharding.encode.profiles import get_profile
from fastvid.sharding.engines.engine import open_engine
from fastvid.sharding.in_place.index_files import IndexFiles
from fastvid.sharding.job.job import MAX_SECONDS
from fastvid.sharding.job.ledger import PackedSample, Part
from fastvid.sharding.job.run import Job
from fastvid.sharding.sources.sources import Source, SourceList
from fastvid.sharding.work.messages import Settings
from fastvid.storage import LocalStorage, Storage, open_storage
from fastvid.storage.transfer import copy_file
from fastvid.storage.urls import open_file

# Added to the revision in names of shards, which `fastvid compact` uses as it is.
_NAMES: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class Reindexed:
    """The result of `reindex`."""

    generation: int
    shards: Mapping[str, str]
    changed: int


def reindex(
    url: str,
    *,
    root: str | None = None,
    shards: Collection[str] | None = None,
    workers: int | None = None,
    limits: Limits | None = None,
) -> Reindexed:
    """Index videos in place again, and commit a generation with their new versions, numbers of frames and sizes.

    Keys, labels and other annotations are kept. Without arguments, the shards that list a changed file are indexed.
    """
    storage = open_storage(url)
    _, generation = read_generation(storage)
    listed = [shard for shard in generation.shards if shard.is_in_place]
    if root is not None and not listed:
        raise UsageError("the dataset lists no videos in place, so they have no root", file=url)
    old = generation.root or ""
    place = parse_root(old, root)
    opened = {shard.name: open_shard(storage, generation, generation.shards.index(shard)) for shard in listed}
    changed = {name: _changed(shard, place) for name, shard in opened.items()}
    chosen = [shard for shard in listed if root is not None or changed[shard.name] or shard.name in (shards or ())]
    count = sum(changed.values())
    if not chosen:
        return Reindexed(generation.number, {}, count)
    work = [_sources(storage, generation, shard, opened[shard.name], place) for shard in chosen]
    with tempfile.TemporaryDirectory(prefix="fastvid-") as folder:
        scratch = LocalStorage(folder)
        parts = _index(scratch, chosen, work, workers, limits or Limits())
        names = {}
        for shard, part in zip(chosen, parts, strict=True):
            names[shard.name] = name = later_stem(shard.name, _NAMES + generation.revision)
            for suffix in shard.suffixes:
                copy_file(scratch, f"{part.stem}.{suffix}", storage, f"{name}.{suffix}")
    digests = {shard.name: part.digest for shard, part in zip(chosen, parts, strict=True)}
    samples = {sample.key: sample for part in parts for sample in part.samples}
    everything = [*(source.path for sources in work for source in sources)]
    kept = [f"{place.listed}/file"] if len(chosen) < len(listed) else []

    def edit(current: Generation, table: pa.Table) -> tuple[Generation, pa.Table]:
        made = []
        for record in current.shards:
            digest = digests.get(record.name)
            if digest is not None:
                record = replace(record, name=names[record.name], bytes=digest.bytes, sha256=digest.sha256)
            made.append(record)
        extras = {**current.extras, IN_PLACE: {"root": common_root([*everything, *kept])}}
        note = f"index {things(len(names), 'shard')} of videos in place again"
        return replace(current, shards=tuple(made), extras=extras, note=note), _with_facts(table, samples)

    return Reindexed(change(storage, edit).number, names, count)


def _changed(shard: Shard, place: Root) -> int:
    """Return how many files of a shard are not the version that was indexed."""
    versions = {}
    for row in range(shard.num_samples):
        for stream in shard.streams[: shard.num_streams]:
            listed = shard.file(row, stream)
            versions[listed.file] = listed.version
    count = 0
    for file, version in versions.items():
        storage, name = open_file(place.locate(file))
        found = storage.version(name)
        count += found is None or not found.same(version)
    return count


def _sources(storage: Storage, generation: Generation, record: ShardRecord, shard: Shard, place: Root) -> list[Source]:
    """Return the samples of a shard as sources."""
    if len(generation.streams) > 1 or record.signals:
        raise UsageError(
            "a dataset with cameras or signals is not indexed again",
            file=storage.url,
            hint="index its source again into a new folder with `fastvid index`",
        )
    table = read_annotations(storage, generation)
    start = sum(one.samples for one in generation.shards[: generation.shards.index(record)])
    rows = table.slice(start, record.samples).to_pylist()
    sources = []
    for number, row in enumerate(rows):
        bounds = row.get("asked_start_seconds"), row.get("asked_end_seconds")
        if shard.info(number).flags & StreamFlag.PART and bounds == (None, None):
            raise UsageError(
                "the annotations do not say which part of its file a sample is",
                key=row["key"],
                file=storage.url,
                hint="index its source again into a new folder with `fastvid index`",
            )
        path = place.locate(shard.file(number).file)
        parent = None if bounds == (None, None) else row.get("parent")
        name = decode_name(row["source_id"])
        sources.append(Source(name, path, key=row["key"], start=bounds[0], end=bounds[1], parent=parent))
    return sources


def _index(
    scratch: LocalStorage,
    records: Sequence[ShardRecord],
    work: Sequence[Sequence[Source]],
    workers: int | None,
    limits: Limits,
) -> list[Part]:
    proof = Proof(records[0].profile.get("proof", Proof.SAMPLE))
    # The profile is irrelevant, because nothing is encoded.
    settings = Settings(get_profile("compact"), find_ffmpeg(), limits, MAX_SECONDS, proof=proof)
    found = SourceList(tuple(source for sources in work for source in sources), (), {})
    files = IndexFiles(scratch, found, settings, seed=0, samples_per_shard=1, shards=work)
    parts = Job(scratch, files, command="index").run(open_engine("local", settings, workers=workers), lambda: None)
    for row in (row for part in parts for row in part.rows):
        if row["status"] != "packed":
            raise FormatError(
                f"video can no longer be indexed: {row['message']}",
                file=row["path"],
                hint="restore the file, or remove its samples with `fastvid remove`",
            )
    return parts


def _with_facts(table: pa.Table, samples: Mapping[str, PackedSample]) -> pa.Table:
    """Return annotations with the facts of samples that were indexed again."""
    columns: dict[str, list[Any]] = {
        name: table[name].to_pylist() for name in ("num_frames", "fps", "width", "height", "duration")
    }
    for row, key in enumerate(table["key"].to_pylist()):
        sample = samples.get(key)
        if sample is not None:
            rate = Fraction(sample.fps)
            facts = (sample.num_frames, float(rate), sample.width, sample.height, float(sample.num_frames / rate))
            for values, fact in zip(columns.values(), facts, strict=True):
                values[row] = fact
    for name, values in columns.items():
        field = table.schema.field(name)
        table = table.set_column(table.column_names.index(name), field, pa.array(values, field.type))
    return table
