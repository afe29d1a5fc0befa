"""Frees space: rewrites shards without their removed samples, and deletes files that nothing refers to.

`compact_shards` writes new shards next to the old ones and commits a generation with them; the old ones stay for jobs
that have pinned an older generation. `collect_garbage` deletes old generations and the files that only they refer to.

Both are safe while another change is running: garbage is listed first, then the commit record is swapped, and only then
are files deleted. A change that began before the swap fails with ConflictError instead of referring to deleted files;
one that begins after it uses file names that are not listed, because they contain the record's revision.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from fastvid.errors import FormatError, UsageError
from fastvid.format.annotations import KeptSignals, join_signals
from fastvid.format.dataset import listed_samples, write_listed
from fastvid.format.generations import (
    Generation,
    Head,
    ShardRecord,
    commit_generation,
    history,
    read_annotations,
    read_head,
)
from fastvid.format.schema import FOREIGN, later_stem
from fastvid.format.shard import open_shard, write_shard
from fastvid.format.tar import read_members
from fastvid.runtime import faults
from fastvid.runtime.values import sha256, things
from fastvid.sharding.change.history import sweep
from fastvid.sharding.job.lock import short_scratch
from fastvid.sharding.job.restore import annotate_members, dataset_record, is_current, with_record
from fastvid.storage import Storage

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Compacted:
    """The result of `compact_shards`."""

    generation: int
    rewritten: Mapping[str, str | None]
    samples: int  # number of removed samples that the new generation no longer contains
    bytes: int  # bytes saved in tars


def compact_shards(
    storage: Storage, *, annotations: bool = False, progress: Callable[[int, int], None] | None = None
) -> Compacted:
    """Rewrite the shards that contain removed samples without them. Kept samples keep their streams and order.

    The annotations in rewritten tars are the current ones.
    """
    sweep(storage)
    head = read_head(storage)
    generation = next(history(storage, head))
    table = read_annotations(storage, generation)
    removed = table["removed"].to_numpy()
    ends = np.cumsum([shard.samples for shard in generation.shards])
    parts = np.split(removed, ends[:-1]) if len(ends) else []
    _check_ours(generation.shards, parts)
    tables = [
        table.slice(end - shard.samples, shard.samples) for shard, end in zip(generation.shards, ends, strict=True)
    ]
    chosen = [
        bool(part.any()) or (annotations and _is_outdated(storage, shard, rows, generation))
        for shard, part, rows in zip(generation.shards, parts, tables, strict=True)
    ]
    todo = sum(chosen)
    if not todo:
        return Compacted(generation.number, {}, 0, 0)
    shards: list[ShardRecord] = []
    rewritten: dict[str, str | None] = {}
    for shard, part, rows, is_chosen in zip(generation.shards, parts, tables, chosen, strict=True):
        if not is_chosen:
            shards.append(shard)
            continue
        if progress is not None:
            progress(len(rewritten), todo)
        new = _rewrite(storage, shard, ~part, head, generation, rows)
        rewritten[shard.name] = new.name if new else None
        shards += [new] if new else []
        faults.reach("compact")
    made = replace(
        generation,
        number=generation.number + 1,
        shards=tuple(shards),
        note=f"compact {things(todo, 'shard')}, {things(int(removed.sum()), 'removed sample')}",
    )
    committed = commit_generation(storage, head.dataset_id, made, table.filter(pa.array(~removed)), head=head)
    saved = sum(shard.bytes for shard in generation.shards) - sum(shard.bytes for shard in shards)
    return Compacted(committed.number, rewritten, int(removed.sum()), saved)


def _is_outdated(storage: Storage, shard: ShardRecord, rows: pa.Table, generation: Generation) -> bool:
    """Return whether the tar of a shard contains other annotations than the current ones."""
    if shard.profile.get("name") == FOREIGN or shard.is_in_place:
        return False
    samples = kept_samples(map_checked(storage, shard), np.ones(shard.samples, np.bool_), shard)
    return not all(
        is_current(members, row, generation.classes)
        for (_, members), row in zip(samples, rows.to_pylist(), strict=True)
    )


def _check_ours(shards: Sequence[ShardRecord], removed: Sequence[npt.NDArray[np.bool_]]) -> None:
    """Refuse to rewrite shards of other tools: their tars contain members that fastvid does not know."""
    foreign = [
        shard.name
        for shard, part in zip(shards, removed, strict=True)
        if part.any() and shard.profile.get("name") == FOREIGN
    ]
    if foreign:
        raise UsageError(
            f"{things(len(foreign), 'shard')} with removed samples are tars of another tool, which are never rewritten",
            shard=foreign[0],
            hint="encode the tars with `fastvid shard` and remove the samples there to free their bytes; until then"
            " they stay hidden",
        )


def _rewrite(
    storage: Storage,
    shard: ShardRecord,
    keep: npt.NDArray[np.bool_],
    head: Head,
    generation: Generation,
    table: pa.Table,
) -> ShardRecord | None:
    """Write the kept samples of a shard under a new name; None if there are none."""
    if not keep.any():
        return None
    # The revision makes the name unique for each state of the dataset; two runs from one state write equal bytes.
    name = later_stem(shard.name, head.revision)
    _LOG.info("%s: keeping %d of %d samples, as %s", shard.name, int(keep.sum()), shard.samples, name)
    number = generation.shards.index(shard)
    signals = join_signals(storage, name, [KeptSignals(storage, shard, table["num_frames"].to_pylist(), keep)])
    shard = replace(shard, signals=signals)
    if shard.is_in_place:
        listed = zip(listed_samples(open_shard(storage, generation, number)), keep.tolist(), strict=True)
        digest = write_listed(storage, name, (sample for sample, stays in listed if stays), generation.streams)
        return replace(shard, name=name, bytes=digest.bytes, sha256=digest.sha256, samples=digest.samples)
    view = map_checked(storage, shard)
    # Labels and captions may have changed since the shard was written.
    kept = zip(kept_samples(view, keep, shard), table.filter(pa.array(keep)).to_pylist(), strict=True)
    samples = ((key, annotate_members(members, row, generation.classes)) for (key, members), row in kept)
    record = dataset_record(
        generation.number + 1,
        streams=generation.streams,
        classes=generation.classes,
        extras=generation.extras,
        profile=shard.profile,
        encoder=shard.encoder,
        table=table,
    )
    with short_scratch(storage) as scratch:
        digest = write_shard(storage, name, with_record(samples, record), streams=generation.streams, scratch=scratch)
    return replace(shard, name=name, bytes=digest.bytes, sha256=digest.sha256, samples=digest.samples)


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
