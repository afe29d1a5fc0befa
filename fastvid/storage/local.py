"""Folders on a local disk."""

from __future__ import annotations

import contextlib
import fcntl
import io
import mmap
import os
import secrets
import socket
import threading
import zlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING

from fastvid.errors import StorageError
from fastvid.storage.protocol import check_name, ends_inside

if TYPE_CHECKING:
    from typing_extensions import Buffer

MAX_OPEN_FILES = 256
"""File handles that one LocalStorage keeps; a quarter of the usual limit of 1,024 a process."""

BUFFER_BYTES = 2**20
"""Collected before a write reaches the file."""

_TEMPORARY = ".tmp"
_LOCK = ".lock"


class LocalStorage:
    """A folder on a local disk. Safe to use from many threads; never carries an open file across a fork or pickle."""

    gap = 8 * 1024
    """One read costs 2 to 3 us (preadv 1.2 us, the rest Python), a byte 0.1 to 0.2 ns (measured), so the break-even
    lies near 10 kB. For eight frames of a `compact` clip 8 kB makes a third of the reads and reads 1.3 times the
    planned bytes; 32 kB reads twice the bytes and is no faster."""

    concurrency = 1

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root).absolute()
        self.url = str(self.root)
        self._lock = threading.Lock()
        self._open: OrderedDict[str, _Handle] = OrderedDict()
        self._pid = os.getpid()

    def __repr__(self) -> str:
        return f"LocalStorage({self.url!r})"

    def __reduce__(self) -> tuple[object, ...]:
        return LocalStorage, (self.url,)

    def path(self, name: str) -> Path:
        """Where `name` lies.

        Raises:
            UsageError: The name leaves the folder.
        """
        return self.root / check_name(name, self.url)

    def list(self, prefix: str = "") -> list[str]:
        base = self.root / prefix.rpartition("/")[0]
        names = []
        for folder, _, files in os.walk(base):
            for file in files:
                name = os.path.relpath(os.path.join(folder, file), self.root)
                if name.startswith(prefix) and not name.endswith((_TEMPORARY, _LOCK)):
                    names.append(name)
        return sorted(names)

    def exists(self, name: str) -> bool:
        return self.path(name).is_file()

    def size(self, name: str) -> int:
        with _translated(self.path(name)):
            return self.path(name).stat().st_size

    def read(self, name: str) -> bytes:
        with _translated(self.path(name)):
            return self.path(name).read_bytes()

    def read_into(self, name: str, ranges: Sequence[tuple[int, memoryview]]) -> None:
        # Called for every clip, so written without context managers, which cost as much as the reads.
        handle = self._handle(name)
        try:
            for offset, view in ranges:
                filled = os.preadv(handle.descriptor, (view,), offset)
                while filled < len(view):
                    got = os.preadv(handle.descriptor, (view[filled:],), offset + filled)
                    if not got:
                        raise ends_inside(offset, len(view), filled, self.path(name))
                    filled += got
        except OSError as error:
            if isinstance(error, StorageError):
                raise
            raise _translate(error, self.path(name)) from error

    def map(self, name: str) -> memoryview:
        # A batch of a large dataset maps a file for each of its clips; making a Path costs as much as mapping.
        path = f"{self.url}/{check_name(name, self.url)}"
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                size = os.fstat(descriptor).st_size
                return memoryview(mmap.mmap(descriptor, size, prot=mmap.PROT_READ) if size else b"")
            finally:
                os.close(descriptor)
        except OSError as error:
            raise _translate(error, path) from error

    def write(self, name: str, data: bytes) -> None:
        with self.create(name) as file:
            file.write(data)

    def swap(self, name: str, data: bytes, expected: bytes | None) -> bool:
        if expected is None:
            with contextlib.suppress(_NoHardLinks):
                return self._link(name, data)
        with self._exclusive(name):
            found = self.read(name) if self.exists(name) else None
            if found != expected:
                return False
            self.write(name, data)
            return True

    @contextlib.contextmanager
    def create(self, name: str) -> Iterator[IO[bytes]]:
        path = self.path(name)
        # A name of its own keeps two writers, also on two machines, from mixing their bytes; the last rename wins.
        temporary = path.with_name(f"{path.name}.{_machine()}-{os.getpid()}-{secrets.token_hex(4)}{_TEMPORARY}")
        try:
            with _translated(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                raw = _Raw(temporary, "wb")
            # What the block itself raises is not an error of this file, so the file translates its own.
            with io.BufferedWriter(raw, BUFFER_BYTES) as file:
                yield file
                file.flush()
                with _translated(path):
                    os.fsync(raw.fileno())
            with _translated(path):
                os.replace(temporary, path)
                _sync_folder(path.parent)
        finally:
            temporary.unlink(missing_ok=True)
        self._forget(name)

    def delete(self, name: str) -> None:
        with _translated(self.path(name)):
            self.path(name).unlink(missing_ok=True)
        self._forget(name)

    def sweep(self) -> None:
        """Removes what interrupted writers left behind. Only for a folder that nobody is writing to."""
        for leftover in self.root.rglob(f"*{_TEMPORARY}"):
            leftover.unlink(missing_ok=True)

    def sweep_dead(self) -> None:
        """Removes what killed processes of this machine left behind; others may be writing."""
        for leftover in self.root.rglob(f"*.{_machine()}-*{_TEMPORARY}"):
            pid = leftover.name.removesuffix(_TEMPORARY).split("-")[-2]
            if not os.path.exists(f"/proc/{pid}"):
                leftover.unlink(missing_ok=True)

    def close(self) -> None:
        """Closes the handles kept open."""
        with self._lock:
            self._open.clear()

    def _handle(self, name: str) -> _Handle:
        """The file, open. Whoever holds it keeps it open when it is evicted meanwhile."""
        with self._lock:
            if self._pid != os.getpid():
                # A forked child must not share a table that the parent's threads may have left half changed.
                self._open, self._pid = OrderedDict(), os.getpid()
            handle = self._open.get(name)
            if handle is None:
                with _translated(self.path(name)):
                    handle = _Handle(self.path(name))
                self._open[name] = handle
            self._open.move_to_end(name)
            while len(self._open) > MAX_OPEN_FILES:
                self._open.popitem(last=False)
        return handle

    def _link(self, name: str, data: bytes) -> bool:
        """Puts `data` at `name` if nothing is there: of two links of one name the file system lets one succeed."""
        written = f"{name}.{secrets.token_hex(4)}.new{_TEMPORARY}"
        self.write(written, data)
        try:
            os.link(self.path(written), self.path(name))
            _sync_folder(self.path(name).parent)
        except FileExistsError:
            return False
        except OSError as error:
            raise _NoHardLinks from error
        finally:
            self.delete(written)
        return True

    @contextlib.contextmanager
    def _exclusive(self, name: str) -> Iterator[None]:
        """One at a time for swaps of `name`, also across processes; a killed process lets go."""
        path = self.path(name)
        # A file of its own, because the one that is swapped is replaced, and a lock belongs to the file, not the name.
        lock = path.with_name(f".{path.name}{_LOCK}")
        with _translated(lock):
            lock.parent.mkdir(parents=True, exist_ok=True)
            file = lock.open("ab")
        with file:
            with _translated(lock):
                fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _forget(self, name: str) -> None:
        with self._lock:
            self._open.pop(name, None)


class _NoHardLinks(Exception):
    """The file system has none, as FAT and some network ones."""


class _Raw(io.FileIO):
    """A file whose writes fail with StorageError, as on a full disk."""

    def write(self, data: Buffer, /) -> int:
        with _translated(Path(os.fsdecode(self.name))):
            return super().write(data)


class _Handle:
    """A file descriptor that closes when its last user lets go."""

    __slots__ = ("descriptor",)

    def __init__(self, path: Path) -> None:
        self.descriptor = -1
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)


@contextlib.contextmanager
def _translated(path: Path) -> Iterator[None]:
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        raise _translate(error, path) from error


def _translate(error: OSError, path: str | Path) -> StorageError:
    if isinstance(error, FileNotFoundError):
        return StorageError("file does not exist", file=path)
    return StorageError(f"{error.strerror or error}", file=path)


def _machine() -> str:
    """A short name of this machine without marks."""
    return f"{zlib.crc32(socket.gethostname().encode()):08x}"


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
