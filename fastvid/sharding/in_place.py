"""Lists and indexes videos in place: the work of jobs that neither encode nor copy a video.

Indexes the videos of a dataset in place again: those that changed, or all of them where they are now.

Makes a dataset of videos in place: nothing of them is copied or encoded.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Final

import pyarrow as pa

from fastvid.errors import FormatError, UsageError
from fastvid.format.dataset import change
from fastvid.format.generations import Generation, ShardRecord, read_annotations, read_generation
from fastvid.format.in_place import IndexedSample, IndexedStream, ListedFile, Root, common_root, parse_root
from fastvid.format.schema import (
    DATASET_JSON,
    FORMAT_VERSION,
    IN_PLACE,
    IN_PLACE_SUFFIXES,
    PICTURES,
    StreamFlag,
    later_stem,
    shard_stem,
)
from fastvid.format.shard import Shard, open_shard, write_in_place
from fastvid.format.tar import TarMember
from fastvid.media.ffmpeg import Limits, find_ffmpeg
from fastvid.media.index_video import Proof
from fastvid.runtime import faults
from fastvid.runtime.names import decode_name, encode_name
from fastvid.runtime.processes import available_cores
from fastvid.runtime.values import things
from fastvid.sharding.encode.profiles import get_profile
from fastvid.sharding.engines.local import open_engine
from fastvid.sharding.job.job import MAX_SECONDS, JobReport, check_amounts, commit_job, finished_ledger
from fastvid.sharding.job.ledger import PackedSample, Part, Row, ledger_row, read_blocked, rows_table
from fastvid.sharding.job.lock import lock_folder
from fastvid.sharding.job.plan import SAMPLES_PER_SHARD, JobPart, digest, file_order, plan_shards
from fastvid.sharding.job.run import Job
from fastvid.sharding.sources.sources import Source, SourceList
from fastvid.sharding.sources.tars import gather_sources
from fastvid.sharding.work.index import unpack_found
from fastvid.sharding.work.tasks import Outcome, Settings, SourceTask
from fastvid.storage import LocalStorage, Storage, open_storage
from fastvid.storage.urls import FileUrl, copy_file, is_remote, open_file

# No bytes of sources are copied, so their size does not limit a shard.
_ANY_BYTES = 2**62


class IndexFiles:
    """Indexes sources in place: a `ShardWork` whose shards are lists of files.

    `seed`: seed of the order of samples in the shards.
    """

    suffix = IN_PLACE_SUFFIXES[0]
    encoder: Mapping[str, Any] = {}
    scratch: LocalStorage | None = None

    def __init__(
        self,
        storage: Storage,
        found: SourceList,
        settings: Settings,
        *,
        seed: int,
        samples_per_shard: int,
        shards: Sequence[Sequence[Source]] | None = None,
    ) -> None:
        self._storage, self._seed = storage, seed
        self.blocked = settings.blocked
        for source in found.sources:
            if is_remote(source.path) and FileUrl.parse(source.path).query:
                raise UsageError(
                    "a URL with a query cannot be listed in a dataset: it may be a signature, which expires",
                    file=FileUrl.parse(source.path),
                    hint="use URLs that need no signature, or credentials in the environment (s3://, gs://)",
                )
        tried = [source for source in found.sources if source.problem is None]
        self.root = common_root([source.path for source in tried]) if tried else ""
        if shards is None:
            shards = plan_shards(tried, seed=seed, samples=samples_per_shard, source_bytes=_ANY_BYTES)
        self.shards = shards
        self.stems = [shard_stem(number) for number in range(len(self.shards))]
        files = [(encode_name(s.id), s.size, s.start, s.end, s.key, s.tag) for s in tried]
        notes = [(encode_name(s.id), s.label, dict(s.columns), s.problem) for s in found.sources]
        self.identity: Mapping[str, Any] = {
            "format": ".".join(map(str, FORMAT_VERSION)),
            "profile": {"name": IN_PLACE},
            "proof": settings.proof,
            "root": encode_name(self.root),
            "sources": {"number": len(tried), "bytes": sum(s.size for s in tried), "sha256": digest(files)},
            "annotations": {"number": len(notes), "sha256": digest([notes, found.classes])},
            "order": {"seed": seed, "samples_per_shard": samples_per_shard},
        }

    def order(self, shard: int) -> Sequence[int]:
        # Clips of a file follow each other, also across shards, so that a worker reads its tables once.
        sources = self.shards[shard]
        return sorted(range(len(sources)), key=lambda slot: file_order(sources[slot], self._seed))

    def task(self, index: int, source: Source) -> SourceTask:
        parent = None if source.parent is None else encode_name(source.parent)
        return SourceTask(
            index,
            encode_name(source.id),
            source.path,
            source.key,
            size=source.size,
            start=source.start,
            end=source.end,
            tag=source.tag,
            parent=parent,
        )

    def write(self, shard: int, outcomes: Iterator[Outcome]) -> Part:
        stem, rows = self.stems[shard], list[Row]()
        packed, samples, files = list[PackedSample](), list[IndexedSample](), list[ListedFile]()
        for source, outcome in zip(self.shards[shard], outcomes, strict=True):
            rows.append(ledger_row(source, outcome, stem))
            if outcome.reason is not None:
                continue
            rows[-1]["bytes_out"] = 0  # the video stays where it is
            sample, file, row = indexed_source(source, outcome)
            samples.append(sample)
            files.append(file)
            packed.append(row)
        made = write_in_place(self._storage, stem, samples, files, (PICTURES,)) if samples else None
        faults.reach("ledger")
        return Part(stem, rows, packed, made)


def indexed_source(source: Source, outcome: Outcome) -> tuple[IndexedSample, ListedFile, PackedSample]:
    """Return the sample of a source, the file that lists it, and its row for the annotations."""
    info, records, facts = unpack_found(outcome.samples[0])
    version, name = facts["version"], encode_name(source.id)
    file = ListedFile(source.key, source.stream, source.path, version["size"], version["tag"], version["modified"])
    place = {key: facts.get(key) for key in ("parent", "start_seconds", "end_seconds")}
    meta = {
        "source_id": name,
        "source_sha256": outcome.source_sha256 or None,
        "pix_fmt": facts["pix_fmt"],
        **place,
    }
    member = TarMember(encode_name(source.path), source.key, "", 0, file.size)
    sample = IndexedSample(source.key, meta, (IndexedStream(source.stream, member, info, records),))
    row = PackedSample(name, source.key, info.num_frames, str(info.fps), info.width, info.height, **place)
    return sample, file, row


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
