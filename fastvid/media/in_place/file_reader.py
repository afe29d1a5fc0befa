"""Read parts of a video file on a disk or in an object store, and count what that takes."""

from __future__ import annotations

import io
import os
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final

from fastvid.storage import Storage
from fastvid.storage.version import Version

BLOCK: Final = 1 << 16
"""Bytes that are read at least: most MP4s of a minute have their tables in so many."""

AHEAD: Final = 1 << 22
"""Bytes that are read at once when a file is read from end to end."""

KEPT: Final = 1 << 26
"""Bytes that are kept of a file, so that a packet can be compared with what its demuxer has just read."""


class FileReader(io.RawIOBase):
    """One version of a file: read by ranges, or like an open file by a demuxer.

    `head`: its first bytes, if they were read with the version. `size`: size in bytes. `bytes_read`: bytes that
    were read from the storage.
    """

    def __init__(
        self,
        storage: Storage,
        name: str,
        version: Version,
        check: Callable[[], None] = lambda: None,
        *,
        head: bytes | memoryview = b"",
    ) -> None:
        super().__init__()
        self._storage, self._name, self._check = storage, name, check
        self.version, self.size = version, version.size
        self.bytes_read, self.reads = len(head), int(len(head) > 0)
        self._blocks: OrderedDict[int, bytes] = OrderedDict()
        self._keep(0, memoryview(head))
        self._place = self._expected = 0

    @property
    def is_local(self) -> bool:
        """Whether a small read costs little."""
        return self._storage.concurrency == 1

    def part(self, offset: int, size: int, *, ahead: int = 0) -> bytes:
        """Return a range of the file, cut at its end; neighbours of what was read are read along and kept.

        `offset`: first byte. `size`: number of bytes. `ahead`: bytes from `offset` that are read along if the
        range must be read.
        """
        stop = min(offset + size, self.size)
        if offset >= stop:
            return b""
        first, last = offset // BLOCK, (stop - 1) // BLOCK
        missing = [block for block in range(first, last + 1) if block not in self._blocks]
        if missing:
            follows = (min(offset + ahead, self.size) - 1) // BLOCK
            self._load(missing[0], max(missing[-1], follows))
        joined = b"".join(self._kept(block) for block in range(first, last + 1))
        return joined[offset - first * BLOCK : stop - first * BLOCK]

    def whole(self) -> bytes:
        """Return all of the file, without keeping it."""
        (data,) = self.parts([(0, self.size)]) if self.size else (b"",)
        return data

    def parts(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return several ranges, given as (offset, size), with one read of the storage, which may be many requests.

        What was kept is not read again.
        """
        kept = [self._in_blocks(offset, size) for offset, size in ranges]
        missing = [one for one, known in zip(ranges, kept, strict=True) if not known]
        runs: list[list[int]] = []
        for offset, size in sorted(missing):
            if runs and offset - runs[-1][1] <= self._storage.gap:
                runs[-1][1] = max(runs[-1][1], offset + size)
            else:
                runs.append([offset, offset + size])
        data = [memoryview(bytearray(stop - start)) for start, stop in runs]
        if runs:
            self._read([(start, view) for (start, _), view in zip(runs, data, strict=True)])
        starts = [start for start, _ in runs]
        found = []
        for (offset, size), known in zip(ranges, kept, strict=True):
            if known:
                found.append(self.part(offset, size))
                continue
            run = bisect_right(starts, offset) - 1
            found.append(bytes(data[run][offset - starts[run] :][:size]))
        return found

    def readable(self) -> bool:
        """See `io.IOBase`."""
        return True

    def seekable(self) -> bool:
        """See `io.IOBase`."""
        return True

    def tell(self) -> int:
        """See `io.IOBase`."""
        return self._place

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """See `io.IOBase`."""
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self.size}[whence]
        self._place = max(0, start + offset)
        return self._place

    def readinto(self, buffer: memoryview, /) -> int:  # type: ignore[override]
        """See `io.RawIOBase`. Read ahead once reads follow each other."""
        view = memoryview(buffer)
        block = self._place // BLOCK
        if self._place < self.size and block not in self._blocks:
            follows = self._place == self._expected and self._place > 0
            ahead = AHEAD if follows else BLOCK
            self._load(block, min(block + max(ahead, len(view)) // BLOCK, (self.size - 1) // BLOCK))
        data = self.part(self._place, len(view))
        view[: len(data)] = data
        self._place += len(data)
        self._expected = self._place
        return len(data)

    def _load(self, first: int, last: int) -> None:
        start, stop = first * BLOCK, min((last + 1) * BLOCK, self.size)
        data = memoryview(bytearray(stop - start))
        self._read([(start, data)])
        self._keep(first, data)

    def _keep(self, first: int, data: memoryview) -> None:
        """Keep the blocks that data from block `first` on consists of, but not one that it ends in."""
        last = first + len(data) // BLOCK if first * BLOCK + len(data) < self.size else first - (-len(data) // BLOCK)
        for block in range(first, last):
            self._blocks[block] = bytes(data[(block - first) * BLOCK :][:BLOCK])
        most = max(KEPT // BLOCK, last - first)
        while len(self._blocks) > most:
            self._blocks.popitem(last=False)

    def _in_blocks(self, offset: int, size: int) -> bool:
        """Return whether a range, which is not empty, was kept."""
        if size < 1 or offset + size > self.size:
            return False
        return all(block in self._blocks for block in range(offset // BLOCK, (offset + size - 1) // BLOCK + 1))

    def _kept(self, block: int) -> bytes:
        if block not in self._blocks:
            self._load(block, block)
        return self._blocks[block]

    def _read(self, ranges: Sequence[tuple[int, memoryview]]) -> None:
        self._check()
        self._storage.read_into(self._name, ranges, self.version)
        self.reads += len(ranges)
        self.bytes_read += sum(len(view) for _, view in ranges)
