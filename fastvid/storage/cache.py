"""Whole files kept in a node-local folder, for all processes of the node.

    FOLDER/.used              bytes in use, as a number; also the lock of those who change it
    FOLDER/ab/.lock           held by the one process that fetches a file of this drawer; others wait for its file
    FOLDER/ab/ab12...         a file; its name is a hash of its address and version, so it never changes

A file appears by a rename, complete. A killed process lets go of its locks, and the next one clears its remains away.
When room is needed, the files longest unused go; who has one mapped keeps it.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Final

_TEMPORARY: Final = ".tmp"
_LOCK: Final = ".lock"
_USED: Final = ".used"

ROOM: Final = 0.1
"""Part of the limit that an eviction leaves free, so that not every new file starts one."""

log = logging.getLogger(__name__)


class NodeCache:
    """Files by key in a folder.

    Args:
        folder: On a local disk; made when absent.
        limit: Bytes that the files may have together.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder, self.limit = folder, limit

    def get(self, key: str, size: int, fetch: Callable[[], bytes]) -> memoryview:
        """A file's bytes, read-only, mapped from the folder, or fetched once for the node.

        A folder that is full or cannot be written costs a warning and another fetch, never the bytes.

        Args:
            key: Names the file and its version, in hex.
            size: Bytes of the file; one of another size in the folder is not it.
            fetch: Gets the bytes where the folder does not have them.
        """
        path = self.folder / key[:2] / key
        found = _mapped(path, size)
        if found is not None:
            return found
        if size > self.limit:
            return memoryview(fetch())
        with contextlib.ExitStack() as held:
            try:
                held.enter_context(_locked(path.parent / _LOCK))
            except OSError as error:
                log.warning("cache is not used: %s [file=%s]", error.strerror, path)
                return memoryview(fetch())
            found = _mapped(path, size)
            if found is not None:
                return found
            data = fetch()
            try:
                self._store(path, data)
            except OSError as error:
                log.warning("cache does not take a file: %s [file=%s]", error.strerror, path)
                return memoryview(data)
        return _mapped(path, size) or memoryview(data)

    def _store(self, path: Path, data: bytes) -> None:
        # Only the holder of the lock writes here, so whatever is unfinished belongs to the dead.
        for remains in path.parent.glob(f"*{_TEMPORARY}"):
            remains.unlink(missing_ok=True)
        self._reserve(len(data))
        temporary = path.with_name(f"{path.name}{_TEMPORARY}")
        try:
            with temporary.open("wb") as file:
                file.write(data)
                file.flush()
                # Else a power cut could leave a file of the right size and name without its bytes.
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)

    def _reserve(self, size: int) -> None:
        """Counts `size` as used, and makes room for it first where there is none."""
        with _locked(self.folder / _USED) as book:
            book.seek(0)
            text = book.read()
            # A process that died between counting and writing leaves too high a number; the next eviction corrects it.
            used = int(text) if text.isdigit() else self._evict(self.limit)
            if used + size > self.limit:
                used = self._evict(int(self.limit * (1 - ROOM)) - size)
            book.seek(0)
            book.truncate()
            book.write(b"%d" % (used + size))

    def _evict(self, most: int) -> int:
        """Deletes files, those longest unused first, until at most `most` bytes are left; returns what is left."""
        files = []
        for path in self.folder.glob("??/*"):
            with contextlib.suppress(FileNotFoundError):
                facts = path.stat()
                files.append((facts.st_mtime_ns, facts.st_size, path))
        used = sum(size for _, size, _ in files)
        for _, size, path in sorted(files):
            if used <= most:
                break
            if not path.name.endswith((_TEMPORARY, _LOCK)):
                path.unlink(missing_ok=True)
                used -= size
        return used


def _mapped(path: Path, size: int) -> memoryview | None:
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size != size:
                return None
            # The time of the last use decides who goes first.
            with contextlib.suppress(OSError):
                os.utime(file.fileno())
            return memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)) if size else memoryview(b"")
    except OSError:
        return None


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[IO[bytes]]:
    # Other users of the machine must not be able to slip files in.
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file
