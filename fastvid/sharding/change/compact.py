"""Rewrites shards without their removed samples.

The new shards lie next to the old ones, and a generation with them is committed; the old ones stay for jobs that have
pinned an older generation, until `fastvid.sharding.change.history.collect_garbage` deletes them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa

from fastvid.errors import UsageError
from fastvid.format.generations import ShardRecord, commit_generation, history, read_annotations, read_head
from fastvid.format.schema import FOREIGN, later_stem
from fastvid.runtime import faults
from fastvid.runtime.values import things
from fastvid.sharding.change.history import sweep
from fastvid.sharding.change.repack import Piece, kept_samples, map_checked, pieces_of, repack
from fastvid.sharding.job.restore import is_current
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
    pieces = pieces_of(storage, generation, ~removed)
    _check_ours(pieces)
    todo = {piece.number for piece in pieces if not piece.is_whole or (annotations and _is_outdated(piece, table))}
    if not todo:
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
        if progress is not None:
            progress(len(rewritten), len(todo))
        rewritten[shard.name] = None
        if piece.samples:
            # Unique for each state of the dataset, by its revision; two runs from one state write equal bytes.
            name = later_stem(shard.name, head.revision)
            _LOG.info("%s: keeping %d of %d samples, as %s", shard.name, piece.samples, shard.samples, name)
            shards.append(repack(storage, name, [piece], made, piece.rows(table)))
            rewritten[shard.name] = name
        faults.reach("compact")
    made = replace(made, shards=tuple(shards))
    committed = commit_generation(storage, head.dataset_id, made, table.filter(pa.array(~removed)), head=head)
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
    """Refuse to rewrite shards of other tools: their tars contain members that fastvid does not know."""
    changed = (piece.shard for piece in pieces if not piece.is_whole)
    foreign = [shard.name for shard in changed if shard.profile.get("name") == FOREIGN]
    if foreign:
        raise UsageError(
            f"{things(len(foreign), 'shard')} with removed samples are tars of another tool, which are never rewritten",
            shard=foreign[0],
            hint="encode the tars with `fastvid shard` and remove the samples there to free their bytes; until then"
            " they stay hidden",
        )
