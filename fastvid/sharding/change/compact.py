"""Giving space back: rewriting shards without their removed samples, and deleting what nothing refers to any more.

`compact_shards` writes new shards beside the old ones and makes a generation of them; the old ones stay for jobs that
have pinned an older generation. `collect_garbage` deletes old generations and what only they refer to.

Neither can hurt a change that runs beside it: garbage is listed first, then the commit record is swapped, and only then
is anything deleted. A change that began before the swap fails with ConflictError instead of referring to deleted files;
one that begins after it uses names that are not on the list, because they carry the record's revision.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, islice
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from fastvid.errors import FormatError, JobError, UsageError
from fastvid.format.generations import (
    Head,
    ShardRecord,
    commit_generation,
    history,
    read_annotations,
    read_head,
    swap_head,
)
from fastvid.format.schema import FOREIGN, GENERATIONS, LEDGER_PARTS, annotations_file, generation_file
from fastvid.format.shard import write_shard
from fastvid.format.tar import read_members
from fastvid.runtime import faults
from fastvid.runtime.hashing import sha256
from fastvid.runtime.units import things
from fastvid.sharding.job.scratch import short_scratch
from fastvid.storage import Storage

_LOG = logging.getLogger(__name__)

# Names that fastvid gives; anything else in the folder belongs to its owner and is never deleted.
_SHARD_FILE: Final = re.compile(r"(data-\d{6}(?:-\d+)?)\.(?:tar|idx|parquet|pkt)")
_ANNOTATIONS: Final = re.compile(r"annotations-(\d{6})\.parquet")
_GENERATION: Final = re.compile(rf"{GENERATIONS}/(\d{{6}})\.json")


@dataclass(frozen=True, slots=True)
class Compacted:
    """What `compact_shards` did.

    Attributes:
        generation: The generation that is current now.
        rewritten: Shards that were written anew, old name to new name; None where no sample is left.
        samples: Removed samples that the new generation no longer holds.
        bytes: Bytes of tars that it needs less.
    """

    generation: int
    rewritten: Mapping[str, str | None]
    samples: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Garbage:
    """What no kept generation refers to.

    Attributes:
        kept: Numbers of the generations that stay, newest first.
        dropped: Numbers of the generations that go, newest first; interrupted commits among them.
        files: Names and bytes of the files that go.
    """

    kept: tuple[int, ...]
    dropped: tuple[int, ...]
    files: Mapping[str, int]

    @property
    def bytes(self) -> int:
        """Bytes of all files."""
        return sum(self.files.values())


def compact_shards(storage: Storage, *, progress: Callable[[int, int], None] | None = None) -> Compacted:
    """Rewrites the shards that hold removed samples, without them. Kept samples keep their bytes and order.

    Args:
        storage: The dataset's folder.
        progress: Called before each shard with shards done and shards to do.

    Raises:
        UsageError: A shard to be rewritten is a tar of another tool; nothing is done.
        FormatError: A shard to be rewritten is damaged; copying it would give the damage a fresh checksum.
        ConflictError: Someone else has changed the dataset in the meantime; nothing is done.
        StorageError: There is no dataset, or a file cannot be read or written.
    """
    head = read_head(storage)
    generation = next(history(storage, head))
    table = read_annotations(storage, generation.number)
    removed = table["removed"].to_numpy()
    ends = np.cumsum([shard.samples for shard in generation.shards])
    parts = np.split(removed, ends[:-1]) if len(ends) else []
    todo = sum(bool(part.any()) for part in parts)
    if not todo:
        return Compacted(generation.number, {}, 0, 0)
    _check_ours(generation.shards, parts)
    shards: list[ShardRecord] = []
    rewritten: dict[str, str | None] = {}
    for shard, part in zip(generation.shards, parts, strict=True):
        if not part.any():
            shards.append(shard)
            continue
        if progress is not None:
            progress(len(rewritten), todo)
        new = _rewrite(storage, shard, ~part, head, generation.streams)
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


def _check_ours(shards: Sequence[ShardRecord], removed: Sequence[npt.NDArray[np.bool_]]) -> None:
    """Refuses to write anew what another tool wrote: its tars hold members that fastvid does not know."""
    foreign = [
        shard.name
        for shard, part in zip(shards, removed, strict=True)
        if part.any() and shard.profile.get("name") == FOREIGN
    ]
    if foreign:
        raise UsageError(
            f"{things(len(foreign), 'shard')} with removed samples are tars of another tool, which stay as they are",
            shard=foreign[0],
            hint="the samples stay hidden; to be rid of their bytes, encode the tars with `fastvid shard` and remove"
            " them there",
        )


def find_garbage(storage: Storage, *, keep_generations: int = 1) -> Garbage:
    """What `collect_garbage` would delete.

    Raises:
        UsageError: `keep_generations` is below one.
        StorageError: There is no dataset.
        FormatError: A generation's record is broken; what it refers to is not known.
    """
    return _find(storage, read_head(storage), keep_generations)


def collect_garbage(storage: Storage, *, keep_generations: int = 1) -> Garbage:
    """Deletes every generation but the newest ones, and every file that only they refer to.

    Raises:
        UsageError: `keep_generations` is below one.
        JobError: A sharding job is unfinished here; its shards belong to no generation yet.
        ConflictError: Someone else has changed the dataset in the meantime; nothing is deleted.
        StorageError: There is no dataset, or a file cannot be deleted.
    """
    if storage.list(f"{LEDGER_PARTS}/"):
        raise JobError(
            "a sharding job is unfinished here; its shards belong to no generation yet",
            file=storage.url,
            hint="run the job again until it ends",
        )
    head = read_head(storage)
    garbage = _find(storage, head, keep_generations)
    if not garbage.files:
        return garbage
    swap_head(storage, head, dataset_id=head.dataset_id, generation=head.generation)
    for name in sorted(garbage.files, key=_deletion_order):
        storage.delete(name)
        faults.reach("gc")
    return garbage


def _deletion_order(name: str) -> tuple[int, str]:
    """Annotations first, so that no generation can be opened whose shards go; then records, which hold their numbers
    against reuse until their annotations are gone; then shards."""
    return (0 if _ANNOTATIONS.fullmatch(name) else 1 if _GENERATION.fullmatch(name) else 2), name


def _find(storage: Storage, head: Head, keep_generations: int) -> Garbage:
    if keep_generations < 1:
        raise UsageError(f"{keep_generations} generations cannot be kept", hint="the current one always stays")
    names = storage.list()
    kept = list(islice(history(storage, head), keep_generations))
    needed = {file for g in kept for file in (generation_file(g.number), annotations_file(g.number))}
    stems = {shard.name for generation in kept for shard in generation.shards}
    files, dropped = {}, set()
    for name in names:
        shard, record = _SHARD_FILE.fullmatch(name), _GENERATION.fullmatch(name) or _ANNOTATIONS.fullmatch(name)
        if (shard and shard[1] not in stems) or (record and name not in needed):
            files[name] = storage.size(name)
            if record:
                dropped.add(int(record[1]))
    return Garbage(tuple(g.number for g in kept), tuple(sorted(dropped, reverse=True)), files)


def _rewrite(
    storage: Storage, shard: ShardRecord, keep: npt.NDArray[np.bool_], head: Head, streams: tuple[str, ...]
) -> ShardRecord | None:
    """Writes the kept samples of a shard under a new name; None if there are none."""
    if not keep.any():
        return None
    view = storage.map(f"{shard.name}.tar")
    if sha256(view) != shard.sha256:
        raise FormatError(
            "tar differs from its checksum; copying it would hide the damage",
            shard=shard.name,
            hint="`fastvid verify` says what is damaged",
        )
    # The revision makes the name new for every state of the dataset; two who start from one state write equal bytes.
    name = f"{re.sub('-[0-9]+$', '', shard.name) if shard.name.count('-') > 1 else shard.name}-{head.revision}"
    _LOG.info("%s: %d of %d samples stay, as %s", shard.name, int(keep.sum()), shard.samples, name)
    with short_scratch(storage) as scratch:
        digest = write_shard(storage, name, _kept(view, keep, shard), streams=streams, scratch=scratch)
    return replace(shard, name=name, bytes=digest.bytes, sha256=digest.sha256, samples=digest.samples)


def _kept(
    view: memoryview, keep: npt.NDArray[np.bool_], shard: ShardRecord
) -> Iterator[tuple[str, Mapping[str, bytes]]]:
    groups = [(key, list(members)) for key, members in groupby(read_members(view), key=lambda member: member.key)]
    if len(groups) != len(keep):
        raise FormatError(f"tar holds {len(groups)} samples, the generation says {len(keep)}", shard=shard.name)
    for (key, members), stays in zip(groups, keep.tolist(), strict=True):
        if stays:
            yield key, {member.suffix: bytes(view[member.offset : member.offset + member.size]) for member in members}
