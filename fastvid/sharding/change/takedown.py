"""Takes sources down: removes every sample of them and of equal files, refuses their return, and leaves a receipt.

The steps: a receipt says what is removed, the SHA-256 of the sources go on the block list, which every job reads again
when it commits, a generation hides their samples, also those that a job has added in the meantime, and their rows of
the ledger lose all names. `compact_shards` and `collect_garbage` then delete the bytes. Each step leaves what is done
already, so a takedown that was killed is completed by the same command.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fastvid.errors import UsageError
from fastvid.format.dataset import Dataset
from fastvid.format.generations import Generation, read_annotations, read_generation
from fastvid.format.reason import now
from fastvid.format.schema import from_parquet
from fastvid.runtime import faults
from fastvid.runtime.arrays import BoolArray
from fastvid.runtime.names import encode_name
from fastvid.runtime.near_names import near_names
from fastvid.runtime.values import sha256, things
from fastvid.sharding.change.add import known_sources
from fastvid.sharding.change.edit import hide_samples, rows_of
from fastvid.sharding.change.receipts import Receipt, RemovedFile, read_receipts, receipt_file
from fastvid.sharding.change.repack import pieces_of
from fastvid.sharding.job.ledger import (
    CLIP,
    Row,
    block,
    check_hashes,
    edit_ledger,
    is_nameless,
    read_ledger,
    removed_row,
    whole_name,
)
from fastvid.storage import Storage

# Shorter names are part of any text.
_NAME_LETTERS: Final = 4


@dataclass(frozen=True, slots=True)
class SourceSelection:
    """Which sources to remove, in any of these ways together."""

    sources: Sequence[str] = ()
    keys: Sequence[str] = ()  # keys of samples
    where: str | None = None
    hashes: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class TakenDown:
    """The result of `take_down`."""

    receipt: Receipt
    generation: int  # number of the current one
    named: int  # sources that the selection names
    copies: int  # further sources with equal bytes


@dataclass(frozen=True, slots=True)
class _Target:
    """What is removed: everything with one of the hashes, and the sources without a hash by their ids."""

    hashes: frozenset[str]
    unhashed: frozenset[str]

    def mask(self, table: pa.Table, hashes: pa.ChunkedArray) -> BoolArray:
        """Return which rows of the annotations are removed; bool [N]."""
        mask = pc.or_(
            pc.fill_null(pc.is_in(hashes, value_set=pa.array(sorted(self.hashes), pa.string())), False),
            pc.is_in(table["source_id"], value_set=pa.array(sorted(self.unhashed), pa.string())),
        )
        return np.asarray(mask.to_numpy(zero_copy_only=False), dtype=bool)

    def named(self, rows: Iterable[Row]) -> list[Row]:
        """Return the rows of the ledger that name a removed source."""
        return [
            row
            for row in rows
            if (row["source_sha256"] in self.hashes or row["source_id"] in self.unhashed) and not is_nameless(row)
        ]


def take_down(storage: Storage, selection: SourceSelection, *, reason: str) -> TakenDown:
    """Remove every sample of some sources and of all sources with equal bytes, and block their return.

    All segments and clips of a file go with it: a clip stands for its file. Afterwards no reader sees the samples;
    `compact_shards` and `collect_garbage` delete their bytes and names. What stays is a receipt with hashes. After an
    interruption, the same call completes it.

    Args:
        storage: The dataset's folder.
        selection: The sources. A hash that the dataset does not know is blocked in advance.
        reason: Why; recorded, so it must not contain the names of the sources.

    Raises:
        UsageError: If a source or key is unknown, nothing is selected, or the reason names a source; nothing is
            changed.
        StorageError: If there is no dataset.
        ConflictError: If other changes kept winning the race to commit.
    """
    if not reason.strip():
        raise UsageError("the reason is empty", hint="say why the sources are removed, without naming them")
    if not (selection.sources or selection.keys or selection.where is not None or selection.hashes):
        raise UsageError("nothing is selected", hint="name --source, --keys, --where or --sha256")
    dataset_id, generation = read_generation(storage)
    table, hashes = read_annotations(storage, generation), source_hashes(storage, generation)
    known_sources(storage, generation)  # a dataset without a ledger gets one
    digests = {name: digest for name, digest in _pairs(table["source_id"], hashes) if digest is not None}
    ledger = _hashed(read_ledger(storage)[0].to_pylist(), digests)
    samples = pa.array(_named_samples(storage, table, hashes, selection))
    named = {(row["source_id"], row["source_sha256"]) for row in _named_in_ledger(storage, table, ledger, selection)}
    named |= set(_pairs(table["source_id"].filter(samples), hashes.filter(samples)))
    target = _Target(
        frozenset(selection.hashes).union(digest for _, digest in named if digest is not None),
        frozenset(name for name, digest in named if digest is None),
    )
    mask = target.mask(table, hashes)
    gone = table.select(["key", "source_id"]).append_column("sha256", hashes).filter(pa.array(mask))
    every = {*gone["source_id"].to_pylist(), *(row["source_id"] for row in target.named(ledger))}
    _check_reason(reason, every, gone["key"].to_pylist())
    receipt = Receipt(0, dataset_id, now(), reason, **_inventory(storage, generation, gone, mask, target))
    receipt = _written(storage, receipt, is_new=bool(every))
    faults.reach("receipt")
    block(storage, target.hashes)
    faults.reach("blocked")
    hidden = hide_samples(
        storage,
        lambda generation, table: pa.array(target.mask(table, source_hashes(storage, generation))),
        lambda number: f"take down {things(number, 'sample')}, receipt {receipt.number}",
    )
    faults.reach("hidden")
    _forget(storage, target, digests, receipt.message)
    ids = {name for name, _ in named}
    return TakenDown(receipt, hidden.generation, len(ids), len(every - ids))


def select_keys(storage: Storage, selection: SourceSelection) -> list[str]:
    """Return the keys of the selected samples, for `remove_samples`: those that are named, and no copies of them."""
    generation = read_generation(storage)[1]
    table = read_annotations(storage, generation)
    hashes = source_hashes(storage, generation) if selection.hashes else pa.nulls(table.num_rows, pa.string())
    _named_in_ledger(storage, table, [], selection)
    keys: list[str] = table["key"].filter(pa.array(_named_samples(storage, table, hashes, selection))).to_pylist()
    return keys


def source_hashes(storage: Storage, generation: Generation) -> pa.ChunkedArray:
    """Return the SHA-256 of each sample's source, hex, in the order of the annotations; null where it is unknown."""
    columns = [pa.array([], pa.string())]
    for shard in generation.shards:
        facts = _facts(storage, shard.name, ["stream", "source_sha256"])
        columns.append(facts.filter(pc.equal(facts["stream"], generation.streams[0]))["source_sha256"].combine_chunks())
    return pa.chunked_array(columns, pa.string())


