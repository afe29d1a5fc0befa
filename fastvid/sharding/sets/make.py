"""Makes a new dataset of samples that exist: shards are linked or copied, or packed again, not encoded.

A killed run resumes: its folder records what it makes and which shards are finished, and the commit record is the last
thing written, so half a dataset cannot be opened.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import PurePosixPath
from typing import Any, Final

import pyarrow as pa

from fastvid.errors import JobError, UsageError
from fastvid.format.generations import Generation, ShardRecord, commit_generation, read_generation
from fastvid.format.schema import DATASET_JSON, FOREIGN, LEDGER, LEDGER_SCHEMA, shard_stem
from fastvid.format.tar import TarDigest
from fastvid.runtime import faults
from fastvid.sharding.change.repack import Piece, repack
from fastvid.sharding.job.job import hide_sources
from fastvid.sharding.job.ledger import (
    Part,
    Row,
    block,
    part_stems,
    read_blocked,
    read_ledger,
    read_part,
    settle_rows,
    write_ledger,
    write_part,
)
from fastvid.sharding.job.lock import Staging, lock_folder
from fastvid.sharding.job.plan import differences, digest
from fastvid.storage import LocalStorage, Storage, open_storage
from fastvid.storage.urls import link_or_copy

_LOG = logging.getLogger(__name__)

# Hex digits of the identity that form the dataset's id, so that the same command makes the same dataset.
_ID_DIGITS: Final = 32


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


def make_dataset(out: str, recipe: Recipe, *, progress: Callable[[int, int], None] | None = None) -> Made:
    """Write a dataset; run again after an interruption, it resumes."""
    storage, dataset_id = open_storage(out), digest(recipe.identity)[:_ID_DIGITS]
    linked = sum(_is_taken_over(pieces) for pieces in recipe.shards)
    with lock_folder(storage) as check:
        staging = Staging(storage)
        if storage.exists(DATASET_JSON):
            found, generation = read_generation(storage)
            if found != dataset_id:
                raise UsageError("the folder contains another dataset", file=storage.url, hint="choose another folder")
            _LOG.info("the dataset in %s is complete", storage.url)
        else:
            _begin(storage, staging, recipe.identity)
            records = _write_shards(storage, recipe, check, progress)
            stems = [record.name for record in records for _ in range(record.samples)]
            # What one of the datasets refuses, the new one refuses too.
            blocked = block(storage, _blocked(recipe))
            rows, hidden = settle_rows(_ledger(recipe, stems), blocked)
            write_ledger(storage, rows, recipe.identity)
            faults.reach("ledger")
            generation = Generation(
                1, tuple(records), recipe.streams, recipe.classes, note=recipe.note, extras=recipe.extras
            )
            generation = commit_generation(storage, dataset_id, generation, hide_sources(recipe.table, hidden))
        staging.end()
    return Made(storage.url, generation, linked)


def _blocked(recipe: Recipe) -> set[str]:
    """Return the block lists of the datasets from which shards are taken."""
    sources = {piece.storage.url: piece.storage for pieces in recipe.shards for piece in pieces}
    return {digest for source in sources.values() for digest in read_blocked(source)}


def old_ledger(storage: Storage) -> list[Row]:
    """Return the ledger rows of a dataset; none if it has no ledger."""
    return read_ledger(storage)[0].to_pylist() if storage.exists(LEDGER) else []


def _is_taken_over(pieces: Sequence[Piece]) -> bool:
    return len(pieces) == 1 and pieces[0].is_whole


def _begin(storage: Storage, staging: Staging, identity: Mapping[str, Any]) -> None:
    before = staging.job() or staging.begin(identity)
    if isinstance(storage, LocalStorage):
        storage.sweep()
    if before is None:
        return
    changed = next(differences(before, identity), None)
    if changed is not None:
        name, old, new = changed
        raise JobError(
            f"the unfinished job here has {name} {old!r}, this one {new!r}",
            file=storage.url,
            hint="resume it with the same arguments, or choose another folder",
        )
    _LOG.info("resuming the unfinished job in %s", storage.url)


def _write_shards(
    storage: Storage, recipe: Recipe, check: Callable[[], None], progress: Callable[[int, int], None] | None
) -> list[ShardRecord]:
    finished, records, start = part_stems(storage), list[ShardRecord](), 0
    # What is written here is later than shards that are linked.
    told = Generation(_newest(recipe) + 1, (), recipe.streams, recipe.classes, extras=recipe.extras)
    for number, pieces in enumerate(recipe.shards):
        if progress is not None:
            progress(number, len(recipe.shards))
        stem, first = shard_stem(number), pieces[0].shard
        samples = sum(piece.samples for piece in pieces)
        part = read_part(storage, stem) if stem in finished else None
        if part is None or part.digest is None:
            check()
            if _is_taken_over(pieces):
                made = _take_over(storage, stem, pieces[0])
            else:
                made = repack(storage, stem, pieces, told, recipe.table.slice(start, samples))
            tar = TarDigest(made.bytes, made.sha256, made.samples)
            part = Part(stem, [], [], tar, first.encoder, signals=made.signals)
            faults.reach("shard")
            write_part(storage, part)
        assert part.digest is not None  # repacked shards are never empty
        records.append(replace(first, name=stem, **asdict(part.digest), signals=part.signals))
        start += samples
    return records


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
    known = {row["source_id"] for row in rows}
    nothing = dict.fromkeys(LEDGER_SCHEMA.names)
    for name in first.keys() - known:  # a dataset without a ledger
        key, stem = first[name]
        packed = {"source_id": name, "path": name, "status": "packed", "key": key, "shard": stem, "warnings": []}
        rows += [nothing | packed | {"num_frames": frames[name]}]
    return rows


def folder_name(url: str) -> str:
    """Return the last component of a folder's path or URL, for messages."""
    return PurePosixPath(url).name or url
