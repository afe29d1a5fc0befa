"""What changes in the members of samples that one dataset takes from another: keys, names of sources, labels.

Make a new dataset of samples that exist: shards are linked or copied, or their members packed again, not encoded.

A killed run resumes: its folder records what it makes and which shards are finished, and the commit record is the last
thing written, so half a dataset cannot be opened.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from fastvid.errors import JobError, UsageError
from fastvid.format.annotations import KeptSignals, join_signals
from fastvid.format.dataset import ListedSample, listed_samples, write_listed
from fastvid.format.generations import Generation, ShardRecord, commit_generation, read_annotations, read_generation
from fastvid.format.schema import DATASET_JSON, FOREIGN, LEDGER, LEDGER_SCHEMA, shard_stem
from fastvid.format.shard import Shard, open_shard, write_shard
from fastvid.format.tar import TarDigest, to_json
from fastvid.runtime import faults
from fastvid.sharding.change.compact import kept_samples, map_checked
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
from fastvid.sharding.job.lock import Staging, lock_folder, short_scratch
from fastvid.sharding.job.plan import differences, digest
from fastvid.sharding.job.restore import annotate_members, dataset_record, with_record
from fastvid.storage import LocalStorage, Storage, open_storage
from fastvid.storage.urls import link_or_copy

Members = tuple[str, Mapping[str, bytes]]
"""Key of a sample, and its members by suffix."""


@dataclass(frozen=True, slots=True)
class Renaming:
    """What changes in the members of a dataset's samples."""

    prefix: str = ""
    labels: Mapping[int, int] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.prefix or self.labels)

    def apply(self, key: str, members: Mapping[str, bytes]) -> Members:
        """Return key and members of a sample as the new dataset has them."""
        made = dict(members)
        if "json" in made:
            record = json.loads(made["json"])
            for fields in (record, record.get("annotations")):
                if isinstance(fields, dict):
                    self._change(fields)
            made["json"] = to_json(record)
        if made.get("cls", b"").isdigit():
            number = int(made["cls"])
            made["cls"] = str(self.labels.get(number, number)).encode()
        return f"{self.prefix}{key}", made

    def rename(self, key: str) -> tuple[str, Callable[[Mapping[str, Any]], Mapping[str, Any]]]:
        """Return the key of a sample as the new dataset has it, and how its facts change."""

        def change(facts: Mapping[str, Any]) -> Mapping[str, Any]:
            fields = dict(facts)
            self._change(fields)
            return fields

        return f"{self.prefix}{key}", change

    def _change(self, fields: dict[str, Any]) -> None:
        for name in ("key", "source_id", "parent"):
            if isinstance(fields.get(name), str):
                fields[name] = f"{self.prefix}{fields[name]}"
        if type(fields.get("label")) is int:
            fields["label"] = self.labels.get(fields["label"], fields["label"])


_LOG = logging.getLogger(__name__)

# Hex digits of the identity that form the dataset's id, so that the same command makes the same dataset.
_ID_DIGITS: Final = 32


@dataclass(frozen=True, slots=True)
class Piece:
    """Samples of one shard of a dataset."""

    storage: Storage
    shard: ShardRecord
    keep: npt.NDArray[np.bool_]  # whether each sample is taken, bool [samples]
    renaming: Renaming = field(default_factory=Renaming)

    def opened(self) -> Shard:
        """Open the shard."""
        generation = read_generation(self.storage)[1]
        return open_shard(self.storage, generation, generation.shards.index(self.shard))

    def signals(self) -> KeptSignals:
        """Return the signals of the samples that are taken."""
        generation = read_generation(self.storage)[1]
        number = generation.shards.index(self.shard)
        start = sum(shard.samples for shard in generation.shards[:number])
        frames = read_annotations(self.storage, generation)["num_frames"].slice(start, self.shard.samples)
        return KeptSignals(self.storage, self.shard, frames.to_pylist(), self.keep)

    @property
    def samples(self) -> int:
        """Number of samples that are taken."""
        return int(self.keep.sum())

    @property
    def is_whole(self) -> bool:
        """Whether the new shard may be the old one."""
        return bool(self.keep.all()) and not self.renaming


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