def _pairs(names: pa.ChunkedArray, hashes: pa.ChunkedArray) -> Iterable[tuple[str, str | None]]:
    return zip(names.to_pylist(), hashes.to_pylist(), strict=True)


def _hashed(rows: Sequence[Row], digests: Mapping[str, str]) -> list[Row]:
    """Return rows of a ledger with the hashes that the shards know; fastvid 0.1 wrote none into it."""
    return [row | {"source_sha256": row["source_sha256"] or digests.get(row["source_id"])} for row in rows]


def _written(storage: Storage, receipt: Receipt, *, is_new: bool) -> Receipt:
    """Write a receipt under the next free number, and return it, or the one that was written for the same before."""
    known = read_receipts(storage)
    for old in known:
        again = old.hashes == receipt.hashes and not (is_new or receipt.unknown)
        if again or (old.sources, old.members, old.shards) == (receipt.sources, receipt.members, receipt.shards):
            return old
    number = max((old.number for old in known), default=0)
    while True:
        number += 1
        receipt = replace(receipt, number=number)
        if storage.swap(receipt_file(number), receipt.to_bytes(), None):
            return receipt


def _forget(storage: Storage, target: _Target, digests: Mapping[str, str], message: str) -> None:
    def edit(rows: list[Row]) -> list[Row] | None:
        rows = _hashed(rows, digests)
        gone = target.named(rows)
        if not gone:
            return None
        names = {row["source_id"] for row in gone}
        kept = {row["source_id"]: row for row in rows if row["source_id"] not in names}
        number = sum(name.startswith("removed:unknown-") for name in kept)
        for row in gone:
            new = removed_row(row["source_sha256"], message, number=number)
            number += row["source_sha256"] is None
            kept[new["source_id"]] = new  # also in place of the row of a copy that was refused before
        return list(kept.values())

    edit_ledger(storage, edit)


