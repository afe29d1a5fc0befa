"""Copies a dataset to another folder or store, and checks every file by its SHA-256."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from fastvid.errors import ConflictError, FormatError, UsageError
from fastvid.format.commit_record import read_head
from fastvid.format.generations import Generation, history
from fastvid.format.schema import (
    BLOCKED,
    DATASET_JSON,
    LEDGER,
    REMOVALS,
    annotations_file,
    generation_file,
)
from fastvid.runtime import faults
from fastvid.runtime.progress import Progress
from fastvid.storage import Storage
from fastvid.storage.transfer import read_pieces, sha256_of


@dataclass(frozen=True, slots=True)
class DatasetCopy:
    """The result of `copy_dataset`."""

    generations: tuple[int, ...]
    copied: int
    bytes: int  # their size in bytes
    present: int


def copy_dataset(source: Storage, target: Storage, *, every: bool = False, concurrency: int = 4) -> DatasetCopy:
    """Copy the current generation and those with a tag, or every one; the commit record last, so half is no dataset.

    Tars and annotations are checked against the SHA-256 in their generation, other files against the source, and each
    file is read back from the target. Calling again resumes: files that are complete are kept after the same check.
    """
    if source.url.rstrip("/") == target.url.rstrip("/"):
        raise UsageError("the copy would be the dataset itself", file=target.url, hint="choose another folder")
    head = read_head(source)
    if target.exists(DATASET_JSON) and target.read(DATASET_JSON) != head.content:
        raise UsageError(
            "the target contains another dataset, or another state of this one",
            file=target.url,
            hint="choose a new folder; nothing was copied",
        )
    tagged = set(head.tags.values())
    generations = [
        generation
        for place, generation in enumerate(history(source, head))
        if every or place == 0 or generation.number in tagged
    ]
    files = _files(source, generations)
    progress, copied, copied_bytes = Progress(len(files), what="files"), 0, 0
    pool = ThreadPoolExecutor(concurrency, thread_name_prefix="copy")
    try:
        for size in pool.map(lambda item: _copy(source, target, *item), files.items()):
            progress.advance()
            copied, copied_bytes = copied + (size is not None), copied_bytes + (size or 0)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
    progress.finish()
    if not target.exists(DATASET_JSON) and not target.swap(DATASET_JSON, head.content, None):
        raise ConflictError(
            "another process created a dataset in the target", file=target.url, hint="choose a new folder"
        )
    return DatasetCopy(tuple(g.number for g in generations), copied, copied_bytes, len(files) - copied)


def _files(source: Storage, generations: list[Generation]) -> dict[str, str | None]:
    """Return the SHA-256 of every file but the commit record, None where only the source knows it."""
    files: dict[str, str | None] = {}
    for generation in generations:
        for shard in generation.shards:
            files |= {f"{shard.name}.{suffix}": None for suffix in shard.suffixes}
            files[shard.data] = shard.sha256
        files[annotations_file(generation.number)] = generation.annotations_sha256
        files[generation_file(generation.number)] = None
    files |= {name: None for name in (LEDGER, BLOCKED) if source.exists(name)}
    return files | dict.fromkeys(source.list(f"{REMOVALS}/"))


def _copy(source: Storage, target: Storage, name: str, expected: str | None) -> int | None:
    """Copy a file and read it back; return its size, or None if the target had it already."""
    same_size = target.exists(name) and target.size(name) == source.size(name)
    if same_size and sha256_of(target, name) == (expected or sha256_of(source, name)):
        return None
    # The handle of a file that is replaced below would be that of the old one.
    target.discard(name)
    digest, size = hashlib.sha256(), 0
    with target.create(name) as file:
        for piece in _hashed(read_pieces(source, name), digest):
            file.write(piece)
            size += len(piece)
            faults.reach("copy")
        if expected not in (None, digest.hexdigest()):
            raise FormatError(
                f"{name} differs from the SHA-256 in the generation",
                file=source.url,
                hint="run `fastvid verify` on the source; the copy can be resumed",
            )
    if sha256_of(target, name) != digest.hexdigest():
        target.delete(name)
        raise FormatError(
            f"{name} has other bytes after the copy than before it",
            file=target.url,
            hint="run the command again; check the disk if it happens twice",
        )
    return size


def _hashed(pieces: Iterator[bytes], digest: hashlib._Hash) -> Iterator[bytes]:
    for piece in pieces:
        digest.update(piece)
        yield piece
