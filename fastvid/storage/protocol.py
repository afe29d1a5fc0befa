"""What every storage promises."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Sequence
from typing import IO, Final, Protocol

from fastvid.errors import StorageError, UsageError

REPLACED: Final = "file was replaced while it was being read"


class Storage(Protocol):
    """A folder of immutable files and a few that are swapped atomically. Safe to use from many threads.

    A storage travels to another process by pickling. Errors are StorageError and name the file.

    Attributes:
        url: The folder.
        gap: Bytes that cost as much as one more range: ranges closer than this are better read as one.
        concurrency: Reads that it is worth to make at once; 1 where one after the other is as good.
    """

    url: str
    gap: int

    @property
    def concurrency(self) -> int: ...

    def list(self, prefix: str = "") -> list[str]:
        """Names that start with `prefix`, sorted. Files being written are not listed.

        Raises:
            StorageError: The storage cannot list, as plain HTTP.
        """
        ...

    def exists(self, name: str) -> bool:
        """Whether `name` is a complete file."""
        ...

    def size(self, name: str) -> int:
        """Bytes of `name`."""
        ...

    def read(self, name: str) -> bytes:
        """All of `name` as it is now."""
        ...

    def read_into(self, name: str, ranges: Sequence[tuple[int, memoryview]]) -> None:
        """Fills each writable view from the byte offset beside it.

        The bytes of one call never mix two versions of the file.

        Raises:
            StorageError: The file is missing or ends inside a range, or a remote one was replaced since it was first
                read here.
        """
        ...

    def map(self, name: str) -> memoryview:
        """All of `name`, read-only, paged in on use or fetched once. For files that do not change."""
        ...

    def write(self, name: str, data: bytes) -> None:
        """Puts `data` at `name` atomically: a reader sees the old file or the new one, whole."""
        ...

    def swap(self, name: str, data: bytes, expected: bytes | None) -> bool:
        """Puts `data` at `name` if `expected` is there now, None standing for no file. Of two at once, one succeeds.

        Returns:
            Whether it did; if not, nothing has changed.
        """
        ...

    def create(self, name: str) -> contextlib.AbstractContextManager[IO[bytes]]:
        """A file that appears at `name` when the block ends, and not at all when it raises."""
        ...

    def delete(self, name: str) -> None:
        """Removes `name`; absent is fine."""
        ...

    def sweep(self) -> None:
        """Removes what interrupted writers left behind. Only for a folder that nobody is writing to."""
        ...

    def close(self) -> None:
        """Lets go of files, connections and threads; the storage opens them anew when it is used again."""
        ...


SPARSE_BYTES: Final = 2**20
"""A map up to this size is read whole by one or two read-aheads, which is faster than page by page."""


def advise_sparse(view: memoryview) -> None:
    """Says that a map will be looked at in a few places only.

    Without it the first look at a page of a large file reads megabytes around it: 25 ms instead of 0.4 on a disk whose
    read-ahead is 8 MB, as cloud images set it (measured).
    """
    if isinstance(view.obj, mmap.mmap) and len(view) > SPARSE_BYTES:
        view.obj.madvise(mmap.MADV_RANDOM)


def check_name(name: str, url: str) -> str:
    """The name, when it stays inside its folder.

    Raises:
        UsageError: It does not.
    """
    if name.startswith("/") or ".." in name.split("/"):
        raise UsageError(f"name {name!r} leaves its folder", file=url)
    return name


def ends_inside(offset: int, length: int, got: int, file: object) -> StorageError:
    """The error for a range that the file does not fill."""
    return StorageError(
        f"file ends inside the range {offset}+{length} after {got} bytes",
        file=file,
        hint="the file was cut or replaced; `fastvid verify` tells which",
    )


def replaced(file: object) -> StorageError:
    """The error for a file that is another one than before."""
    return StorageError(REPLACED, file=file, hint="open the dataset again to read the new version")
