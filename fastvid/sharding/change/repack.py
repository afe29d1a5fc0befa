"""Writes shards from samples of existing shards: their members are packed again, and nothing is encoded.

A shard to write is given as pieces: which samples of which old shards, and what changes in them (`Renaming`). Subsets,
merges and compacted shards are made this way.

`compact_shards` rewrites shards without their removed samples. The new shards lie next to the old ones, and a
generation with them is committed; the old ones stay for jobs that have pinned an older generation, until
`fastvid.sharding.change.history.collect_garbage` deletes them.

`make_dataset` makes a new dataset from such pieces: shards are linked, copied, or packed again. A killed run
resumes: its folder records what it makes and which shards are finished, and the commit record is the last thing
written, so half a dataset cannot be opened.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate, groupby
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from fastvid.errors import FormatError, UsageError
from fastvid.format.annotations import KeptSignals, join_signals
from fastvid.format.dataset import open_shard
from fastvid.format.generations import Generation, ShardRecord, commit_generation, history, read_annotations, read_head
from fastvid.format.schema import FOREIGN, later_stem, read_facts
from fastvid.format.tar import TarDigest, read_members, to_json
from fastvid.format.writing import ListedSample, listed_samples, write_in_place, write_shard
from fastvid.runtime import faults
from fastvid.runtime.values import sha256, things
from fastvid.sharding.change.history import sweep
from fastvid.sharding.job import ledger
from fastvid.sharding.job.job import dataset_id, run
from fastvid.sharding.job.ledger import Part, Row
from fastvid.sharding.job.lock import short_scratch
from fastvid.sharding.job.members import annotate_members, dataset_record, hide_sources, is_current, with_record
from fastvid.sharding.job.run import How, ShardWork
from fastvid.sharding.sources.sources import SourceList
from fastvid.sharding.work.tasks import Outcome
from fastvid.storage import Storage, open_storage
from fastvid.storage.urls import link_or_copy

Members = tuple[str, Mapping[str, bytes]]
"""Key of a sample, and its members by suffix."""


@dataclass(frozen=True, slots=True)
class Renaming:
    """What changes in samples when they are packed again: a prefix of names, and the numbers of labels."""

    prefix: str = ""
    labels: Mapping[int, int] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.prefix or self.labels)

    def apply(self, key: str, members: Mapping[str, bytes]) -> Members:
        """Return key and members of a sample after the changes; its annotations are written from its row."""
        facts = {"json": to_json(self.changed(json.loads(members["json"])))} if "json" in members else {}
        return f"{self.prefix}{key}", {**members, **facts}

    def changed(self, facts: Mapping[str, Any]) -> dict[str, Any]:
        """Return a sample's facts, or its row of annotations, after the changes."""
        names = {name: facts[name] for name in ("key", "source_id", "parent") if isinstance(facts.get(name), str)}
        label = facts.get("label")
        labels = {"label": self.labels.get(label, label)} if type(label) is int else {}
        return {**facts, **{name: f"{self.prefix}{value}" for name, value in names.items()}, **labels}


@dataclass(frozen=True, slots=True)
class Piece:
    """Samples of one shard of a dataset."""

    storage: Storage
    generation: Generation
    number: int  # number of the shard in the generation
    keep: npt.NDArray[np.bool_]  # whether each sample is taken, bool [samples]
    renaming: Renaming = field(default_factory=Renaming)

    @property
    def shard(self) -> ShardRecord:
        """The record of the shard."""
        return self.generation.shards[self.number]

    @property
    def samples(self) -> int:
        """Number of samples that are taken."""
        return int(self.keep.sum())

    @property
    def is_whole(self) -> bool:
        """Whether the piece is a whole shard without changes, so that the old file can be used."""
        return bool(self.keep.all()) and not self.renaming

    @property
    def start(self) -> int:
        """Row of the shard's first sample in the annotations of the generation."""
        return sum(shard.samples for shard in self.generation.shards[: self.number])

    def rows(self, table: pa.Table) -> pa.Table:
        """Return the annotations of the samples that are taken; `table`: all annotations of the generation."""
        return table.slice(self.start, self.shard.samples).filter(pa.array(self.keep))

    def signals(self) -> KeptSignals:
        """Return the signals of the samples that are taken."""
        facts = read_facts(self.storage, self.shard.name, ["stream", "num_frames"])
        frames = facts.filter(pc.equal(facts["stream"], self.generation.streams[0]))["num_frames"]
        return KeptSignals(self.storage, self.shard, frames.to_pylist(), self.keep)

    def listed(self) -> Iterator[ListedSample]:
        """Yield the samples that are taken from a shard of videos in place."""
        samples = listed_samples(open_shard(self.storage, self.generation, self.number))
        for sample, stays in zip(samples, self.keep.tolist(), strict=True):
            if stays:
                name = f"{self.renaming.prefix}{sample.indexed.key}"
                yield sample.renamed(name, self.renaming.changed) if self.renaming else sample

    def packed(self, rows: Iterator[Mapping[str, Any]], classes: Sequence[str]) -> Iterator[Members]:
        """Yield key and members of the samples that are taken from a tar, with the annotations in `rows`."""
        view = map_checked(self.storage, self.shard)
        for key, members in kept_samples(view, self.keep, self.shard):
            name, renamed = self.renaming.apply(key, members)
            yield name, annotate_members(renamed, next(rows), classes)
        del view
        if self.storage.copies:
            self.storage.discard(self.shard.data)


