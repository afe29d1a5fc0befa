"""Adds sources to a dataset: encodes them into new shards and commits a generation with the old and the new shards.

The new sources are encoded by a separate job, whose records are in a folder inside that of the ledger's parts. So the
job can be resumed like any other, and every other command sees that it is unfinished. Its shards are written next to
the old ones, under numbers that its record reserves; no generation refers to them yet. Then a generation is committed,
and the ledger is extended. Every step can be repeated: a generation with the samples is not committed twice, and a
ledger row replaces that of the same source.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from fastvid.errors import JobError, MissingDependency, UsageError
from fastvid.format import schema
from fastvid.format.dataset import change
from fastvid.format.generations import Generation, ShardRecord, read_annotations, read_generation
from fastvid.format.in_place import common_root, root_extra
from fastvid.media.ffmpeg import Limits, find_ffmpeg
from fastvid.media.index_video import Proof
from fastvid.runtime import faults
from fastvid.runtime.names import decode_name, encode_name
from fastvid.runtime.values import things
from fastvid.sharding.change.edit import ClassNames
from fastvid.sharding.encode.flow import same_streams
from fastvid.sharding.encode.profiles import Profile, Settings
from fastvid.sharding.in_place import IndexFiles
from fastvid.sharding.job import ledger
from fastvid.sharding.job.frozen import given_sources, start_work
from fastvid.sharding.job.job import MAX_SECONDS, EncodeShards, JobReport, index_settings, inherit_blocks, run
from fastvid.sharding.job.ledger import Part, Row
from fastvid.sharding.job.lock import Staging, delete_below
from fastvid.sharding.job.members import annotations_of, hide_sources, joined
from fastvid.sharding.job.plan import SAMPLES_PER_SHARD, differences
from fastvid.sharding.job.run import How, ShardWork, SourceWork
from fastvid.sharding.sources.sources import MAX_SOURCE_KEY_BYTES, Source, SourceList, assign_keys, public_path
from fastvid.sharding.sources.tables import CLASS_NUMBER, LABELS
from fastvid.sharding.sources.tars import gather_sources, is_dataset
from fastvid.storage import Storage, open_storage
from fastvid.storage.urls import is_remote, sha256_of

_LOG = logging.getLogger(__name__)


def merge_parts(storage: Storage, work: ShardWork, parts: Sequence[Part], gone: Collection[str] = ()) -> pa.Table:
    """Add the shards of a finished job to a dataset; return the ledger rows of the job's sources.

    `gone`: names of sources whose samples will be removed.
    """
    _, generation = read_generation(storage)
    samples = [sample for part in parts for sample in part.samples]
    new = [row for part in parts for row in part.rows]
    table = read_annotations(storage, generation)
    present, shown = set(table["key"].to_pylist()), table.filter(pc.invert(table["removed"]))
    # Hide samples of an earlier version of a file, also if the new version was rejected.
    ids, own = {encode_name(source.id) for source in work.found.sources}, {sample.key for sample in samples}
    # New sources are copies only of those that stay visible.
    stay = set(shown["source_id"].to_pylist()).difference(gone, ids)
    before = [row for row in ledger.read_ledger(storage)[0].to_pylist() if row["source_id"] in stay]
    keys = zip(shown["source_id"].to_pylist(), shown["key"].to_pylist(), strict=True)
    if any(key not in present for key in own) or any(name in ids and key not in own for name, key in keys):
        records = ledger.shard_records(parts, work.profile)
        note = f"add {things(len(samples), 'sample')} of {things(len({s.source_id for s in samples}), 'source')}"

        def edit(old: Generation, table: pa.Table) -> tuple[Generation, pa.Table]:
            # Read the block list again for every attempt to commit: a takedown first blocks a source, then hides its
            # samples, and does not know those that are added here.
            _, hidden = ledger.settle_rows(
                new, ledger.read_blocked(storage), before=before, drop_duplicates=work.drop_duplicates
            )
            classes, labels = number_labels(old, work.found)
            rows = annotations_of(parts, work.found, labels, hidden)
            extras = _extras(old, records, work.found)
            shards = (*old.shards, *records)
            table = joined(hide_sources(table, ids), rows).combine_chunks()
            return replace(old, shards=shards, classes=classes, note=note, extras=extras), table

        change(storage, edit)
    return _extend_ledger(storage, work, parts, stay)


def _extras(old: Generation, records: Sequence[ShardRecord], found: SourceList) -> Mapping[str, Any]:
    """Return the extras of a generation with new shards; the root of videos in place becomes one that includes all."""
    paths = [source.path for source in found.sources if source.problem is None]
    if not paths or not any(record.is_in_place for record in records):
        return old.extras
    known = [] if old.root is None else [f"{old.root}/file"]
    return {**old.extras, **root_extra(common_root([*known, *paths]))}


def number_labels(old: Generation, found: SourceList) -> tuple[tuple[str, ...], dict[str, int]]:
    """Return the class names of a generation and of new sources, and the class index of each name."""
    known = set(old.classes)
    classes = (*old.classes, *(name for name in found.classes if name not in known))
    return classes, {name: number for number, name in reversed(list(enumerate(classes)))}


def _named(found: SourceList, classes: Sequence[str]) -> SourceList:
    """Return sources whose labels are names of classes instead of their numbers, unless the classes are numbers too."""
    if not all(map(CLASS_NUMBER.fullmatch, found.classes)) or all(map(CLASS_NUMBER.fullmatch, classes)):
        return found
    known = ClassNames(classes, (), grow=False, more="name all classes with --classes")

    def named(source: Source) -> Source:
        names = [known.name(name, source.key) for name in source.class_names]
        label = None if source.label is None else names.pop(0)
        return replace(source, label=label, columns={**source.columns, **({LABELS: names} if names else {})})

    return replace(found, sources=tuple(map(named, found.sources)), classes=tuple(classes))


def _extend_ledger(storage: Storage, work: ShardWork, parts: Sequence[Part], stay: Collection[str]) -> pa.Table:
    """Write the ledger, extended by the rows of the job's sources, and return these rows.

    `stay`: names of the sources of which new ones may be copies.
    """
    made = [row for part in parts for row in part.rows]
    made += [ledger.problem_row(source, *source.problem) for source in work.found.sources if source.problem is not None]
    known, blocked = {row["source_id"] for row in made}, ledger.read_blocked(storage)
    rows: list[Row] = []

    def edit(before: list[Row]) -> list[Row]:
        nonlocal rows
        others = [row for row in before if row["source_id"] not in known]
        originals = [row for row in before if row["source_id"] in stay]
        rows, _ = ledger.settle_rows(made, blocked, before=originals, drop_duplicates=work.drop_duplicates)
        # The row of a takedown says when and why, so a refused copy does not replace it.
        gone = {row["source_id"] for row in before if ledger.is_nameless(row)}
        others += [row for row in before if row["source_id"] in known and row["source_id"] in gone]
        return [*others, *(row for row in rows if row["source_id"] not in gone)]

    ledger.edit_ledger(storage, edit)
    faults.reach("merged")
    return ledger.rows_table(rows)


_FOLDER: Final = f"{schema.LEDGER_PARTS}/add"
_FIRST: Final = "first_shard"  # field of the job's record: number of its first shard among those of the dataset
_MERGED: Final = "merged"  # field of the job's record that says that the dataset has all its shards and rows
_HASH_DIGITS: Final = 8


@dataclass(frozen=True, slots=True)
class Added:
    """The result of `add_sources`."""

    report: JobReport  # report of the job; its ledger contains only the rows of the new sources
    generation: int
    known: int
    changed: Sequence[str] = ()  # names of known files that have another size, ETag or content now
    gone: Sequence[str] = ()  # names of the videos and clips that are no longer listed, for `sync`
    new: int = 0  # number of sources that a dry run would encode, including those that changed


def add_sources(
    dataset: str,
    sources: Sequence[str] | str,
    *,
    annotations: Sequence[str] | str | None = None,
    columns: str | Mapping[str, str] | None = None,
    class_names: Sequence[str] = (),
    samples_per_shard: int = SAMPLES_PER_SHARD,
    max_seconds: float = MAX_SECONDS,
    max_bad_frames: int | str | None = None,
    seed: int = 0,
    follow_links: bool = False,
    prefix: str | None = None,
    retry_rejected: bool = False,
    sync: bool = False,
    remove_most: bool = False,
    dry_run: bool = False,
    drop_duplicates: bool = False,
    limits: Limits | None = None,
    **how: Any,
) -> Added:
    """Encode the sources that a dataset does not know yet, with its own profile, and add them.

    To a dataset of videos in place they are added in place, with its own proof; ``max_seconds`` and ``max_bad_frames``
    are then ignored.

    A source is known by its name, also if it was rejected or its samples were removed, so removed samples are not added
    again. One whose file has another size or ETag than the ledger says is encoded again, under a new key, and the
    samples of the earlier version are removed; those in place are left to ``fastvid index``. A local file of the same
    size with another time of change is hashed to see whether it is another one. New class names are appended to the
    existing ones.

    `max_bad_frames`: the most frames that may be left out of a damaged video, as for
    `fastvid.sharding.job.job.run_job`. `seed`: seed of the order of samples in the new shards. `drop_duplicates`:
    whether to hide samples of sources with the same bytes as another one: one that the dataset has already, or the
    first of the new ones by id. `sync`: remove the samples of videos below `sources` that are no longer there, or
    that the annotations no longer name, and of such clips; `remove_most`: also if these are most of the dataset's.
    `dry_run`: change nothing, and count what would be done. `how`: ``engine``, ``ray_address``, ``workers``, ``part``,
    ``allow_encoder_change`` and ``reject_unreadable``, as for `fastvid.shard`.
    """
    chosen = How(**how, command="add")
    chosen.check(samples_per_shard, max_seconds=max_seconds)
    storage = open_storage(dataset)
    scratch = open_storage(f"{storage.url}/{_FOLDER}")
    staging = Staging(scratch)
    bounds = {"max_seconds": max_seconds, "max_bad_frames": None if max_bad_frames is None else str(max_bad_frames)}
    settings_of = partial(_settings, limits or Limits(), bounds, changes=chosen.allow_encoder_change)
    looking: dict[str, Any] = {"columns": columns, "class_names": class_names, "follow_links": follow_links}
    packing: dict[str, Any] = {"seed": seed, "samples_per_shard": samples_per_shard}
    packing["drop_duplicates"] = drop_duplicates
    given = given_sources(sources, annotations, **looking, prefix=prefix, retry_rejected=retry_rejected)
    known = 0
    changed: list[str] = []
    gone: list[str] = []

    def look(generation: Generation, settings: Settings) -> SourceList:
        nonlocal known
        every = gather_sources(sources, annotations, **looking, rate=settings.profile.fps)
        has_rows = annotations or any(source.member for source in every.sources)
        if has_rows and not class_names and not any(map(is_dataset, given["sources"])):
            every = _named(every, generation.classes)
        if prefix is not None:
            every = replace(every, sources=assign_keys([source.below(prefix) for source in every.sources]))
        if not dry_run:
            ledger.keep_ledger(storage, generation)
        before = {row["source_id"]: row for row in ledger.ledger_rows(storage, generation)}
        table = read_annotations(storage, generation)
        visible = pc.invert(table["removed"])
        listed = pa.array([shard.is_in_place for shard in generation.shards for _ in range(shard.samples)], pa.bool_())
        which = (visible, pc.and_(visible, listed))
        shown, in_place = (set(table.filter(rows)["source_id"].to_pylist()) for rows in which)
        gone.extend(_left(before, every, shown, given["sources"]) if sync else ())
        if sync and not remove_most:
            _check_share(gone, shown)
        others, touched = _changed(before, every, shown, in_place)
        changed.extend(others)
        if touched and not dry_run:
            ledger.edit_ledger(storage, lambda rows: [row | touched.get(row["source_id"], {}) for row in rows])
        again = set(changed) - in_place
        if retry_rejected:
            again.update(name for name, row in before.items() if row["reason"] is not None)
        found = _new_sources(storage, generation, every, before, again)
        known = len(every.sources) - len(found.sources)
        return found

    def prepare() -> Any:
        generation = read_generation(storage)[1]
        settings = settings_of(generation)
        # An addition that 0.2 began has its shards in this folder, and is made anew. Not for a part: what is there may
        # belong to other parts that have not written ledger rows yet.
        begun = staging.job()
        if chosen.mine is None and begun is not None and (_MERGED in begun or _FIRST not in begun):
            delete_below(storage, _FOLDER)

        def make(found: SourceList) -> ShardWork | JobReport:
            if not found.sources and not found.shards:
                return JobReport(storage.url, schema.LEDGER_SCHEMA.empty_table(), found.ignored)
            kind: type[SourceWork] = EncodeShards if settings.proof is None else IndexFiles
            work = kind(storage, found, settings, **packing)
            work.classes, work.labels = number_labels(generation, found)
            work.generation = generation.number + 1
            _reserve(work, scratch, (staging.job() or {}).get(_FIRST))
            return work

        return start_work(scratch, given, chosen.mine, partial(look, generation, settings), make)

    def commit(work: ShardWork, parts: Sequence[Part], _command: str) -> pa.Table:
        inherit_blocks(storage, sources)
        rows = merge_parts(storage, work, parts, gone)
        staging.begin({**work.identity, _MERGED: True}, replace=True)
        return rows

    generation = read_generation(storage)[1]  # without a dataset nothing is written
    if dry_run:
        found = look(generation, settings_of(generation))
        report = JobReport(storage.url, schema.LEDGER_SCHEMA.empty_table(), found.ignored)
        return Added(report, generation.number, known, changed, gone, len(found.sources))
    report = run(storage, chosen, prepare, commit)
    if gone and chosen.mine is None:
        _remove_left(storage, gone)
    return Added(report, read_generation(storage)[1].number, known, changed, gone)


def _left(known: Mapping[str, Row], every: SourceList, shown: Collection[str], roots: Sequence[str]) -> list[str]:
    """Return the names of known sources that a new listing lacks.

    These are clips of listed videos, and videos below `roots`. `known`: ledger rows by source. `every`: the listing.
    `shown`: names of sources with visible samples.
    """
    listed = {encode_name(source.id) for source in every.sources}
    real = cache(os.path.realpath)
    paths = {_place(source.path, real) for source in every.sources}
    videos = set(map(ledger.whole_name, listed))
    folders = tuple(_place(f"{public_path(root).rstrip('/')}/", real) for root in roots)

    def has_left(name: str, row: Row) -> bool:
        if ledger.whole_name(name) in videos:
            return name != ledger.whole_name(name) and name not in listed
        place = _place(decode_name(row["path"]), real)
        return name in shown and place.startswith(folders) and place not in paths

    return sorted(name for name, row in known.items() if has_left(name, row))


def _place(path: str, real: Callable[[str], str] = os.path.realpath) -> str:
    """Return the path of a file without links in that of its folder, which may be reached by several, or its URL."""
    folder, name = os.path.split(path)
    return public_path(path) if is_remote(path) else os.path.join(real(folder), name)


def _is_at(row: Row, source: Source) -> bool:
    """Return whether a ledger row was made from the file of a source, or from what was there before."""
    path = decode_name(row["path"])
    return path == public_path(source.path) or _place(path) == _place(source.path)


def _check_share(gone: Collection[str], shown: Collection[str]) -> None:
    """Refuse to remove most of the videos of a dataset, because the list is more likely to be wrong."""
    videos, left = (set(map(ledger.whole_name, names)) for names in (shown, set(shown).difference(gone)))
    if 2 * len(left) < len(videos):
        raise UsageError(
            f"{len(videos) - len(left)} of {things(len(videos), 'video')} of the dataset left the list",
            hint="list them with --dry-run --remove-most; to remove them, use --remove-most alone",
        )


def _remove_left(storage: Storage, names: Sequence[str]) -> None:
    """Hide the samples of sources in a new generation, and delete their ledger rows."""
    note, gone = f"remove {things(len(names), 'source')} that left the list", set(names)
    change(storage, lambda old, table: (replace(old, note=note), hide_sources(table, names)))
    ledger.edit_ledger(storage, lambda rows: [row for row in rows if row["source_id"] not in gone])


def _changed(
    known: Mapping[str, Row], every: SourceList, shown: Collection[str], in_place: Collection[str]
) -> tuple[list[str], dict[str, Row]]:
    """Return the names of sources whose file changed, and corrected ledger rows of files that only seemed to change.

    Sources whose samples were all removed are skipped. A local file of the same size with another modification time is
    hashed, unless it is one of `in_place`; if its bytes are the same, its ledger row gets the new time.
    """
    names, touched, digests = list[str](), dict[str, Row](), dict[str, str]()
    for source in every.sources:
        name = encode_name(source.id)
        row = known.get(name)
        if row is None or source.member is not None or source.inside or source.problem is not None:
            continue
        is_there = name in shown or row["status"] == "rejected"
        if not is_there or not _is_at(row, source) or source.is_version(row["bytes_in"], row["source_tag"]):
            continue
        names.append(name)
        has_hash = name not in in_place and source.etag is None and row["source_sha256"] is not None
        if has_hash and source.is_version(row["bytes_in"], None):
            if not digests:
                _LOG.info("hashing files that have the same size but another time of change than before")
            if source.path not in digests:
                folder, base = os.path.split(source.path)
                digests[source.path] = sha256_of(open_storage(folder), base)
            if digests[source.path] == row["source_sha256"]:
                touched[names.pop()] = {"source_tag": source.tag}
    return names, touched


def _settings(limits: Limits, bounds: Mapping[str, Any], generation: Generation, *, changes: bool) -> Settings:
    """Return the settings of the newest shard, with an ffmpeg that may encode its profile.

    `bounds`: other fields of the settings. `changes`: whether ffmpeg may be another build than before.
    """
    if not generation.shards:
        raise UsageError("the dataset has no shard to take the profile from", hint="make a new dataset")
    shard, build = generation.shards[-1], find_ffmpeg()
    if schema.SIGNALS in generation.extras or not {schema.PICTURES, schema.FLOW}.issuperset(generation.streams):
        raise UsageError(
            "single videos cannot be added to a dataset with cameras or signals",
            hint="make a dataset of the new episodes, and join the two datasets with `fastvid merge`",
        )
    if shard.is_in_place:
        return index_settings(limits, shard.profile.get("proof", Proof.SAMPLE), hdr=shard.profile.get("hdr"))
    try:
        profile = Profile(**shard.profile)
    except TypeError as error:
        raise UsageError(
            f"this fastvid cannot encode the dataset's profile {shard.profile.get('name', 'unknown')!r}",
            hint="make a dataset of these sources, and join the two datasets with `fastvid merge`",
        ) from error
    build = profile.completed(build)
    if not profile.runs_on(build):
        raise MissingDependency(f"{build.path} has no encoder {profile.encoder!r}", hint="name one in FASTVID_FFMPEG")
    # The record of a shard with copied videos that was restored from its tar contains no build.
    before = shard.encoder or (build.identity() if profile.copies else {})
    changed = next(differences(before, build.identity()), None)
    if changed is not None and not changes:
        name, old, new = changed
        raise JobError(
            f"the dataset was encoded by another build of ffmpeg: {name} was {old!r} and is {new!r}",
            hint="name that build in FASTVID_FFMPEG, or allow this one with --allow-encoder-change; each shard records"
            " its build",
        )
    streams = same_streams(generation.extras, allow_encoder_change=changes)
    return Settings(profile, build, limits, streams=streams, **bounds)


def _reserve(work: ShardWork, records: Storage, first: int | None) -> None:
    """Give an addition numbers for its shards that no file has. `first`: the first, if it has begun already."""
    if first is None:
        names = (re.match(r"data-(\d+)", name) for name in work.storage.list("data-"))
        first = max((int(found[1]) for found in names if found), default=-1) + 1
    work.records, work.identity = records, {**work.identity, _FIRST: first}
    work.stems = [schema.shard_stem(first + number) for number in range(len(work.shards))]


def _new_sources(
    storage: Storage, generation: Generation, every: SourceList, known: Mapping[str, Row], again: Collection[str]
) -> SourceList:
    """Return the sources that the dataset does not know, and known ones of `again`, with unused keys."""
    # An unsplit file may have another name this time, if another folder is given as the source.
    paths = {row["path"]: row for name, row in known.items() if "#" not in name}
    new = []
    for source in every.sources:
        name = encode_name(source.id)
        row = known.get(name)
        if row is None and source.start is None and source.end is None:
            row = paths.get(encode_name(source.path))
        if row is None or row["source_id"] in again:
            new.append(source)
            continue
        is_other = row["path"] != name and (row["bytes_in"] or 0) != source.size and not _is_at(row, source)
        if row["reason"] is None and is_other:
            raise UsageError(
                f"source {name!r} is in the dataset already, from another file",
                file=row["path"],
                hint="use --prefix NAME to prepend a name to those of all new sources",
            )
    used = {name for source in new for name in source.class_names}
    classes = tuple(name for name in every.classes if name in used or not generation.classes)
    return SourceList(_free_keys(storage, generation, new, known), classes, every.ignored)


def _free_keys(
    storage: Storage, generation: Generation, sources: Sequence[Source], known: Mapping[str, Row]
) -> tuple[Source, ...]:
    """Return the sources with free keys: no key that is or was in use, and no key that is a folder of such a key.

    A key that is not free gets a hash of the source's id as its end.
    """
    table = read_annotations(storage, generation)
    new = {encode_name(source.id) for source in sources}
    rows = zip(*(table[name].to_pylist() for name in ("key", "source_id", "removed")), strict=True)
    # Not the keys of the new sources themselves, which an interrupted addition may have committed already.
    taken = {key for key, name, removed in rows if name not in new or name in known or removed}
    taken |= {row["key"] for row in known.values() if row["key"] is not None}
    folders = {folder for key in taken for folder in _folders(key)}

    def free(key: str) -> bool:
        return key not in taken and key not in folders and taken.isdisjoint(_folders(key))

    renamed = []
    for source in sources:
        key, digits = source.key, _HASH_DIGITS
        while not free(key):
            digest = hashlib.blake2b(encode_name(source.id).encode()).hexdigest()[:digits]
            key = f"{source.key[: MAX_SOURCE_KEY_BYTES - digits - 1].rstrip('/').replace('/', '_')}-{digest}"
            digits += 1
        renamed.append(replace(source, key=key))
    return tuple(renamed)


def _folders(key: str) -> Iterator[str]:
    return (key[:cut] for cut, letter in enumerate(key) if letter == "/")
