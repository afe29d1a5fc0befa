"""Takes sources down: removes every sample of them and of equal files, refuses their return, and leaves a receipt.

The steps, each repeatable:

1. the receipt is written, as the journal of the others;
2. the SHA-256 of the sources go on the block list, which every job reads again when it commits;
3. a generation hides their samples, also those that a job has added in the meantime;
4. their rows of the ledger lose all names;
5. `compact_shards` rewrites their shards, and `collect_garbage` deletes the old files; both record it in the receipt.

A takedown that was killed is completed by the next command that removes, compacts or collects garbage.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fastvid.errors import UsageError
from fastvid.format.dataset import Dataset, change
from fastvid.format.generations import Generation, read_annotations, read_generation
from fastvid.format.reason import now
from fastvid.format.schema import GENERATIONS, LEDGER, from_parquet
from fastvid.runtime import faults
from fastvid.runtime.arrays import BoolArray
from fastvid.runtime.names import encode_name
from fastvid.runtime.near_names import near_names
from fastvid.runtime.values import sha256, things
from fastvid.sharding.change.add import known_sources
from fastvid.sharding.change.edit import rows_of
from fastvid.sharding.job.job import hide_rows
from fastvid.sharding.job.ledger import (
    BEGUN,
    CLIP,
    COMPACTED,
    DELETED,
    HIDDEN,
    Receipt,
    RemovedFile,
    ReplacedShard,
    Row,
    add_receipt,
    block,
    check_hashes,
    edit_ledger,
    is_nameless,
    read_ledger,
    read_receipts,
    removed_row,
    update_receipt,
    whole_name,
)
from fastvid.storage import Storage

_COMMAND: Final = "fastvid remove"
_GENERATION: Final = re.compile(rf"{GENERATIONS}/(\d{{6}})\.json")
# Shorter names are part of any text.
_NAME_LETTERS: Final = 4


@dataclass(frozen=True, slots=True)
class SourceSelection:
    """Which sources to remove, in any of these ways together.

    Attributes:
        sources: Names of sources: the source id, the file that clips or segments were made of, or its path.
        keys: Keys of samples.
        where: A condition in SQL over the annotations; see `fastvid.format.selection`.
        hashes: SHA-256 of source files, hex.
    """

    sources: Sequence[str] = ()
    keys: Sequence[str] = ()
    where: str | None = None
    hashes: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class TakenDown:
    """The result of `take_down`.

    Attributes:
        receipt: The record of the takedown.
        generation: Number of the current generation.
        named: Number of sources that the selection names.
        copies: Number of further sources with equal bytes.
    """

    receipt: Receipt
    generation: int
    named: int
    copies: int


@dataclass(slots=True)
class _Target:
    """What is removed: everything with one of the hashes, and the sources without a hash by their ids."""

    hashes: set[str] = field(default_factory=set)
    unhashed: set[str] = field(default_factory=set)

    def add(self, digest: str | None, source: str) -> None:
        """Add a source by its hash, or by its id if it has none."""
        if digest is not None:
            self.hashes.add(digest)
        else:
            self.unhashed.add(source)

    def mask(self, table: pa.Table, hashes: pa.ChunkedArray) -> BoolArray:
        """Return which rows of the annotations are removed; bool [N]."""
        mask = pc.or_(
            pc.fill_null(pc.is_in(hashes, value_set=pa.array(sorted(self.hashes), pa.string())), False),
            pc.is_in(table["source_id"], value_set=pa.array(sorted(self.unhashed), pa.string())),
        )
        return np.asarray(mask.to_numpy(zero_copy_only=False), dtype=bool)

    def has(self, row: Row) -> bool:
        """Return whether a row of the ledger is that of a removed source."""
        return row["source_sha256"] in self.hashes or row["source_id"] in self.unhashed


def take_down(storage: Storage, selection: SourceSelection, *, reason: str) -> TakenDown:
    """Remove every sample of some sources and of all sources with equal bytes, and block their return.

    All segments and clips of a file go with it: a clip stands for its file. Afterwards no reader sees the samples;
    `compact_shards` and `collect_garbage` delete their bytes and names. What stays is a receipt with hashes.

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
    complete_takedowns(storage)
    dataset_id, generation = read_generation(storage)
    table, hashes = read_annotations(storage, generation), source_hashes(storage, generation)
    ledger = _hashed_ledger(storage, generation, table["source_id"], hashes)
    named = _named_samples(storage, table, hashes, selection)
    ids = set(table["source_id"].filter(named).to_pylist())
    target = _Target(set(selection.hashes))
    for digest, source in zip(
        hashes.filter(named).to_pylist(), table["source_id"].filter(named).to_pylist(), strict=True
    ):
        target.add(digest, source)
    for row in _named_in_ledger(storage, table, ledger, selection):
        ids.add(row["source_id"])
        target.add(row["source_sha256"], row["source_id"])
    mask = target.mask(table, hashes)
    gone = [row for row in ledger if target.has(row) and not is_nameless(row)]
    every = set(table["source_id"].filter(pa.array(mask)).to_pylist()) | {row["source_id"] for row in gone}
    _check_reason(reason, every, table["key"].filter(pa.array(mask)).to_pylist())
    same = next((old for old in read_receipts(storage) if old.hashes == target.hashes and not target.unhashed), None)
    fresh = bool((mask & ~np.asarray(table["removed"].to_numpy(zero_copy_only=False), dtype=bool)).any()) or bool(gone)
    if same is not None and not fresh:
        return TakenDown(same, generation.number, len(ids), len(every - ids))
    receipt = Receipt(
        number=0,
        dataset_id=dataset_id,
        time=now(),
        reason=reason,
        command=_COMMAND,
        generations={"before": generation.number},
        **_inventory(storage, generation, table, hashes, mask, target),
    )
    receipt = add_receipt(storage, receipt)
    faults.reach("receipt")
    receipt = _carry_out(storage, receipt, target)
    return TakenDown(receipt, read_generation(storage)[1].number, len(ids), len(every - ids))