def pieces_of(
    storage: Storage, generation: Generation, keep: npt.NDArray[np.bool_], renaming: Renaming = Renaming()
) -> list[Piece]:
    """Return the samples of a dataset for which `keep`, bool [N], is true, as one piece for each shard."""
    starts = np.cumsum([shard.samples for shard in generation.shards])[:-1]
    masks = zip(range(len(generation.shards)), np.split(keep, starts), strict=False)
    return [Piece(storage, generation, number, mask, renaming) for number, mask in masks]


def repack(storage: Storage, name: str, pieces: Sequence[Piece], made: Generation, rows: pa.Table) -> ShardRecord:
    """Write a shard with the samples of some pieces, and return its record.

    `made`: the generation that the shard is for; the tar contains its number, streams, classes and extras. `rows`: the
    annotations of the samples.
    """
    first = pieces[0].shard
    if first.is_in_place:
        listed = [sample for piece in pieces for sample in piece.listed()]
        digest = write_in_place(storage, name, listed, made.streams)
    else:
        record = dataset_record(made, first.profile, first.encoder, rows)
        left = iter(rows.to_pylist())
        samples = (sample for piece in pieces for sample in piece.packed(left, made.classes))
        with short_scratch(storage) as scratch:
            digest = write_shard(storage, name, with_record(samples, record), streams=made.streams, scratch=scratch)
    signals = ""
    if any(piece.shard.signals for piece in pieces):
        signals = join_signals(storage, name, [piece.signals() for piece in pieces])
    return replace(first, name=name, bytes=digest.bytes, sha256=digest.sha256, samples=digest.samples, signals=signals)


def map_checked(storage: Storage, shard: ShardRecord) -> memoryview:
    """Return a shard's tar after checking its checksum."""
    view = storage.map(f"{shard.name}.tar")
    if sha256(view) != shard.sha256:
        raise FormatError(
            "tar differs from its checksum; copying it would hide the damage",
            shard=shard.name,
            hint="run `fastvid verify` to see what is damaged",
        )
    return view


def kept_samples(
    view: memoryview, keep: npt.NDArray[np.bool_], shard: ShardRecord
) -> Iterator[tuple[str, Mapping[str, bytes]]]:
    """Yield key and members, by suffix, of the samples of a tar for which `keep`, bool [samples], is true."""
    groups = [(key, list(members)) for key, members in groupby(read_members(view), key=lambda member: member.key)]
    if len(groups) != len(keep):
        raise FormatError(f"tar contains {len(groups)} samples, the generation says {len(keep)}", shard=shard.name)
    for (key, members), stays in zip(groups, keep.tolist(), strict=True):
        if stays:
            yield key, {member.suffix: bytes(view[member.offset : member.offset + member.size]) for member in members}


_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Compacted:
    """The result of `compact_shards`."""

    generation: int
    rewritten: Mapping[str, str | None]
    samples: int  # number of removed samples that the new generation no longer contains
    bytes: int  # bytes saved in tars


