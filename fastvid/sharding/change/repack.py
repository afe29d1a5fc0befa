"""Writes a shard of samples that exist: their members are packed again, and nothing is encoded.

Subsets, merges and compacted shards are plans of pieces: which samples of which shards, and what changes in them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from fastvid.errors import FormatError
from fastvid.format.annotations import KeptSignals, join_signals
from fastvid.format.dataset import ListedSample, listed_samples, write_listed
from fastvid.format.generations import Generation, ShardRecord, read_annotations
from fastvid.format.shard import open_shard, write_shard
from fastvid.format.tar import read_members, to_json
from fastvid.runtime.values import sha256
from fastvid.sharding.job.lock import short_scratch
from fastvid.sharding.job.restore import annotate_members, dataset_record, with_record
from fastvid.storage import Storage

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


@dataclass(frozen=True, slots=True)
class Piece:
    """Samples of one shard of a dataset."""

    storage: Storage
    generation: Generation
    number: int  # of the shard
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
        """Whether the new shard may be the old one."""
        return bool(self.keep.all()) and not self.renaming

    @property
    def start(self) -> int:
        """Row of the shard's first sample in the annotations of the generation."""
        return sum(shard.samples for shard in self.generation.shards[: self.number])

    def rows(self, table: pa.Table) -> pa.Table:
        """Return the annotations of the samples that are taken, of all annotations of the generation."""
        return table.slice(self.start, self.shard.samples).filter(pa.array(self.keep))

    def signals(self) -> KeptSignals:
        """Return the signals of the samples that are taken."""
        frames = read_annotations(self.storage, self.generation)["num_frames"].slice(self.start, self.shard.samples)
        return KeptSignals(self.storage, self.shard, frames.to_pylist(), self.keep)

    def listed(self) -> Iterator[ListedSample]:
        """Yield the samples that are taken of a shard of videos in place."""
        samples = listed_samples(open_shard(self.storage, self.generation, self.number))
        for sample, stays in zip(samples, self.keep.tolist(), strict=True):
            if stays:
                yield sample.renamed(*self.renaming.rename(sample.indexed.key)) if self.renaming else sample

    def packed(self, rows: Iterator[Mapping[str, Any]], classes: Sequence[str]) -> Iterator[Members]:
        """Yield the samples that are taken of a tar, with the annotations in `rows`."""
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
    """Return the samples of a dataset for which `keep`, bool [N], is true, as a piece of each shard."""
    starts = np.cumsum([shard.samples for shard in generation.shards])[:-1]
    masks = zip(range(len(generation.shards)), np.split(keep, starts), strict=False)
    return [Piece(storage, generation, number, mask, renaming) for number, mask in masks]


def repack(storage: Storage, name: str, pieces: Sequence[Piece], made: Generation, rows: pa.Table) -> ShardRecord:
    """Write a shard of the samples of some pieces, and return its record.

    `made`: the generation that the shard is for; its number, streams, classes and extras are told in the tar. `rows`:
    the annotations of the samples.
    """
    first = pieces[0].shard
    if first.is_in_place:
        listed = (sample for piece in pieces for sample in piece.listed())
        digest = write_listed(storage, name, listed, made.streams)
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
