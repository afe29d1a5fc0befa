"""Cache whole remote files in a node-local folder that all processes of the node share.

    FOLDER/.used              bytes in use, as a decimal number; also the lock for changing it
    FOLDER/ab/.lock           held by the one process that fetches a file of this subfolder; the others wait for a while
    FOLDER/ab/ab12...         a file; its name is a hash of its address and version, so its content never changes

A file appears complete, by a rename. The kernel releases the locks of a killed process, and the next process deletes
its temporary files. A stopped process keeps its locks; the others give up waiting and fetch without the cache.
Eviction removes the least recently used files by deleting their names, and a damaged file is replaced by another, never
changed: whoever has mapped a file keeps its content. `get` reads into memory all the same, for its files are small.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Final

from fastvid.errors import StorageError

_TEMPORARY: Final = ".tmp"
_LOCK: Final = ".lock"
_USED: Final = ".used"

POLL_SECONDS: Final = 0.02
"""Time between two attempts to take a lock: little compared with fetching a file, 50 system calls a second."""

_ABANDONED_SECONDS: Final = 3600.0

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

    def get(self, key: str, size: int, fetch: Callable[[], bytes]) -> memoryview:
        """Return a file's bytes, fetching them once per node.

        If the folder is full, locked for too long or not writable, log a warning and return the fetched bytes uncached.

        `size`: size of the file in bytes; a cached file of another size is fetched again. `fetch`: returns the
        bytes when they are not cached.
        """
        path = self._path(key)
        found = _read(path, size)
        if found is not None:
            return found
        if size > self.limit:
            return memoryview(fetch())
        with contextlib.ExitStack() as held:
            try:
                held.enter_context(self._locked(path.parent / _LOCK))
            except OSError as error:
                log.warning("cannot use the cache: %s [file=%s]", error.strerror, path)
                return memoryview(fetch())
            found = _read(path, size)
            if found is not None:
                return found
            data = fetch()
            try:
                self._create(path, lambda temporary: _write(temporary, data))
            except OSError as error:
                log.warning("cannot store a file in the cache: %s [file=%s]", error.strerror, path)
        return memoryview(data)

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
        """Count `size` bytes as used, evicting others first if they exceed the limit.

        `size`: the bytes.
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
                files.append((facts.st_mtime_ns, facts.st_size, path))
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
        with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+b") as file:
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


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def _touch(path: Path) -> bool:
    """Set a file's modification time, by which eviction goes, to the time of this use; return whether it exists."""
    try:
        os.utime(path)
    except FileNotFoundError:
        return False
    except OSError:
        return path.is_file()
    return True


def _read(path: Path, size: int) -> memoryview | None:
    """Return the bytes of a file of this size, or None if there is none."""
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size != size:
                return None
            # Eviction goes by the modification time, so set it to the time of this use.
            with contextlib.suppress(OSError):
                os.utime(file.fileno())
            data = file.read()
            return memoryview(data) if len(data) == size else None
    except OSError:
        return None