def select_keys(storage: Storage, selection: SourceSelection) -> list[str]:
    """Return the keys of the selected samples, for `remove_samples`: those that are named, and no copies of them.

    Raises:
        UsageError: If a key or a source is unknown.
    """
    generation = read_generation(storage)[1]
    table = read_annotations(storage, generation)
    hashes = source_hashes(storage, generation) if selection.hashes else pa.nulls(table.num_rows, pa.string())
    _named_in_ledger(storage, table, [], selection)
    keys: list[str] = table["key"].filter(pa.array(_named_samples(storage, table, hashes, selection))).to_pylist()
    return keys


def source_hashes(storage: Storage, generation: Generation) -> pa.ChunkedArray:
    """Return the SHA-256 of each sample's source, hex, in the order of the annotations; null where it is unknown.

    Raises:
        StorageError: If the facts of a shard are missing.
    """
    columns = [pa.array([], pa.string())]
    for shard in generation.shards:
        facts = _facts(storage, shard.name, ["stream", "source_sha256"])
        columns.append(facts.filter(pc.equal(facts["stream"], generation.streams[0]))["source_sha256"].combine_chunks())
    return pa.chunked_array(columns, pa.string())


def complete_takedowns(storage: Storage) -> None:
    """Complete takedowns that were killed, and record in the receipts what has been compacted and deleted since."""
    receipts = [receipt for receipt in read_receipts(storage) if receipt.state != DELETED]
    for receipt in receipts:
        if receipt.state == BEGUN:
            receipt = _carry_out(storage, receipt, _Target(set(receipt.hashes)))
        _settle(storage, receipt)


def _carry_out(storage: Storage, receipt: Receipt, target: _Target) -> Receipt:
    """Block, hide and forget; everything that is done already stays done."""
    block(storage, target.hashes)
    faults.reach("blocked")

    def edit(generation: Generation, table: pa.Table) -> tuple[Generation, pa.Table] | None:
        mask = target.mask(table, source_hashes(storage, generation))
        new = int((mask & ~np.asarray(table["removed"].to_numpy(zero_copy_only=False), dtype=bool)).sum())
        if not new:
            return None
        note = f"take down {things(new, 'sample')}, receipt {receipt.number}"
        return replace(generation, note=note), hide_rows(table, pa.array(mask))

    hidden = change(storage, edit)
    faults.reach("hidden")
    _forget(storage, receipt, target)
    faults.reach("forgotten")
    return update_receipt(storage, receipt, state=HIDDEN, generations={**receipt.generations, "hidden": hidden.number})


def _forget(storage: Storage, receipt: Receipt, target: _Target) -> None:
    if not storage.exists(LEDGER):
        return

    def edit(rows: list[Row]) -> list[Row] | None:
        gone = [row for row in rows if target.has(row) and not is_nameless(row)]
        if not gone:
            return None
        kept = {row["source_id"]: row for row in rows if not target.has(row) or is_nameless(row)}
        number = sum(name.startswith("removed:unknown-") for name in kept)
        for row in gone:
            new = removed_row(row["source_sha256"], receipt.message, number=number)
            number += row["source_sha256"] is None
            kept[new["source_id"]] = new  # also in place of the row of a copy that was refused before
        return list(kept.values())

    edit_ledger(storage, edit)


