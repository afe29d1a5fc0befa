"""Reads the bytes of one member of a sample: ranges of a video stream, or checked blocks of its audio."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from fastvid.errors import ChecksumError, FormatError
from fastvid.format.schema import AUDIO_BLOCK
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


class BlockReader:
    """Reads ranges of a member whose blocks of `AUDIO_BLOCK` bytes have checksums; reads each block at most once.

    Args:
        read: Reads the member.
        checksums: CRC-32 of each block.
    """

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
        """Return `length` bytes from `offset`.

        Raises:
            StorageError: If the tar is missing, or ends inside the range.
            FormatError: If the range is outside the member.
            ChecksumError: If a block differs from the indexed one.
        """
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
        self._read([(start, memoryview(data))])
        self.bytes_read += len(data)
        for block in range(first, last + 1):
            part = bytes(data[(block - first) * AUDIO_BLOCK :][:AUDIO_BLOCK])
            if (found := zlib.crc32(part)) != self._checksums[block]:
                raise ChecksumError(
                    f"audio has checksum {found:08x}, the index says {self._checksums[block]:08x}",
                    hint="run `fastvid verify`: the shard was damaged or replaced",
                    block=block,
                )
            self._blocks[block] = part
