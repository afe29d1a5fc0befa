"""A storage that keeps each file in memory after the first read."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import IO

from fastvid.storage import Storage
from fastvid.storage.protocol import Version, truncated_error


class ResidentStorage:
    """Caches the files of a storage in the memory of this process.

    `bytes_moved`: bytes read from `inner` so far.
    """

    copies = True

    def __init__(self, inner: Storage) -> None:
        self.inner = inner
        self.url, self.gap, self.concurrency, self.units = inner.url, inner.gap, inner.concurrency, None
        self.bytes_moved = 0
        self._files: dict[str, memoryview] = {}
        self._lock = threading.Lock()

    def map(self, name: str) -> memoryview:
        """Return a whole file, read-only."""
        with self._lock:
            found = self._files.get(name)
            if found is None:
                found = self._files[name] = memoryview(self.inner.read(name))
                self.bytes_moved += len(found)
            return found

    def read(self, name: str) -> bytes:
        """Return a whole file."""
        return bytes(self.map(name))

    def read_into(self, name: str, ranges: Sequence[tuple[int, memoryview]], version: Version | None = None) -> None:
        """Fill each writable view from its byte offset; a range of a certain version is not kept."""
        if version is not None:
            self.inner.read_into(name, ranges, version)
            return
        data = self.map(name)
        for offset, view in ranges:
            part = data[offset : offset + view.nbytes]
            if len(part) != view.nbytes:
                raise truncated_error(offset, view.nbytes, len(part), f"{self.url}/{name}")
            view.cast("B")[:] = part

    def version(self, name: str) -> Version | None:
        """Return the current version of a file, or None if it does not exist."""
        return self.inner.version(name)

    def size(self, name: str) -> int:
        """Return the size of a file in bytes."""
        return len(self.map(name))

    def keep_only(self, names: set[str]) -> None:
        """Drop all other files from memory."""
        with self._lock:
            self._files = {name: data for name, data in self._files.items() if name in names}

    def keep(self, name: str) -> bool:
        """See `Storage`: once it was read, a file is in memory."""
        self.map(name)
        return True

    def discard(self, name: str) -> bool:
        """See `Storage`."""
        with self._lock:
            self._files.pop(name, None)
        self.inner.discard(name)
        return True

    def exists(self, name: str) -> bool:
        """See `Storage`."""
        return name in self._files or self.inner.exists(name)

    def list(self, prefix: str = "") -> list[str]:
        """See `Storage`."""
        return self.inner.list(prefix)

    def write(self, name: str, data: bytes) -> None:
        """See `Storage`."""
        self.inner.write(name, data)

    def swap(self, name: str, data: bytes, expected: bytes | None) -> bool:
        """See `Storage`."""
        return self.inner.swap(name, data, expected)

    def create(self, name: str) -> AbstractContextManager[IO[bytes]]:
        """See `Storage`."""
        return self.inner.create(name)

    def delete(self, name: str) -> None:
        """See `Storage`."""
        self.inner.delete(name)

    def sweep(self) -> None:
        """See `Storage`."""
        self.inner.sweep()

    def close(self) -> None:
        """See `Storage`."""
        self.inner.close()
