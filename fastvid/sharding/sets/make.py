"""Makes a new dataset of samples that exist: shards are linked or copied, or packed again, not encoded.

A killed run resumes: its folder records what it makes and which shards are finished, and the commit record is the last
thing written, so half a dataset cannot be opened.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import PurePosixPath
from typing import Any

import pyarrow as pa

from fastvid.errors import UsageError
from fastvid.format.generations import Generation, ShardRecord, commit_generation, read_generation
from fastvid.format.schema import FOREIGN, shard_stem
from fastvid.format.tar import TarDigest
from fastvid.runtime import faults
from fastvid.sharding.change.repack import Piece, repack
from fastvid.sharding.job.job import dataset_id, hide_sources, run
from fastvid.sharding.job.ledger import Part, Row, block, read_blocked, settle_rows, write_ledger
from fastvid.sharding.job.run import How, ShardWork
from fastvid.sharding.sources.sources import Source, SourceList
from fastvid.sharding.work.tasks import Outcome
from fastvid.storage import Storage, open_storage
from fastvid.storage.urls import link_or_copy


@dataclass(frozen=True, slots=True)
class Recipe:
    """A dataset to make."""

    identity: Mapping[str, Any]
    shards: Sequence[Sequence[Piece]]
    table: pa.Table
    ledger: Mapping[str, Row]  # its ledger rows by source, except for the names of shards
    streams: tuple[str, ...]
    classes: tuple[str, ...]
    extras: Mapping[str, Any]
    note: str


@dataclass(frozen=True, slots=True)
class Made:
    """A dataset that was made."""

    dataset: str
    generation: Generation
    linked: int


def arrange(pieces: Sequence[Piece]) -> list[list[Piece]]:
    """Join pieces into shards, in order. Whole shards stay as they are.

    A joined shard has at most as many samples and bytes, estimated from the mean size of samples, as the largest old
    one.
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
    """Makes the shards of a recipe, of samples that exist, so that no source has to be processed."""

    def __init__(self, storage: Storage, recipe: Recipe, progress: Callable[[int, int], None] | None) -> None:
        self.storage, self.found, self.identity = storage, SourceList((), recipe.classes, {}), recipe.identity
        self.shards: Sequence[Sequence[Source]] = [()] * len(recipe.shards)
        self.stems = [shard_stem(number) for number in range(len(recipe.shards))]
        self._recipe, self._progress = recipe, progress
        counts = (sum(piece.samples for piece in pieces) for pieces in recipe.shards)
        self._first = list(accumulate(counts, initial=0))
        # What is written here is later than shards that are linked.
        self._told = Generation(_newest(recipe) + 1, (), recipe.streams, recipe.classes, extras=recipe.extras)

    def open_engine(self, how: How, blocked: tuple[str, ...]) -> None:
        """See `ShardWork`."""

    def data(self, shard: int) -> str:
        """See `ShardWork`."""
        return f"{self.stems[shard]}.{self._recipe.shards[shard][0].shard.suffixes[0]}"

    def write(self, shard: int, outcomes: Iterator[Outcome]) -> Part:  # noqa: ARG002
        """See `ShardWork`."""
        if self._progress is not None:
            self._progress(shard, len(self.shards))
        stem, pieces = self.stems[shard], self._recipe.shards[shard]
        if _is_taken_over(pieces):
            made = _take_over(self.storage, stem, pieces[0])
        else:
            rows = self._recipe.table.slice(self._first[shard], self._first[shard + 1] - self._first[shard])
            made = repack(self.storage, stem, pieces, self._told, rows)
        faults.reach("shard")
        return Part(stem, [], [], TarDigest(made.bytes, made.sha256, made.samples), made.encoder, made.signals)


def make_dataset(out: str, recipe: Recipe, command: str, *, progress: Callable[[int, int], None] | None = None) -> Made:
    """Write a dataset; run again after an interruption, it resumes."""
    storage = open_storage(out)

    def commit(work: ShardWork, parts: Sequence[Part], _command: str) -> pa.Table:
        records = []
        for part, pieces in zip(parts, recipe.shards, strict=True):
            assert part.digest is not None  # repacked shards are never empty
            records.append(replace(pieces[0].shard, name=part.stem, **asdict(part.digest), signals=part.signals))
        # What one of the datasets refuses, the new one refuses too.
        blocked = block(storage, _blocked(recipe))
        stems = [record.name for record in records for _ in range(record.samples)]
        rows, hidden = settle_rows(_ledger(recipe, stems), blocked)
        ledger = write_ledger(storage, rows, work.identity)
        faults.reach("ledger")
        made = Generation(1, tuple(records), recipe.streams, recipe.classes, note=recipe.note, extras=recipe.extras)
        commit_generation(storage, dataset_id(work.identity), made, hide_sources(recipe.table, hidden))
        return ledger

    run(storage, How(command=command), lambda: _Repack(storage, recipe, progress), commit)
    return Made(storage.url, read_generation(storage)[1], sum(map(_is_taken_over, recipe.shards)))


def _blocked(recipe: Recipe) -> set[str]:
    """Return the block lists of the datasets from which shards are taken."""
    sources = {piece.storage.url: piece.storage for pieces in recipe.shards for piece in pieces}
    return {digest for source in sources.values() for digest in read_blocked(source)}


def _is_taken_over(pieces: Sequence[Piece]) -> bool:
    return len(pieces) == 1 and pieces[0].is_whole


def _take_over(storage: Storage, stem: str, piece: Piece) -> ShardRecord:
    """Link or copy a shard, with its signals."""
    for suffix in piece.shard.suffixes:
        expected = piece.shard.sha256 if f"{piece.shard.name}.{suffix}" == piece.shard.data else None
        link_or_copy(piece.storage, f"{piece.shard.name}.{suffix}", storage, f"{stem}.{suffix}", expected)
    return piece.shard


def _newest(recipe: Recipe) -> int:
    """Return the highest generation of the sources."""
    sources = {piece.storage.url: piece.storage for pieces in recipe.shards for piece in pieces}
    return max(read_generation(source)[1].number for source in sources.values())


def _ledger(recipe: Recipe, stems: Sequence[str]) -> list[Row]:
    """Return the ledger rows with the new shards; a packed source without a sample here has none."""
    keys, names = recipe.table["key"].to_pylist(), recipe.table["source_id"].to_pylist()
    frames, first = dict.fromkeys(names, 0), dict[str, tuple[str, str]]()
    for key, name, stem, number in zip(keys, names, stems, recipe.table["num_frames"].to_pylist(), strict=True):
        frames[name] += number
        first.setdefault(name, (key, stem))
    rows = []
    for name, row in recipe.ledger.items():
        if row["status"] != "packed":
            rows.append({**row, "shard": None})
        elif name in first:
            part = frames[name] != row["num_frames"]
            changed = {"num_frames": frames[name], "shard": first[name][1]}
            rows.append({**row, **changed, **({"bytes_out": None} if part else {})})
    return rows


def folder_name(url: str) -> str:
    """Return the last component of a folder's path or URL, for messages."""
    return PurePosixPath(url).name or url