def arrange(pieces: Sequence[Piece], *, samples: int, size: int) -> list[list[Piece]]:
    """Join pieces into shards, in order. Whole shards stay as they are.

    `samples`: maximum number of samples in a joined shard. `size`: maximum size of a joined shard in bytes,
    estimated from the mean size of samples.
    """
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
    for number, pieces in enumerate(recipe.shards):
        if progress is not None:
            progress(number, len(recipe.shards))
        stem, first = shard_stem(number), pieces[0].shard
        part = read_part(storage, stem) if stem in finished else None
        if part is None or part.digest is None:
            check()
            written = _write_shard(storage, stem, pieces, recipe, start)
            part = Part(stem, [], [], written, first.encoder, signals=_write_signals(storage, stem, pieces))
            faults.reach("shard")
            write_part(storage, part)
        made = part.digest
        assert made is not None  # repacked shards are never empty
        records.append(
            replace(
                first,
                name=stem,
                bytes=made.bytes,
                sha256=made.sha256,
                samples=made.samples,
                signals=part.signals,
            )
        )
        start += made.samples
    return records


def _write_shard(storage: Storage, stem: str, pieces: Sequence[Piece], recipe: Recipe, start: int) -> TarDigest:
    """Write a shard whose first sample is number `start` of the dataset."""
    if _is_taken_over(pieces):
        source, shard = pieces[0].storage, pieces[0].shard
        for suffix in shard.suffixes:
            expected = shard.sha256 if f"{shard.name}.{suffix}" == shard.data else None
            link_or_copy(source, f"{shard.name}.{suffix}", storage, f"{stem}.{suffix}", expected)
        return TarDigest(shard.bytes, shard.sha256, shard.samples)
    shard = pieces[0].shard
    if shard.is_in_place:
        return write_listed(storage, stem, _listed(pieces), recipe.streams)
    record = dataset_record(
        _newest(recipe) + 1,
        streams=recipe.streams,
        classes=recipe.classes,
        extras=recipe.extras,
        profile=shard.profile,
        encoder=shard.encoder,
        table=recipe.table,
    )
    samples = with_record(_samples(pieces, recipe, start), record)
    with short_scratch(storage) as scratch:
        return write_shard(storage, stem, samples, streams=recipe.streams, scratch=scratch)


def _write_signals(storage: Storage, stem: str, pieces: Sequence[Piece]) -> str:
    """Write the signals of a shard, if it has any; return their SHA-256."""
    if not any(piece.shard.signals for piece in pieces):
        return ""
    if _is_taken_over(pieces):
        return pieces[0].shard.signals  # copied with the shard
    return join_signals(storage, stem, [piece.signals() for piece in pieces])


def _listed(pieces: Sequence[Piece]) -> Iterator[ListedSample]:
    """Yield the samples of a shard of videos in place."""
    for piece in pieces:
        for sample, stays in zip(listed_samples(piece.opened()), piece.keep.tolist(), strict=True):
            if stays:
                yield sample.renamed(*piece.renaming.rename(sample.indexed.key)) if piece.renaming else sample


def _newest(recipe: Recipe) -> int:
    """Return the highest generation of the sources: what is written here is later than shards that are linked."""
    sources = {piece.storage.url: piece.storage for pieces in recipe.shards for piece in pieces}
    return max(read_generation(source)[1].number for source in sources.values())


def _samples(pieces: Sequence[Piece], recipe: Recipe, start: int) -> Iterator[Members]:
    """Yield the samples of a shard; their members contain the annotations of the new dataset."""
    for piece in pieces:
        rows = iter(recipe.table.slice(start, piece.samples).to_pylist())
        start += piece.samples
        view = map_checked(piece.storage, piece.shard)
        for key, members in kept_samples(view, piece.keep, piece.shard):
            name, renamed = piece.renaming.apply(key, members)
            yield name, annotate_members(renamed, next(rows), recipe.classes)
        del view
        if piece.storage.copies:
            piece.storage.discard(piece.shard.data)


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
