"""The interface that every storage implements."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Sequence
from typing import IO, Final, Protocol

from fastvid.errors import StorageError, UsageError

REPLACED: Final = "file was replaced while it was being read"


class Storage(Protocol):
    """A folder of immutable files and a few that are swapped atomically. Thread-safe and picklable.

    Errors are StorageError and name the file.

    Attributes:
        url: The folder.
        gap: Bytes that cost as much as one more range: ranges closer than this are better read as one.
        concurrency: Number of concurrent reads that pays off; 1 if sequential reads are as fast.
    """

    url: str
    gap: int

    @property
    def concurrency(self) -> int: ...

    def list(self, prefix: str = "") -> list[str]:
        """Return the names that start with `prefix`, sorted. Files being written are not listed.

        Raises:
            StorageError: If the storage cannot list, as over plain HTTP.
        """
        ...

    def exists(self, name: str) -> bool:
        """Return whether `name` is a complete file."""
        ...

    def size(self, name: str) -> int:
        """Return the size of `name` in bytes."""
        ...

    def read(self, name: str) -> bytes:
        """Return the current content of `name`."""
        ...

    def read_into(self, name: str, ranges: Sequence[tuple[int, memoryview]]) -> None:
        """Read several ranges, given as (byte offset, writable view to fill).

        The bytes of one call never mix two versions of the file.

        Raises:
            StorageError: If the file is missing or ends inside a range, or a remote file was replaced since this
                storage first read it.
        """
        ...

    def map(self, name: str) -> memoryview:
        """Map all of `name` read-only, paged in on use or fetched once. For files that do not change."""
        ...

    def write(self, name: str, data: bytes) -> None:
        """Write `data` to `name` atomically: a reader sees the whole old file or the whole new one."""
        ...

    def swap(self, name: str, data: bytes, expected: bytes | None) -> bool:
        """Write `data` to `name` if its content is `expected` (None: no file exists).

        Of two concurrent swaps one succeeds.

        Returns:
            Whether the data was written; if not, nothing has changed.
        """
        ...

    def create(self, name: str) -> contextlib.AbstractContextManager[IO[bytes]]:
        """Open a new file that appears at `name` when the block ends, and not at all if the block raises."""
        ...

    def delete(self, name: str) -> None:
        """Delete `name` if it exists."""
        ...

    def sweep(self) -> None:
        """Delete temporary files of interrupted writers. Call only while nobody writes to the folder."""
        ...

    def close(self) -> None:
        """Release files, connections and threads; the storage reopens them when it is used again."""
        ...


SPARSE_BYTES: Final = 2**20
"""The kernel reads a map up to this size in one or two read-aheads, which is faster than page by page."""


def advise_sparse(view: memoryview) -> None:
    """Tell the kernel that a map will be read sparsely.

    Without this, the first access to a page of a large file reads megabytes around it: 25 ms instead of 0.4 on a disk
    with a read-ahead of 8 MB, the default of cloud images (measured).
    """
    if isinstance(view.obj, mmap.mmap) and len(view) > SPARSE_BYTES:
        view.obj.madvise(mmap.MADV_RANDOM)


def check_name(name: str, url: str) -> str:
    """Return `name` after checking that it stays inside its folder.

    Raises:
        UsageError: If the name leads outside its folder.
    """
    if name.startswith("/") or ".." in name.split("/"):
        raise UsageError(f"name {name!r} leads outside its folder", file=url)
    return name


def truncated_error(offset: int, length: int, got: int, file: object) -> StorageError:
    """Return the error for a file that ends inside a range."""
    return StorageError(
        f"file ends inside the range {offset}+{length} after {got} bytes",
        file=file,
        hint="run `fastvid verify`: the file was truncated or replaced",
    )


def replaced_error(file: object) -> StorageError:
    """Return the error for a file that was replaced while it was being read."""
    return StorageError(REPLACED, file=file, hint="open the dataset again to read the new version")
