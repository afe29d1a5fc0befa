"""The interface that every storage implements."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import IO, Final, Protocol

from fastvid.errors import StorageError, UsageError
from fastvid.storage.unit_cache import UnitCache
from fastvid.storage.version import Version

REPLACED: Final = "file was replaced while it was being read"
CHANGED: Final = "file is not the version that was indexed"


class Storage(Protocol):
    """A folder of immutable files and a few that are swapped atomically. Thread-safe and picklable.

    Errors are StorageError and name the file; those that are no fault of the file are UnavailableError.

    Attributes:
        url: The folder.
        gap: Bytes that cost as much as one more range: ranges closer than this are better read as one.
        copies: Whether `map` keeps a copy in memory, so that all later reads of the file are free.
        units: Cache of this node for the bytes of videos; None if they are read where they are.
        concurrency: Number of concurrent reads that pays off; 1 if sequential reads are as fast.
    """

    url: str
    copies: bool

    @property
    def gap(self) -> int: ...

    @property
    def concurrency(self) -> int: ...

    @property
    def units(self) -> UnitCache | None: ...

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

    def version(self, name: str) -> Version | None:
        """Return the current version of `name`, or None if the file does not exist."""
        ...

    def read(self, name: str) -> bytes:
        """Return the current content of `name`."""
        ...

    def read_into(self, name: str, ranges: Sequence[tuple[int, memoryview]], version: Version | None = None) -> None:
        """Read several ranges, given as (byte offset, writable view to fill).

        The bytes of one call never mix two versions of the file.

        Args:
            name: The file.
            ranges: What to read.
            version: The version that the file must have; by default any.

        Raises:
            StorageError: If the file is missing or ends inside a range, is not of the version, or, of any version, is a
                remote file that was replaced since this storage first read it.
        """
        ...

    def map(self, name: str) -> memoryview:
        """Return all of `name`, mapped read-only or fetched once. For files that do not change: a process that reads a
        mapped local file dies of SIGBUS if the file is cut in the meantime."""
        ...

    def keep(self, name: str) -> bool:
        """Fetch a file that does not change once for all processes of this node, so that reading parts of it is cheap.

        Returns:
            Whether parts of it are now cheap to read; False for a remote file without a node cache.
        """
        ...

    def discard(self, name: str) -> bool:
        """Forget everything known of a file: copies in memory and in the node cache, and open handles.

        Returns:
            Whether anything was known, so that reading the file again may return other bytes.
        """
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


def changed_error(file: object) -> StorageError:
    """Return the error for a file that is no longer the version that was indexed."""
    return StorageError(
        CHANGED,
        file=file,
        hint="restore it, or run `fastvid index DIR` on the dataset to index changed files again",
    )
