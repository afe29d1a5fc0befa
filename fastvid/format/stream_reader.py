"""Reads the bytes of one stream of a sample."""

from __future__ import annotations

from collections.abc import Sequence

from fastvid.storage import Storage


class StreamReader:
    """Reads one stream of a sample: called with offsets in the stream, each with the writable view to fill from there.

    Args:
        storage: The dataset's folder.
        tar: Name of the file there.
        start: First byte of the stream in the tar.
        size: Bytes of the stream.

    Raises:
        StorageError: The tar is missing, or ends inside a range.

    Attributes:
        size: Bytes of the stream.
        requests: Ranges that were read.
    """

    __slots__ = ("_start", "_storage", "_tar", "requests", "size")

    def __init__(self, storage: Storage, tar: str, start: int, size: int) -> None:
        self._storage, self._tar, self._start = storage, tar, start
        self.size, self.requests = size, 0

    def __call__(self, ranges: Sequence[tuple[int, memoryview]]) -> None:
        self.requests += len(ranges)
        self._storage.read_into(self._tar, [(self._start + offset, view) for offset, view in ranges])
