"""Cache remote files and remote videos in a node-local folder that all processes of the node share.

`NodeCache` keeps whole files:

    FOLDER/.used              bytes in use, as a decimal number; also the lock for changing it
    FOLDER/ab/.lock           held by the one process that fetches a file of this subfolder; the others wait for a while
    FOLDER/ab/ab12...         a file; its name is a hash of its address and version, so its content never changes

A file appears complete, by a rename. The kernel releases the locks of a killed process, and the next process deletes
its temporary files. A stopped process keeps its locks; the others give up waiting and fetch without the cache. Eviction
deletes the least recently used files, and a damaged file is replaced by another, never changed: a process that has
mapped a file keeps its content.

`UnitCache` keeps a video in units of `UNIT` bytes, the last one shorter, counted from the video's first byte. No unit
contains bytes of two videos, so a node that reads one video of a shard does not fetch bytes of the videos next to it.

    FOLDER/.used      bytes in use, as above
    FOLDER/ab/ab12... one unit and the CRC-32 of its bytes; its name is a hash of the video, its version and the unit's
                      number

A unit appears complete, by a rename, but is not flushed to the disk, so its checksum is verified with every read. Two
processes that miss the same unit at the same time both fetch it: clips of one video are rarely read at once.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Final

from fastvid.errors import StorageError
from fastvid.runtime.values import sha256

_TEMPORARY: Final = ".tmp"
_LOCK: Final = ".lock"
_USED: Final = ".used"

POLL_SECONDS: Final = 0.02
"""Time between two attempts to take a lock: short compared with fetching a file, yet only 50 system calls a second."""

_ABANDONED_SECONDS: Final = 3600.0  # a temporary file that was last written to before this was left by a dead process

FREE_FRACTION: Final = 0.1
"""Fraction of the limit that an eviction frees, so that not every new file causes one."""

log = logging.getLogger(__name__)


class NodeCache:
    """A size-limited folder of files, addressed by key.

    `limit`: maximum total size of the files in bytes. `patience`: seconds to wait for another process that fetches
    into the same subfolder.
    """

    def __init__(self, folder: Path, limit: int, patience: float = 120.0) -> None:
        self.folder, self.limit, self.patience = folder, limit, patience
        self._stuck: set[Path] = set()  # locks that were not released in time: do not wait for them again

    def file(self, key: str, write: Callable[[Path], None]) -> Path | None:
        """Return the path of a file, written once per node, for mapping it: its content stays while it is mapped.

        If the folder is full, locked for too long or not writable, log a warning and return None.
        """
        path = self._path(key)
        if _touch(path):
            return path
        try:
            with self._locked(path.parent / _LOCK):
                if not _touch(path):
                    self._create(path, write)
        except StorageError:
            raise
        except OSError as error:
            log.warning("cannot use the cache: %s [file=%s]", error.strerror or error, path)
            return None
        return path

    def discard(self, key: str) -> None:
        """Delete a file whose content turned out to be wrong, so that it is fetched again."""
        with contextlib.suppress(OSError):
            self._path(key).unlink(missing_ok=True)

    def _path(self, key: str) -> Path:
        return self.folder / key[:2] / key

    def _create(self, path: Path, write: Callable[[Path], None]) -> None:
        # Only the holder of the lock writes here, so any temporary file was left by a dead process.
        for remains in path.parent.glob(f"*{_TEMPORARY}"):
            remains.unlink(missing_ok=True)
        temporary = path.with_name(f"{path.name}{_TEMPORARY}")
        try:
            write(temporary)
            size = temporary.stat().st_size
            if size > self.limit:
                raise OSError(errno.EFBIG, f"{size} bytes are more than its limit of {self.limit}")
            with temporary.open("rb") as file:
                # Without fsync a power cut could leave a file of the right size and name without its bytes.
                os.fsync(file.fileno())
            self.reserve(size, written=size)
            os.replace(temporary, path)
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)

    def reserve(self, size: int, *, written: int = 0) -> None:
        """Count `size` bytes as used, first evicting files if the total would exceed the limit.

        `written`: how many of these bytes are in a temporary file already, which the scan of an eviction counts too.
        """
        with self._locked(self.folder / _USED) as book:
            book.seek(0)
            text = book.read()
            # A process that died between counting and renaming leaves too high a count; the next eviction corrects it.
            used = int(text) if text.isdigit() else self._evict(self.limit) - written
            if used + size > self.limit:
                used = self._evict(max(int(self.limit * (1 - FREE_FRACTION)) - size + written, 0)) - written
            book.seek(0)
            book.truncate()
            book.write(b"%d" % (used + size))

    def _evict(self, most: int) -> int:
        """Delete least recently used files until at most `most` bytes remain; return the bytes that remain."""
        files = []
        abandoned = (time.time() - _ABANDONED_SECONDS) * 1e9
        for path in self.folder.glob("??/*"):
            with contextlib.suppress(FileNotFoundError):
                facts = path.stat()
                if path.suffix == _TEMPORARY and facts.st_mtime_ns < abandoned:
                    path.unlink()  # its writer died
                    continue
                files.append((facts.st_atime_ns, facts.st_size, path))
        used = sum(size for _, size, _ in files)
        for _, size, path in sorted(files):
            if used <= most:
                break
            if not path.name.endswith((_TEMPORARY, _LOCK)):
                path.unlink(missing_ok=True)
                used -= size
        return used

    @contextlib.contextmanager
    def _locked(self, path: Path) -> Iterator[IO[bytes]]:
        """Open a file and lock it."""
        # Mode 0700: other users of the machine must not be able to plant files.
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _is_ours(path.parent.stat()):
            raise PermissionError(errno.EPERM, "its folder belongs to another user")
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        with os.fdopen(os.open(path, flags, 0o600), "r+b") as file:
            deadline = time.monotonic() + (0 if path in self._stuck else self.patience)
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    self._stuck.discard(path)
                    break
                except BlockingIOError:
                    if time.monotonic() >= deadline:
                        self._stuck.add(path)
                        message = f"another process has held a lock for {self.patience:g} s"
                        raise TimeoutError(errno.ETIMEDOUT, message) from None
                    time.sleep(POLL_SECONDS)
            yield file


def _is_ours(facts: os.stat_result) -> bool:
    """Return whether a file belongs to this user or to root: checksums do not detect a file that another planted."""
    return facts.st_uid in (0, os.geteuid())


def _touch(path: Path) -> bool:
    """Set a file's access time to now, because eviction goes by it; return whether the file exists and is ours.

    The modification time is not changed: readers use it to tell whether they have verified the file.
    """
    try:
        facts = path.stat()
        if not _is_ours(facts):
            return False
        os.utime(path, ns=(time.time_ns(), facts.st_mtime_ns))
    except FileNotFoundError:
        return False
    except OSError:
        return path.is_file()
    return True


UNIT: Final = 2**20
"""Bytes of a unit. Most videos of a few seconds fit into one; of an hour of video a clip needs few of the units."""

_GRANT: Final = 64 * 2**20  # bytes to reserve at once: the file .used is locked once per grant, not once per unit
_CHECKSUM: Final = 4  # bytes of a CRC-32

Ranges = Sequence[tuple[int, memoryview]]


class UnitCache(NodeCache):
    """A size-limited folder of units.

    `limit`: maximum total size in bytes.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        super().__init__(folder, limit)
        self._lock = threading.Lock()
        self._granted = 0  # bytes that this process may write before it asks again
        self._warned = False

    def read(self, video: str, size: int, ranges: Ranges, fetch: Callable[[Ranges], None]) -> None:
        """Read ranges of a video, fetching the units that are not in the cache.

        `video`: identifies the video's bytes: its file, the file's version and the video's offset in it. `size`: size
        of the video in bytes. `fetch`: fills ranges from the store.
        """
        wanted = sorted({unit for offset, view in ranges for unit in _units(offset, len(view))})
        loaded = ((unit, self._load(_name(video, unit), min(UNIT, size - unit * UNIT))) for unit in wanted)
        found = {unit: data for unit, data in loaded if data is not None}
        if missing := [unit for unit in wanted if unit not in found]:
            found |= self._fetch(video, size, missing, fetch)
        for offset, view in ranges:
            for unit in _units(offset, len(view)):
                data = found[unit]
                first, last = max(offset, unit * UNIT), min(offset + len(view), unit * UNIT + len(data))
                view[first - offset : last - offset] = data[first - unit * UNIT : last - unit * UNIT]

    def forget(self, video: str, size: int) -> None:
        """Delete all units of a video, whose size is `size` bytes."""
        for unit in _units(0, size):
            with contextlib.suppress(OSError):
                self._path(_name(video, unit)).unlink(missing_ok=True)

    def _fetch(
        self, video: str, size: int, missing: Sequence[int], fetch: Callable[[Ranges], None]
    ) -> dict[int, memoryview]:
        """Fetch units, adjacent ones in one range, write them to the cache and return their bytes."""
        runs: list[tuple[int, memoryview]] = []
        start = 0
        for place, unit in enumerate(missing):
            if place + 1 == len(missing) or missing[place + 1] != unit + 1:
                first, stop = missing[start] * UNIT, min((unit + 1) * UNIT, size)
                runs.append((first, memoryview(bytearray(stop - first))))
                start = place + 1
        fetch(runs)
        found = {}
        for first, data in runs:
            for at in range(0, len(data), UNIT):
                unit = (first + at) // UNIT
                found[unit] = data[at : at + UNIT]
                self._store(_name(video, unit), data[at : at + UNIT])
        return found

    def _load(self, name: str, size: int) -> memoryview | None:
        try:
            with open(self._path(name), "rb", buffering=0) as file:
                if not _is_ours(os.fstat(file.fileno())):
                    return None
                data = file.read(size + _CHECKSUM + 1)
                # Eviction goes by the access time, so set it to the time of this use.
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
            if not _is_ours(path.parent.stat()):
                raise PermissionError(errno.EPERM, "its folder belongs to another user")
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
                self.reserve(grant)
                self._granted += grant
            self._granted -= size


def _units(offset: int, size: int) -> range:
    return range(offset // UNIT, -(-(offset + size) // UNIT)) if size else range(0)


def _name(video: str, unit: int) -> str:
    return sha256(f"{video}\0{unit}".encode())