def compact_shards(storage: Storage, *, annotations: bool = False) -> Compacted:
    """Rewrite the shards that contain removed samples without them. Kept samples keep their streams and order.

    The annotations in rewritten tars are the current ones.
    """
    sweep(storage)
    head = read_head(storage)
    generation = next(history(storage, head))
    table = read_annotations(storage, generation)
    removed = table["removed"].to_numpy()
    pieces = pieces_of(storage, generation, ~removed)
    _check_ours(pieces)
    todo = {piece.number for piece in pieces if not piece.is_whole or (annotations and _is_outdated(piece, table))}
    if not todo:
        ledger.follow_shards(storage)  # in case that the last run was killed before it did
        return Compacted(generation.number, {}, 0, 0)
    shards: list[ShardRecord] = []
    rewritten: dict[str, str | None] = {}
    made = replace(
        generation,
        number=generation.number + 1,
        note=f"compact {things(len(todo), 'shard')}, {things(int(removed.sum()), 'removed sample')}",
    )
    for piece in pieces:
        shard = piece.shard
        if piece.number not in todo:
            shards.append(shard)
            continue
        _LOG.info("%d of %d shards", len(rewritten), len(todo))
        rewritten[shard.name] = None
        if piece.samples:
            # The revision makes the name unique for each state of the dataset. Two runs from one state use the same
            # name, but they write equal bytes.
            name = later_stem(shard.name, head.revision)
            _LOG.info("%s: keeping %d of %d samples, as %s", shard.name, piece.samples, shard.samples, name)
            shards.append(repack(storage, name, [piece], made, piece.rows(table)))
            rewritten[shard.name] = name
        faults.reach("compact")
    made = replace(made, shards=tuple(shards))
    committed = commit_generation(storage, head.dataset_id, made, table.filter(pa.array(~removed)), head=head)
    ledger.follow_shards(storage)
    saved = sum(shard.bytes for shard in generation.shards) - sum(shard.bytes for shard in shards)
    return Compacted(committed.number, rewritten, int(removed.sum()), saved)


def _is_outdated(piece: Piece, table: pa.Table) -> bool:
    """Return whether the tar of a whole shard contains other annotations than the current ones."""
    shard, classes = piece.shard, piece.generation.classes
    if shard.profile.get("name") == FOREIGN or shard.is_in_place:
        return False
    samples = kept_samples(map_checked(piece.storage, shard), piece.keep, shard)
    rows = piece.rows(table).to_pylist()
    return not all(is_current(members, row, classes) for (_, members), row in zip(samples, rows, strict=True))


def _check_ours(pieces: Sequence[Piece]) -> None:
    """Raise UsageError for shards that are tars of other tools: they contain members that fastvid does not know."""
    changed = (piece.shard for piece in pieces if not piece.is_whole)
    foreign = [shard.name for shard in changed if shard.profile.get("name") == FOREIGN]
    if foreign:
        raise UsageError(
            f"{things(len(foreign), 'shard')} with removed samples are tars of another tool, which are never rewritten",
            shard=foreign[0],
            hint="encode the tars with `fastvid shard` and remove the samples there to free their bytes; until then"
            " they stay hidden",
        )


@dataclass(frozen=True, slots=True)
class Recipe:
    """A dataset to make."""

    identity: Mapping[str, Any]
    shards: Sequence[Sequence[Piece]]
    table: pa.Table
    ledger: Mapping[str, Row]  # its ledger rows by source, still with the names of the old shards
    made: Generation  # its first generation, still without shards
    sources: Sequence[Storage]  # the datasets it is made from, also those without a sample in it


@dataclass(frozen=True, slots=True)
class Made:
    """A dataset that was made."""

    dataset: str
    generation: Generation
    linked: int


def arrange(pieces: Sequence[Piece]) -> list[list[Piece]]:
    """Return the pieces of each new shard, in order: a whole shard alone, others joined.

    A joined shard has at most as many samples as the largest old shard, and at most as many bytes, estimated by the
    mean size of the samples.
    """
    samples, size = (max(getattr(piece.shard, name) for piece in pieces) for name in ("samples", "bytes"))
    shards: list[list[Piece]] = []
    count, weight = 0, 0.0
    for piece in pieces:
        if not piece.samples:
            continue
        bytes_taken = piece.shard.bytes * piece.samples / piece.shard.samples
        if not piece.is_whole and piece.shard.profile.get("name") == FOREIGN:
            raise UsageError(
                "tars of another tool are never rewritten",
                shard=piece.shard.name,
                file=piece.storage.url,
                hint="encode them with `fastvid transcode` first",
            )
        last = shards[-1][-1] if shards else None
        joins = (
            last is not None
            and not last.is_whole
            and not piece.is_whole
            and (last.shard.profile, last.shard.encoder) == (piece.shard.profile, piece.shard.encoder)
            and count + piece.samples <= samples
            and weight + bytes_taken <= size
        )
        if not joins:
            shards.append([])
            count, weight = 0, 0.0
        shards[-1].append(piece)
        count, weight = count + piece.samples, weight + bytes_taken
    return shards


