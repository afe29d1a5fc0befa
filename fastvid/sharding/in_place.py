"""Videos in place: lists and indexes video files where they are, and indexes again those that changed or were moved.

No video is copied or encoded.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import groupby
from typing import Any, Final

import pyarrow as pa

from fastvid.errors import FormatError, StorageError, UsageError
from fastvid.format.annotations import fact_columns
from fastvid.format.dataset import change, open_shard
from fastvid.format.generations import Generation, ShardRecord, conflict, read_annotations, read_generation, read_head
from fastvid.format.in_place import ListedFile, Root, common_root, parse_root, read_files, root_extra
from fastvid.format.schema import FACT_FIELDS, IN_PLACE, IN_PLACE_SUFFIXES, LEROBOT, StreamFlag, later_stem
from fastvid.format.shard import RESTORE, Shard
from fastvid.format.tar import TarDigest, TarMember
from fastvid.format.writing import IndexedSample, IndexedStream, ListedSample, write_in_place
from fastvid.media.describe import KEEP, TONE_MAP
from fastvid.media.ffmpeg import Limits
from fastvid.media.index_video import Proof
from fastvid.runtime.names import decode_name, encode_name, is_video
from fastvid.runtime.processes import available_cores
from fastvid.runtime.values import sha256, things
from fastvid.sharding.encode.profiles import Settings
from fastvid.sharding.job.frozen import given_sources, starting
from fastvid.sharding.job.job import JobReport, index_settings, run
from fastvid.sharding.job.ledger import PackedSample, Part, Row, follow_shards, read_blocked
from fastvid.sharding.job.members import with_column
from fastvid.sharding.job.plan import SAMPLES_PER_SHARD, list_identity
from fastvid.sharding.job.run import How, Job, ShardWork, SourceWork, View
from fastvid.sharding.sources.sources import Source, SourceList, public_path
from fastvid.sharding.sources.tars import is_dataset, listed_source
from fastvid.sharding.work.index import indexed_meta, unpack_found
from fastvid.sharding.work.tasks import Outcome
from fastvid.storage import LocalStorage, Storage, open_storage
from fastvid.storage.urls import FileUrl, copy_file, is_remote, open_file


class IndexFiles(SourceWork):
    """Indexes sources in place; a shard is a list of files.

    `given`: the paths and URLs that the user named as sources. `packing`: see `SourceWork`.
    """

    suffix = IN_PLACE_SUFFIXES[0]
    plan_options: Mapping[str, int] = {"source_bytes": 2**62}  # nothing is copied, so bytes do not limit a shard

    def __init__(
        self, storage: Storage, found: SourceList, settings: Settings, given: Sequence[str] = (), **packing: Any
    ) -> None:
        for source in found.sources:
            if is_remote(source.path) and FileUrl.parse(source.path).query:
                raise UsageError(
                    "a URL with a query cannot be listed in a dataset: it may be a signature, which expires",
                    file=FileUrl.parse(source.path),
                    hint="use URLs that need no signature, or credentials in the environment (s3://, gs://)",
                )
        super().__init__(storage, found, settings, **packing)
        self.settings = replace(settings, hashed=self.drop_duplicates)
        root = decode_name(found.listed["root"]) if found.listed else ""
        ends = [end((source.path for source in found.tried), default="") for end in (min, max)]
        if ends[0] and not found.listed:
            # Folders as they were named, because these are moved, not the deepest ones with a video.
            folders = (one.rstrip("/") for one in given if os.path.isdir(one) or not is_video(public_path(one)))
            root = common_root([*ends, *(f"{one}/file" for one in folders)])
        files = ((encode_name(s.id), s.size, s.start, s.end, s.key, s.etag) for s in found.tried)
        self.identity = {
            **list_identity(found, files, **self.packing),
            "profile": {"name": IN_PLACE},
            "proof": settings.proof,
            "root": encode_name(root),
        }
        self.profile = {"name": IN_PLACE, "proof": settings.proof}
        if settings.profile.hdr != TONE_MAP:
            self.profile["hdr"] = self.identity["hdr"] = settings.profile.hdr
        self.extras = root_extra(root)
        self.workers = _waiting_workers(found.sources)

    def row(self, source: Source, outcome: Outcome, stem: str) -> Row:
        """See `ShardWork`: the video stays where it is."""
        return super().row(source, outcome, stem) | ({"bytes_out": 0} if outcome.reason is None else {})

    def made(self, views: Sequence[View]) -> Iterator[tuple[PackedSample, ListedSample]]:
        """See `SourceWork`."""
        streams, files = list[IndexedStream](), list[ListedFile]()
        for source, outcome in views:
            info, records = unpack_found(outcome.samples[0])
            version = outcome.samples[0].meta["version"]
            place = source.key, source.stream, source.path, version["size"], version["tag"], version["modified"]
            files.append(ListedFile(*place))
            member = TarMember(encode_name(source.path), source.key, "", 0, version["size"])
            streams.append(IndexedStream(source.stream, member, info, records))
        source, outcome = views[0]
        packed = PackedSample.of(source, outcome.samples[0])
        clip = {key: getattr(packed, key) for key in ("parent", "start_seconds", "end_seconds")}
        meta = indexed_meta(source, outcome) | clip
        yield packed, ListedSample(IndexedSample(source.key, meta, tuple(streams)), tuple(files))

    def pack(self, shard: int, samples: Iterator[ListedSample]) -> TarDigest | None:
        """See `SourceWork`."""
        made = list(samples)
        return write_in_place(self.storage, self.stems[shard], made, self.streams) if made else None


# Names of new shards contain the revision times this number, so that they differ from those of `fastvid compact`, which
# uses the revision alone, plus digits of their SHA-256: two runs from one revision may index other versions of a file.
_NAMES: Final = 1_000_000
_PROBE: Final = "index-again.tmp"


@dataclass(frozen=True, slots=True)
class Reindexed:
    """The result of `reindex`."""

    generation: int
    shards: Mapping[str, str | None]  # the new name of each shard; None if all its samples had been removed
    changed: int


def reindex(
    url: str,
    *,
    root: str | None = None,
    shards: Collection[str] | None = None,
    workers: int | None = None,
) -> Reindexed:
    """Index videos in place again, and commit a generation with their new versions, numbers of frames and sizes.

    Keys, labels and other annotations are kept, and removed samples, whose files may be gone, are dropped. Without
    arguments, those shards are indexed that list a changed file, whose packet tables are damaged or missing, or that
    fastvid 0.2 wrote, because it did not store how pictures are rotated and when they are shown.
    """
    storage = open_storage(url)
    revision, (_, generation) = read_head(storage).revision, read_generation(storage)
    listed = [shard for shard in generation.shards if shard.is_in_place]
    if root is not None and not listed:
        raise UsageError("the dataset lists no videos in place, so they have no root", file=url)
    place = parse_root(generation.root or "", root)
    found = {shard.name: _open(storage, generation, generation.shards.index(shard)) for shard in listed}
    shown = dict(_shown(storage, generation))
    changed = {name: _changed([file for _, _, files in rows for file in files], place) for name, rows in shown.items()}
    asked = {shard.name for shard in listed if root is not None} | set(shards or ())
    asked |= {name for name, (_, is_good) in found.items() if changed[name] or not is_good}
    chosen = [shard for shard in listed if shard.name in asked]
    count = sum(changed.values())
    if not chosen:
        return Reindexed(generation.number, {}, count)
    _check_writable(storage)
    work = {one.name: _sources(storage, generation, one, found[one.name][0], shown[one.name], place) for one in chosen}
    made, parts = dict[str, ShardRecord | None](dict.fromkeys(shard.name for shard in chosen)), list[Part]()
    for proof, same in groupby(sorted(chosen, key=_proof), _proof):  # of a merged dataset there may be several
        with tempfile.TemporaryDirectory(prefix="fastvid-") as folder:
            scratch, group = LocalStorage(folder), list(same)
            indexed = _index(scratch, proof, [work[shard.name] for shard in group], workers, read_blocked(storage))
            for shard, part in zip(group, indexed, strict=True):
                if part.digest is None:  # no video was rejected, so it has none
                    continue
                new = part.digest
                name = later_stem(shard.name, _NAMES * revision + int(new.sha256, 16) % _NAMES)
                made[shard.name] = replace(shard, name=name, bytes=new.bytes, sha256=new.sha256, samples=new.samples)
                for suffix in shard.suffixes:
                    copy_file(scratch, f"{part.stem}.{suffix}", storage, f"{name}.{suffix}")
            parts += indexed
    samples = {sample.key: sample for part in parts for sample in part.samples}

    def edit(current: Generation, table: pa.Table) -> tuple[Generation, pa.Table]:
        if not made.keys() <= {old.name for old in current.shards}:
            raise conflict(storage)
        records = tuple(new for old in current.shards if (new := made.get(old.name, old)) is not None)
        names = (old.name for old in current.shards for _ in range(old.samples))
        rows = zip(names, table["key"].to_pylist(), strict=True)
        kept = table.filter([name not in made or key in samples for name, key in rows])
        extras = current.extras if root is None else {**current.extras, **root_extra(place.current)}
        note = f"index {things(len(made), 'shard')} of videos in place again"
        return replace(current, shards=records, extras=extras, note=note), _with_facts(kept, samples)

    number = change(storage, edit).number
    follow_shards(storage)
    return Reindexed(number, {old: None if new is None else new.name for old, new in made.items()}, count)


def _check_writable(storage: Storage) -> None:
    """Raise a StorageError if the dataset's folder cannot be written; called before the slow indexing."""
    try:
        storage.write(_PROBE, b"")
        storage.delete(_PROBE)
    except StorageError as error:
        raise StorageError(
            f"the dataset cannot be changed where it is: {error.message}",
            file=storage.url,
            hint="index it again into a new folder: `fastvid index DIR --out NEW`",
        ) from error


