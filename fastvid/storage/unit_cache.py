"""Cache the bytes of remote videos in a node-local folder that all processes of the node share.

A video is kept in units of `UNIT` bytes, the last one shorter, counted from its own first byte: no unit contains bytes
of two videos, so whichever node reads a video of a shard fetches nothing of its neighbours.

    FOLDER/.used      bytes in use, see `fastvid.storage.cache`
    FOLDER/ab/ab12... one unit and the CRC-32 of its bytes; its name is a hash of the video, its version and the unit

A unit appears complete, by a rename, but is not flushed to the disk, so its checksum is verified with every read. Two
processes that miss the same unit at the same time both fetch it: clips of one video are rarely read at once.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from fastvid.runtime.hashing import sha256
from fastvid.storage.cache import NodeCache

UNIT: Final = 2**20
"""Bytes of a unit: most clips of a few seconds are one; of an hour of video, a clip needs a few of thousands."""

_GRANT: Final = 64 * 2**20
_CHECKSUM: Final = 4

Ranges = Sequence[tuple[int, memoryview]]

log = logging.getLogger(__name__)


class UnitCache:
    """A size-limited folder of units.

    `limit`: maximum total size in bytes.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder, self.limit = folder, limit
        self._books = NodeCache(folder, limit)
        self._lock = threading.Lock()
        self._granted = 0  # bytes that this process may write before it asks again
        self._warned = False

    def read(self, video: str, size: int, ranges: Ranges, fetch: Callable[[Ranges], None]) -> None:
        """Read ranges of a video, fetching the units that are not here.

        `video`: identifies the bytes of the video: its file, version and place in it. `size`: bytes of the
        video.
        """
        wanted = sorted({unit for offset, view in ranges for unit in _units(offset, len(view))})
        found = {unit: self._load(_name(video, unit), self._size(size, unit)) for unit in wanted}
        missing = [unit for unit in wanted if found[unit] is None]
        if missing:
            self._fetch(video, size, missing, found, fetch)
        for offset, view in ranges:
            for unit in _units(offset, len(view)):
                data = found[unit]
                assert data is not None
                first, last = max(offset, unit * UNIT), min(offset + len(view), unit * UNIT + len(data))
                view[first - offset : last - offset] = data[first - unit * UNIT : last - unit * UNIT]

    def forget(self, video: str, size: int) -> None:
        """Delete what is here of a video."""
        for unit in _units(0, size):
            with contextlib.suppress(OSError):
                self._path(_name(video, unit)).unlink(missing_ok=True)

    def _fetch(
        self,
        video: str,
        size: int,
        missing: Sequence[int],
        found: dict[int, memoryview | None],
        fetch: Callable[[Ranges], None],
    ) -> None:
        """Fetch units, neighbours in one request, and keep them."""
        runs: list[tuple[int, memoryview]] = []
        start = 0
        for place, unit in enumerate(missing):
            if place + 1 == len(missing) or missing[place + 1] != unit + 1:
                first, stop = missing[start] * UNIT, min((unit + 1) * UNIT, size)
                runs.append((first, memoryview(bytearray(stop - first))))
                start = place + 1
        fetch(runs)
        for first, data in runs:
            for at in range(0, len(data), UNIT):
                unit = (first + at) // UNIT
                found[unit] = data[at : at + UNIT]
                self._store(_name(video, unit), data[at : at + UNIT])

    @staticmethod
    def _size(size: int, unit: int) -> int:
        return min(UNIT, size - unit * UNIT)

    def _path(self, name: str) -> Path:
        return self.folder / name[:2] / name

    def _load(self, name: str, size: int) -> memoryview | None:
        try:
            with open(self._path(name), "rb", buffering=0) as file:
                data = file.read(size + _CHECKSUM + 1)
                # Eviction goes by the modification time, so set it to the time of this use.
                with contextlib.suppress(OSError):
                    os.utime(file.fileno())
        except OSError:
            return None
        view = memoryview(data)
        is_whole = len(data) == size + _CHECKSUM
        return view[:size] if is_whole and zlib.crc32(view[:size]) == int.from_bytes(view[size:], "little") else None

    def _store(self, name: str, data: memoryview) -> None:
        path = self._path(name)
        part = path.with_name(f"{name}.{os.getpid()}-{threading.get_ident()}.tmp")
        try:
            self._reserve(len(data) + _CHECKSUM)
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with open(part, "wb") as file:
                file.write(data)
                file.write(zlib.crc32(data).to_bytes(_CHECKSUM, "little"))
            os.replace(part, path)
        except OSError as error:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
            if not self._warned:
                self._warned = True
                log.warning("cannot keep videos in the cache: %s [file=%s]", error.strerror or error, path)

    def _reserve(self, size: int) -> None:
        with self._lock:
            if self._granted < size:
                grant = max(size, min(_GRANT, self.limit // 64))
                self._books.reserve(grant)
                self._granted += grant
            self._granted -= size


def _units(offset: int, size: int) -> range:
    return range(offset // UNIT, -(-(offset + size) // UNIT)) if size else range(0)


def _name(video: str, unit: int) -> str:
    return sha256(f"{video}\0{unit}".encode())