def _named_samples(storage: Storage, table: pa.Table, hashes: pa.ChunkedArray, selection: SourceSelection) -> BoolArray:
    """Return which samples the selection names, before equal copies are looked for; bool [N]."""
    check_hashes(selection.hashes)
    names = pa.array([encode_name(name) for name in selection.sources], pa.string())
    whole = pc.replace_substring_regex(table["source_id"], pattern=CLIP, replacement="")
    mask = pc.or_(pc.is_in(table["source_id"], value_set=names), pc.is_in(whole, value_set=names))
    if "parent" in table.column_names and len(names):
        mask = pc.or_(mask, pc.is_in(table["parent"], value_set=names))
    mask = pc.or_(mask, pc.is_in(hashes, value_set=pa.array(selection.hashes, pa.string())))
    chosen = np.array(mask.to_numpy(zero_copy_only=False), dtype=bool)
    if selection.keys:
        chosen[rows_of(table, pa.array(selection.keys, pa.string()), storage)] = True
    if selection.where is not None:
        chosen[Dataset(storage.url, where=selection.where).rows] = True
    return chosen


def _named_in_ledger(storage: Storage, table: pa.Table, ledger: Sequence[Row], named: SourceSelection) -> Iterable[Row]:
    """Return the rows of sources that the selection names, also of those that were never packed."""
    found: dict[str, Row] = {}
    for name in map(encode_name, named.sources):
        rows = [row for row in ledger if name in (row["source_id"], row["path"], whole_name(row["source_id"]))]
        found |= {row["source_id"]: row for row in rows}
        if rows:
            continue
        columns = [table[name].to_pylist() for name in ("source_id", "parent") if name in table.column_names]
        known = {known for column in columns for source in column if source for known in (source, whole_name(source))}
        if name not in known:
            near = near_names(pa.chunked_array([pa.array(sorted(known), pa.string())]), name)
            hint = f"did you mean {', '.join(map(repr, near))}? nothing was changed" if near else "nothing was changed"
            raise UsageError(f"no source is called {name!r}", file=storage.url, hint=hint)
    return found.values()


def _check_reason(reason: str, sources: Collection[str], keys: Collection[str]) -> None:
    """Refuse a reason that would keep the name of what is removed."""
    names = {*sources, *keys} | {PurePosixPath(whole_name(source)).stem for source in sources}
    told = next((name for name in sorted(names) if len(name) >= _NAME_LETTERS and name in reason), None)
    if told is not None:
        raise UsageError(
            f"the reason contains {told!r}, a name of what is removed",
            hint="refer to it by the number of a ticket: the receipt keeps the reason; nothing was changed",
        )


def _inventory(
    storage: Storage, generation: Generation, gone: pa.Table, mask: BoolArray, target: _Target
) -> dict[str, Any]:
    """Return what the receipt says of the removed sources, members and shards."""
    touched = [piece.shard for piece in pieces_of(storage, generation, mask) if piece.samples]
    members: list[RemovedFile] = []
    sizes: Counter[str] = Counter()
    for shard in touched:
        if shard.is_in_place:
            continue  # none of their bytes are in the dataset
        facts = _facts(storage, shard.name, ["key", "member_offset", "member_size"])
        facts = facts.filter(pc.is_in(facts["key"], value_set=gone["key"].combine_chunks()))
        for key, offset, size in zip(*facts.to_pydict().values(), strict=True):
            data = memoryview(bytearray(size))
            storage.read_into(f"{shard.name}.tar", [(offset, data)])
            members.append(RemovedFile(sha256(data), size))
            sizes[key] += size
    samples: Counter[str] = Counter()
    stored: Counter[str] = Counter()
    for key, source, digest in zip(*gone.to_pydict().values(), strict=True):
        # Sources with equal bytes are one; a source without a hash is one by itself.
        samples[digest or source] += 1
        stored[digest or source] += sizes[key]
    sources = [RemovedFile(digest, stored[digest], samples[digest]) for digest in sorted(target.hashes)]
    sources += [RemovedFile(None, stored[name], samples[name]) for name in sorted(target.unhashed)]
    shards = {shard.name: shard.sha256 for shard in touched}
    return {"sources": tuple(sources), "members": tuple(members), "shards": shards}


def _facts(storage: Storage, shard: str, columns: Sequence[str]) -> pa.Table:
    file = f"{shard}.parquet"
    return from_parquet(storage.read(file), file=file, columns=columns)
