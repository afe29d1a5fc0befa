"""The generations of a dataset: lists them, and deletes old ones with the files that only they refer to.

Deleting is safe while another change is running: garbage is listed first, then the commit record is swapped, and only
then are files deleted. A change that began before the swap fails with ConflictError instead of referring to deleted
files; one that begins after it uses file names that are not listed, because they contain the record's revision.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from fastvid.errors import JobError, StorageError
from fastvid.format.generations import Generation, Head, history, read_generation, read_head, swap_head
from fastvid.format.schema import GENERATIONS, LEDGER_PARTS, annotations_file, generation_file
from fastvid.runtime import faults
from fastvid.runtime.values import check_integers
from fastvid.storage import LocalStorage, Storage
from fastvid.storage.protocol import Version

# File names made by fastvid; any other file in the folder belongs to the user and is never deleted.
_SHARD_FILE: Final = re.compile(r"(data-\d{6}(?:-\d+)?)\.(?:tar|files|idx|parquet|pkt|signals\.parquet)")
_ANNOTATIONS: Final = re.compile(r"annotations-(\d{6})\.parquet")
_GENERATION: Final = re.compile(rf"{GENERATIONS}/(\d{{6}})\.json")


@dataclass(frozen=True, slots=True)
class Garbage:
    """Files and generations that no kept generation refers to."""

    kept: tuple[int, ...]
    dropped: tuple[int, ...]
    files: Mapping[str, Version]  # the deleted files by name, as they were listed

    @property
    def bytes(self) -> int:
        """Total size of the files in bytes."""
        return sum(version.size for version in self.files.values())


def list_generations(storage: Storage) -> list[dict[str, Any]]:
    """Return the generations of a dataset that can be opened, newest first, each as one JSON object.

    ``note`` is what was done, such as "remove 3 samples"; ``samples`` and ``removed`` are the numbers of samples that a
    generation shows and hides, None if an earlier fastvid wrote it.
    """
    head = read_head(storage)
    found = list(history(storage, head))
    found += _before(storage, found[-1].number)
    return [_entry(one, [tag for tag in sorted(head.tags) if head.tags[tag] == one.number]) for one in found]


def _before(storage: Storage, oldest: int) -> Iterator[Generation]:
    """Yield kept generations with a number below `oldest`, newest first.

    They cannot be found by following the chain of generations, because those between were deleted.
    """
    try:
        names = storage.list(f"{GENERATIONS}/")
    except StorageError:  # a web server does not list files
        return
    numbers = [int(match[1]) for name in names if (match := _GENERATION.fullmatch(name))]
    yield from (read_generation(storage, number)[1] for number in sorted(numbers, reverse=True) if number < oldest)


def _entry(generation: Generation, tags: Sequence[str]) -> dict[str, Any]:
    removed = generation.removed
    return {
        **{name: getattr(generation, name) for name in ("number", "time", "note", "reason")},
        "samples": None if removed is None else generation.num_samples - removed,
        "removed": removed,
        "shards": len(generation.shards),
        "bytes": sum(shard.bytes for shard in generation.shards),
        "tags": tuple(tags),
    }


def collect_garbage(storage: Storage, *, keep_generations: int = 1, keep: Collection[int] = ()) -> Garbage:
    """Delete all generations but the newest and those to `keep`, and every file that only they refer to."""
    sweep(storage)
    head = read_head(storage)
    garbage = find_garbage(storage, keep_generations=keep_generations, keep=keep, head=head)
    # After the shards were listed: a job records itself before it writes one, and one that ended has swapped the head.
    if storage.list(f"{LEDGER_PARTS}/"):
        raise JobError(
            "a sharding job is unfinished here; no generation contains its shards yet",
            file=storage.url,
            hint="run the job again until it is complete",
        )
    if garbage.files:
        swap_head(storage, head, dataset_id=head.dataset_id, generation=head.generation)
    for name in sorted(garbage.files, key=_deletion_order):
        found = storage.version(name)
        if found is None or not found.same(garbage.files[name]):
            continue  # while this process was stopped, another one deleted the file and gave its name again
        with contextlib.suppress(StorageError):
            storage.discard(name)  # also this machine's cached copy, which is found by the version of the file
        storage.delete(name)
        faults.reach("gc")
    return garbage


def _deletion_order(name: str) -> tuple[int, str]:
    """Return the sort key of a file to delete: annotations first, then records of generations, then shards.

    Without its annotations a generation cannot be opened, so none with deleted shards can. A record reserves the
    generation's number, so it must outlive the annotations.
    """
    return (0 if _ANNOTATIONS.fullmatch(name) else 1 if _GENERATION.fullmatch(name) else 2), name


def find_garbage(
    storage: Storage, *, keep_generations: int = 1, keep: Collection[int] = (), head: Head | None = None
) -> Garbage:
    """Return what `collect_garbage` would delete. `head`: the commit record, if it is known."""
    head = head or read_head(storage)
    check_integers(1, keep_generations=keep_generations)
    names = storage.list()
    wanted = {*head.tags.values(), *keep}  # fastvid 0.2 gave generations tags
    newest = list(history(storage, head))
    kept = [g for place, g in enumerate(newest) if place < keep_generations or g.number in wanted]
    kept += [read_generation(storage, number)[1] for number in sorted(wanted - {g.number for g in newest})]
    needed = {file for g in kept for file in (generation_file(g.number), annotations_file(g.number))}
    stems = {shard.name for generation in kept for shard in generation.shards}
    files, dropped = {}, set()
    for name in names:
        shard, record = _SHARD_FILE.fullmatch(name), _GENERATION.fullmatch(name) or _ANNOTATIONS.fullmatch(name)
        if (shard and shard[1] not in stems) or (record and name not in needed):
            if (found := storage.version(name)) is None:
                continue  # another process deletes the same files
            files[name] = found
            if record:
                dropped.add(int(record[1]))
    return Garbage(tuple(g.number for g in kept), tuple(sorted(dropped, reverse=True)), files)


def sweep(storage: Storage) -> None:
    """Delete half-written files of killed commands, but not those of running ones."""
    if isinstance(storage, LocalStorage):
        storage.sweep_dead()
