"""Reads the bytes of one member of a sample: ranges of a video stream, or checked blocks of its audio."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from fastvid.errors import ChecksumError, FormatError
from fastvid.format.schema import AUDIO_BLOCK
from fastvid.storage import Storage
from fastvid.storage.version import Version

T = TypeVar("T")


class StreamReader:
    """Reads one stream of a sample: called with offsets in the stream, each with the writable view to fill from there.

    `start`: first byte of the stream in the file. `size`: bytes of the stream. `content`: identifies the bytes of
    the file for the node's cache of videos. `start`: first byte of the stream in the file. `size`: bytes of the
    stream. `gap`: packets at most this many bytes apart are better read together, see `Storage`.
    """

    __slots__ = ("_content", "_file", "_storage", "_version", "gap", "requests", "size", "start")

    def __init__(
        self, storage: Storage, file: str, start: int, size: int, version: Version | None = None, content: str = ""
    ) -> None:
        self._storage, self._file, self.start, self._version = storage, file, start, version
        self._content = content
        self.size, self.gap, self.requests = size, storage.gap, 0

    def __call__(self, ranges: Sequence[tuple[int, memoryview]]) -> None:
        units = self._storage.units
        if units is None or not self._content:
            self._fetch(ranges)
        else:
            units.read(f"{self._content}\0{self.start}", self.size, ranges, self._fetch)

    def checked(self, read: Callable[[], T]) -> T:
        """Run a function that reads and checks; if the check fails, and the node's cache may be wrong, once more."""
        try:
            return read()
        except ChecksumError:
            units = self._storage.units
            if units is None or not self._content:
                raise
            units.forget(f"{self._content}\0{self.start}", self.size)
            return read()

    def read_file(self, ranges: Sequence[tuple[int, memoryview]]) -> None:
        """Read ranges of the file, also outside the stream."""
        self.requests += len(ranges)
        self._storage.read_into(self._file, ranges, self._version)

    def _fetch(self, ranges: Sequence[tuple[int, memoryview]]) -> None:
        self.read_file([(self.start + offset, view) for offset, view in ranges])


class BlockReader:
    """Reads ranges of a member whose blocks of `AUDIO_BLOCK` bytes have checksums; reads each block at most once."""

    __slots__ = ("_blocks", "_checksums", "_read", "bytes_read", "size")

    def __init__(self, read: StreamReader, checksums: Sequence[int]) -> None:
        self._read, self._checksums = read, checksums
        self.size, self.bytes_read = read.size, 0
        self._blocks: dict[int, bytes] = {}

    @property
    def requests(self) -> int:
        """Ranges that were read."""
        return self._read.requests

    def bytes(self, offset: int, length: int) -> memoryview:
        """Return `length` bytes from `offset`."""
        if offset < 0 or length < 0 or offset + length > self.size:
            raise FormatError(f"bytes {offset} to {offset + length} are outside the {self.size} bytes of the M4A")
        if not length:
            return memoryview(b"")
        first, last = offset // AUDIO_BLOCK, (offset + length - 1) // AUDIO_BLOCK
        missing = [block for block in range(first, last + 1) if block not in self._blocks]
        if missing:
            self._load(missing[0], missing[-1])
        joined = b"".join(self._blocks[block] for block in range(first, last + 1))
        return memoryview(joined)[offset - first * AUDIO_BLOCK :][:length]

    def _load(self, first: int, last: int) -> None:
        start, stop = first * AUDIO_BLOCK, min((last + 1) * AUDIO_BLOCK, self.size)
        data = bytearray(stop - start)
        self._read.checked(partial(self._fill, start, data))
        for block in range(first, last + 1):
            self._blocks[block] = bytes(data[(block - first) * AUDIO_BLOCK :][:AUDIO_BLOCK])

    def _fill(self, start: int, data: bytearray) -> None:
        self._read([(start, memoryview(data))])
        self.bytes_read += len(data)
        for at in range(0, len(data), AUDIO_BLOCK):
            block, found = (start + at) // AUDIO_BLOCK, zlib.crc32(data[at : at + AUDIO_BLOCK])
            if found != self._checksums[block]:
                raise ChecksumError(
                    f"audio has checksum {found:08x}, the index says {self._checksums[block]:08x}",
                    hint="run `fastvid verify`: the shard was damaged or replaced",
                    block=block,
                )