def _settle(storage: Storage, receipt: Receipt) -> None:
    """Record what compaction and garbage collection have done to the shards of a receipt."""
    generation = read_generation(storage)[1]
    current = {shard.name: shard for shard in generation.shards}
    if any(shard.name in current for shard in receipt.shards):
        return
    if receipt.state == HIDDEN:
        by_stem = {_stem(name): shard for name, shard in current.items()}
        shards = []
        for shard in receipt.shards:
            found = by_stem.get(_stem(shard.name))
            successor = {} if found is None else {"successor": found.name, "successor_sha256": found.sha256}
            shards.append(replace(shard, **successor))
        numbers = {**receipt.generations, **({"compacted": generation.number} if shards else {})}
        receipt = update_receipt(storage, receipt, state=COMPACTED, shards=tuple(shards), generations=numbers)
    names = storage.list()
    older = {int(match[1]) for name in names if (match := _GENERATION.fullmatch(name))}
    older = {number for number in older if number < receipt.generations.get("compacted", 0)}
    stems = {name.partition(".")[0] for name in names}
    if not older and not any(shard.name in stems for shard in receipt.shards):
        update_receipt(storage, receipt, state=DELETED, deleted=now())


def _stem(shard: str) -> str:
    """Return the name of a shard without the revisions that compaction appends."""
    found = re.match(r"data-\d{6}", shard)
    return found[0] if found else shard


def _hashed_ledger(
    storage: Storage, generation: Generation, sources: pa.ChunkedArray, hashes: pa.ChunkedArray
) -> list[Row]:
    """Return the rows of the ledger, after adding hashes to one that was written without them."""
    known_sources(storage, generation)  # a dataset without a ledger gets one
    found: dict[str, str] = {}

    def edit(rows: list[Row]) -> list[Row] | None:
        if all(row["source_sha256"] is not None for row in rows if row["status"] == "packed"):
            return None
        if not found:
            found.update(pair for pair in zip(sources.to_pylist(), hashes.to_pylist(), strict=True) if pair[1])
        filled = [row | {"source_sha256": row["source_sha256"] or found.get(row["source_id"])} for row in rows]
        return filled if filled != rows else None

    edit_ledger(storage, edit)
    rows: list[Row] = read_ledger(storage)[0].to_pylist()
    return rows


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
    storage: Storage,
    generation: Generation,
    table: pa.Table,
    hashes: pa.ChunkedArray,
    mask: BoolArray,
    target: _Target,
) -> dict[str, Any]:
    """Return what the receipt says of the removed sources, members and shards."""
    removed = table.select(["key", "source_id"]).append_column("sha256", hashes).filter(pa.array(mask))
    ends = np.cumsum([shard.samples for shard in generation.shards])
    touched = [shard for shard, part in zip(generation.shards, np.split(mask, ends[:-1]), strict=False) if part.any()]
    members: list[RemovedFile] = []
    sizes: Counter[str] = Counter()
    for shard in touched:
        if shard.is_in_place:
            continue  # none of their bytes are in the dataset
        facts = _facts(storage, shard.name, ["key", "member_offset", "member_size"])
        facts = facts.filter(pc.is_in(facts["key"], value_set=removed["key"].combine_chunks()))
        for key, offset, size in zip(*facts.to_pydict().values(), strict=True):
            data = memoryview(bytearray(size))
            storage.read_into(f"{shard.name}.tar", [(offset, data)])
            members.append(RemovedFile(sha256(data), size))
            sizes[key] += size

    samples: Counter[tuple[str | None, str | None]] = Counter()
    stored: Counter[tuple[str | None, str | None]] = Counter()
    for key, source, digest in zip(*removed.to_pydict().values(), strict=True):
        # Sources with equal bytes are one; a source without a hash is one by itself.
        which = (digest, None) if digest is not None else (None, source)
        samples[which] += 1
        stored[which] += sizes[key]
    every = [*((digest, None) for digest in sorted(target.hashes)), *((None, name) for name in sorted(target.unhashed))]
    sources = [RemovedFile(which[0], stored[which], samples[which]) for which in every]
    shards = tuple(ReplacedShard(shard.name, shard.sha256) for shard in touched)
    return {"sources": tuple(sources), "members": tuple(members), "shards": shards}


def _facts(storage: Storage, shard: str, columns: Sequence[str]) -> pa.Table:
    file = f"{shard}.parquet"
    return from_parquet(storage.read(file), file=file, columns=columns)