def _open(storage: Storage, generation: Generation, index: int) -> tuple[Shard | None, bool]:
    """Open a shard whose packet tables may be damaged; return it, None if they are missing, and whether they are whole.

    The list of files is enough to make them again.
    """
    if not storage.exists(f"{generation.shards[index].name}.pkt"):
        return None, False
    try:
        shard = open_shard(storage, generation, index)
        shard.check()
    except FormatError:
        try:
            return open_shard(storage, generation, index, whole=False), False
        except FormatError:  # what all streams share is damaged
            return None, False
    return shard, shard.is_described


_Shown = tuple[int, dict[str, Any], Sequence[ListedFile]]
"""A sample that was not removed: its row in the shard, its annotations, and the file of each stream."""


def _shown(storage: Storage, generation: Generation) -> Iterator[tuple[str, list[_Shown]]]:
    """Yield the name of each shard of videos in place, and its samples; the files of others may be gone."""
    table, start, streams = read_annotations(storage, generation), 0, len(generation.streams)
    for shard in generation.shards:
        rows, start = table.slice(start, shard.samples), start + shard.samples
        if shard.is_in_place:
            data = storage.read(shard.data)
            if sha256(data) != shard.sha256:
                raise FormatError("list of files is not the one that was indexed", file=shard.data, hint=RESTORE)
            files = read_files(data, file=shard.data)
            every = ((at, row, files[at * streams :][:streams]) for at, row in enumerate(rows.to_pylist()))
            yield shard.name, [one for one in every if not one[1]["removed"]]