class _Repack(ShardWork):
    """Makes the shards of a recipe from samples of other datasets; so there are no sources to process."""

    def __init__(self, storage: Storage, recipe: Recipe) -> None:
        super().__init__(storage, SourceList((), recipe.made.classes, {}), [()] * len(recipe.shards))
        self._recipe, self.identity = recipe, recipe.identity
        counts = (sum(piece.samples for piece in pieces) for pieces in recipe.shards)
        self._first = list(accumulate(counts, initial=0))
        # A larger number than in the linked tars: restoring from tars trusts the newest one.
        newest = max(read_head(source).generation for source in recipe.sources)
        self._told = replace(recipe.made, number=newest + 1)

    def open_engine(self, how: How, blocked: tuple[str, ...]) -> None:
        """See `ShardWork`."""

    def data(self, shard: int) -> str:
        """See `ShardWork`."""
        return f"{self.stems[shard]}.{self._recipe.shards[shard][0].shard.suffixes[0]}"

    def write(self, shard: int, outcomes: Iterator[Outcome]) -> Part:  # noqa: ARG002
        """See `ShardWork`."""
        _LOG.info("%d of %d shards", shard, len(self.shards))
        stem, pieces = self.stems[shard], self._recipe.shards[shard]
        if _is_taken_over(pieces):
            made = _take_over(self.storage, stem, pieces[0])
        else:
            rows = self._recipe.table.slice(self._first[shard], self._first[shard + 1] - self._first[shard])
            made = repack(self.storage, stem, pieces, self._told, rows)
        faults.reach("shard")
        return Part(stem, [], [], TarDigest(made.bytes, made.sha256, made.samples), made.encoder, made.signals)


def make_dataset(out: str, recipe: Recipe, command: str) -> Made:
    """Write a dataset; run again after an interruption, it resumes."""
    storage = open_storage(out)

    def commit(work: ShardWork, parts: Sequence[Part], _command: str) -> pa.Table:
        records = []
        for part, pieces in zip(parts, recipe.shards, strict=True):
            assert part.digest is not None  # repacked shards are never empty
            records.append(replace(pieces[0].shard, name=part.stem, **asdict(part.digest), signals=part.signals))
        # Sources that one of the old datasets blocks are blocked in the new one too.
        blocked = ledger.block(storage, {digest for source in recipe.sources for digest in ledger.read_blocked(source)})
        made = replace(recipe.made, shards=tuple(records))
        rows, hidden = ledger.settle_rows(_ledger(storage, recipe, made), blocked)
        table = ledger.write_ledger(storage, rows, work.identity)
        faults.reach("ledger")
        commit_generation(storage, dataset_id(work.identity), made, hide_sources(recipe.table, hidden))
        return table

    run(storage, How(command=command), lambda: _Repack(storage, recipe), commit)
    return Made(storage.url, next(history(storage, read_head(storage))), sum(map(_is_taken_over, recipe.shards)))


def _is_taken_over(pieces: Sequence[Piece]) -> bool:
    return len(pieces) == 1 and pieces[0].is_whole


def _take_over(storage: Storage, stem: str, piece: Piece) -> ShardRecord:
    """Link or copy a shard, with its signals."""
    for suffix in piece.shard.suffixes:
        expected = piece.shard.sha256 if f"{piece.shard.name}.{suffix}" == piece.shard.data else None
        link_or_copy(piece.storage, f"{piece.shard.name}.{suffix}", storage, f"{stem}.{suffix}", expected)
    return piece.shard


def _ledger(storage: Storage, recipe: Recipe, made: Generation) -> list[Row]:
    """Return the ledger rows of the sources that have a sample here, and of those that were never packed or are gone.

    Which bytes a source has, and that it is visible, its samples here say: the ledger may know a later state of it.
    """
    rows = {name: {**row, "shard": None} for name, row in recipe.ledger.items() if row["status"] != "packed"}
    packed, names = recipe.ledger.keys() - rows.keys(), recipe.table["source_id"]
    shown = set(names.filter(pc.invert(recipe.table["removed"])).to_pylist())
    digests = dict(zip(names.to_pylist(), ledger.source_hashes(storage, made).to_pylist(), strict=True))
    for name, told in ledger.sample_rows(made, recipe.table).items():
        if name in packed or name in shown:
            row = recipe.ledger[name] if name in packed else told
            part = {"bytes_out": None} if told["num_frames"] != row["num_frames"] else {}
            found = {"num_frames": told["num_frames"], "shard": told["shard"]}
            rows[name] = {**row, **found, "source_sha256": digests[name] or row["source_sha256"], **part}
    return list(rows.values())


def folder_name(url: str) -> str:
    """Return the last component of a folder's path or URL, for messages."""
    return PurePosixPath(url).name or url