def _changed(files: Sequence[ListedFile], place: Root) -> int:
    """Return how many files changed since they were indexed. `place`: the folder where they are."""
    count = 0
    for file, version in {listed.file: listed.version for listed in files}.items():
        storage, name = open_file(place.locate(file))
        found = storage.version(name)
        if found is None and place.current != place.listed:
            hint = f"give what was {place.listed}, and remove samples whose files are gone with `fastvid remove`"
            raise UsageError("video is not below the new root", file=place.locate(file), hint=hint)
        count += found is None or not found.same(version)
    return count


def _sources(
    storage: Storage,
    generation: Generation,
    record: ShardRecord,
    shard: Shard | None,
    rows: Sequence[_Shown],
    place: Root,
) -> list[Source]:
    """Return the samples of a shard as sources. `shard`: None if it is not known which are parts of their files."""
    if len(generation.streams) > 1 or record.signals:
        raise UsageError(
            "a dataset with cameras or signals is not indexed again",
            file=storage.url,
            hint="index its source again into a new folder with `fastvid index`",
        )
    found = []
    for at, row, (file,) in rows:
        # Only an episode of LeRobot can be a part of a file whose seconds are not in the annotations.
        is_part = LEROBOT in generation.extras if shard is None else bool(shard.info(at).flags & StreamFlag.PART)
        source = Source(decode_name(row["source_id"]), "", key=row["key"])
        source = listed_source(row, source, file, place, is_part=is_part)
        found.append(replace(source, size=0, tag=None))  # accept the file even if it changed
    return found


def _proof(shard: ShardRecord) -> str:
    """Return how much of its videos was proven."""
    return str(shard.profile.get("proof", Proof.SAMPLE))


def _index(
    scratch: LocalStorage,
    proof: str,
    work: Sequence[Sequence[Source]],
    workers: int | None,
    blocked: tuple[str, ...],
) -> list[Part]:
    # Keep high dynamic range: these videos were accepted before, by fastvid 0.2 always with their values as they are.
    settings = index_settings(None, proof, hdr=KEEP)
    found = SourceList(tuple(source for sources in work for source in sources), (), {})
    files = IndexFiles(scratch, found, settings, samples_per_shard=1, shards=work)
    parts = Job(files, How(workers=workers)).run(blocked=blocked)
    for row in (row for part in parts for row in part.rows):
        if row["status"] != "packed":
            raise FormatError(
                f"video can no longer be indexed: {row['message']}",
                file=row["path"],
                hint="restore the file, or remove its samples with `fastvid remove`",
            )
    return parts


def _with_facts(table: pa.Table, samples: Mapping[str, PackedSample]) -> pa.Table:
    """Return annotations with the new facts (frames, rate, size, duration) of samples that were indexed again."""
    facts = {
        key: fact_columns(sample.num_frames, Fraction(sample.fps), sample.width, sample.height)
        for key, sample in samples.items()
    }
    keys = table["key"].to_pylist()
    for name in ("num_frames", *FACT_FIELDS):
        values = [facts.get(key, {}).get(name, old) for key, old in zip(keys, table[name].to_pylist(), strict=True)]
        table = with_column(table, name, values)
    return table


def index_videos(
    sources: Sequence[str | os.PathLike[str]] | str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    annotations: Sequence[str] | str | None = None,
    columns: str | Mapping[str, str] | None = None,
    class_names: Sequence[str] = (),
    follow_links: bool = False,
    proof: str = Proof.SAMPLE,
    hdr: str = TONE_MAP,
    samples_per_shard: int = SAMPLES_PER_SHARD,
    seed: int = 0,
    limits: Limits | None = None,
    **how: Any,
) -> JobReport:
    """Make a dataset of videos where they are, as ``fastvid index SOURCE --out DIR`` does.

    Only lists, indexes and annotations are written. Run again with the same arguments after an interruption, it
    resumes; `how` and ``limits`` may differ. Arguments that are not listed are those of `fastvid.shard`.

    Args:
        proof: How much of a video is compared with an independent decode: "none", "sample" or "all".
        hdr: "tonemap" rejects videos of high dynamic range, which only encoding tone-maps; "keep" delivers their values
            as they are.
        how: ``engine``, ``ray_address``, ``workers``, ``part`` and ``reject_unreadable``, as for `fastvid.shard`.
    """
    chosen = How(**how, command="index")
    chosen.check(samples_per_shard)
    settings, storage = index_settings(limits, proof, hdr=hdr), open_storage(out)
    looking: dict[str, Any] = {"columns": columns, "class_names": class_names, "follow_links": follow_links}

    told = given_sources(sources, annotations)

    def make(found: SourceList) -> ShardWork:
        inside = next((source for source in found.sources if source.member is not None), None)
        if inside is not None:
            hint = "encode them with `fastvid shard`" if inside.inside else "name the tars alone"
            raise UsageError("videos inside other files are not indexed in place", file=inside.path, hint=hint)
        given = [path for path in told["sources"] if not is_dataset(path)]
        return IndexFiles(storage, found, settings, given, seed=seed, samples_per_shard=samples_per_shard)

    return run(storage, chosen, starting(storage, sources, annotations, looking, chosen.mine, make))


def _waiting_workers(sources: Sequence[Source]) -> int | None:
    """Return how many workers index files: more than cores if they are remote; None for the usual number."""
    if not any(is_remote(source.path) for source in sources):
        return None
    # For a remote file a worker waits for five or more responses, one after another. Each worker takes about 100 MB.
    cores = available_cores()
    return cores + min(3 * cores, 32)
