"""Storage in a folder on a local disk."""

from __future__ import annotations

import contextlib
import io
import mmap
import os
import resource
import secrets
import stat
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final

from fastvid.errors import StorageError, UnavailableError
from fastvid.runtime import faults
from fastvid.runtime.processes import is_dead, lock_file, namespace
from fastvid.storage.protocol import Version, changed_error, check_name, truncated_error

if TYPE_CHECKING:
    from typing_extensions import Buffer

_SOFT: Final = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
MAX_OPEN_FILES = 256 if _SOFT == resource.RLIM_INFINITY else min(256, _SOFT // 4)
"""File handles that a process keeps open: a quarter of its limit, which usually is 1,024. Beyond it, each LocalStorage
keeps an eighth of them."""

BUFFER_BYTES = 2**20
"""Size of the write buffer."""

ABANDONED_SECONDS = 24 * 3600
"""A temporary file that was not written to for a day was left by a dead process: a live one writes all the time."""

_TEMPORARY = ".tmp"
_LOCK = ".lock"


class LocalStorage:
    """A folder on a local disk. Thread-safe; open files do not survive a fork or pickle."""

    gap = 8 * 1024
    """About as many bytes as one more read costs. For eight frames of a clip of the profile `compact` it saves most of
    the reads for a few unneeded bytes; a larger gap would read many unneeded bytes."""

    concurrency = 1
    copies = False
    units = None

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
        """Return the path of `name`."""
        return self.root / check_name(name, self.url)

    def list(self, prefix: str = "") -> list[str]:
        # Without a prefix, leave out what cannot be listed: the folder may contain those of others, such as lost+found.
        found = self.every(prefix, strict=bool(prefix))
        return [name for name in found if not name.endswith((_TEMPORARY, _LOCK))]

    def every(self, prefix: str = "", *, strict: bool = True) -> Sequence[str]:
        """Return the names that start with `prefix`, sorted, also of files that are being written.

        `strict`: whether it is an error if a folder below the first cannot be listed; else it is left out.
        """
        wanted, paths = os.path.join(self.root, prefix), list[str]()
        top = os.path.dirname(wanted)

        def fail(error: OSError) -> None:
            is_gone = isinstance(error, FileNotFoundError | NotADirectoryError)
            if not is_gone and (strict or error.filename == top):
                raise _translate(error, error.filename) from error

        for folder, folders, files in os.walk(top, onerror=fail):
            folders[:] = [name for name in folders if os.path.join(folder, name).startswith(wanted)]
            paths += [path for name in files if (path := os.path.join(folder, name)).startswith(wanted)]
        return sorted(os.path.relpath(path, self.root) for path in paths)

    def exists(self, name: str) -> bool:
        with _translated(self.path(name)):
            return self.path(name).is_file()

    def size(self, name: str) -> int:
        with _translated(self.path(name)):
            return self.path(name).stat().st_size

    def read(self, name: str) -> bytes:
        with _translated(self.path(name)), os.fdopen(_open_file(self.path(name)), "rb") as file:
            return file.read()

    def version(self, name: str) -> Version | None:
        """Return the current version of `name`, whose tag is its modification time, or None without a file."""
        try:
            found = self.path(name).stat()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise _translate(error, self.path(name)) from error
        return Version.parse(str(found.st_mtime_ns), None, found.st_size)

    def begin(self, name: str, most: int) -> tuple[Version, memoryview] | None:  # noqa: ARG002 - another read is cheap
        """Return the current version of `name` and no bytes, or None if the file does not exist."""
        version = self.version(name)
        return None if version is None else (version, memoryview(b""))

    def read_into(self, name: str, ranges: Sequence[tuple[int, memoryview]], version: Version | None = None) -> None:
        # No context managers: this runs for every clip, and they cost as much as the reads.
        handle = self._handle(name)
        try:
            if version is not None:
                # Compare the open file, not the path: another file may have that name by now.
                found = os.fstat(handle.descriptor)
                if (str(found.st_mtime_ns), found.st_size) != (version.tag, version.size):
                    self.discard(name)
                    raise changed_error(self.path(name))
            for offset, view in ranges:
                filled = os.preadv(handle.descriptor, (view,), offset)
                while filled < len(view):
                    got = os.preadv(handle.descriptor, (view[filled:],), offset + filled)
                    if not got:
                        raise truncated_error(offset, len(view), filled, self.path(name))
                    filled += got
        except OSError as error:
            if isinstance(error, StorageError):
                raise
            raise _translate(error, self.path(name)) from error

    def map(self, name: str) -> memoryview:
        # A batch may map one file for each clip, and creating a Path costs as much as the mapping.
        path = f"{self.url}/{check_name(name, self.url)}"
        try:
            descriptor = _open_file(path)
            try:
                size = os.fstat(descriptor).st_size
                return memoryview(mmap.mmap(descriptor, size, prot=mmap.PROT_READ) if size else b"")
            finally:
                os.close(descriptor)
        except OSError as error:
            raise _translate(error, path) from error

    def keep(self, name: str) -> bool:
        """Return whether the file exists: a local file needs no copy."""
        return self.exists(name)

    def discard(self, name: str) -> bool:
        # An open handle still refers to the old file after another process has replaced it.
        with self._lock:
            return self._open.pop(name, None) is not None

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
        # A unique name keeps writers, also on other machines, from mixing their bytes; the last rename wins.
        temporary = path.with_name(f"{path.name}.{namespace()}-{os.getpid()}-{secrets.token_hex(4)}{_TEMPORARY}")
        try:
            with _translated(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                faults.reach("write")
                raw = _Raw(temporary, "wb")
            # `_Raw` translates write errors, because errors raised by the block itself must pass unchanged.
            with io.BufferedWriter(raw, BUFFER_BYTES) as file:
                yield file
                file.flush()
                with _translated(path):
                    os.fsync(raw.fileno())
            with _translated(path):
                os.replace(temporary, path)
                _sync_folder(path.parent)
        finally:
            with contextlib.suppress(OSError):  # on a disk that cannot be written; then the error above says so
                temporary.unlink(missing_ok=True)
        self.discard(name)

    def delete(self, name: str) -> None:
        with _translated(self.path(name)):
            self.path(name).unlink(missing_ok=True)
        self.discard(name)

    def sweep(self) -> None:
        """Delete temporary files of interrupted writers. Call only while nobody writes to the folder."""
        for leftover in self._temporary():
            with contextlib.suppress(OSError):
                leftover.unlink()

    def sweep_dead(self) -> None:
        """Delete temporary files of dead processes; safe while others write, also from other PID namespaces.

        A file of another namespace, or of another machine, is deleted after `ABANDONED_SECONDS`.
        """
        oldest = time.time() - ABANDONED_SECONDS
        for leftover in self._temporary():
            _, _, writer = leftover.name.removesuffix(_TEMPORARY).rpartition(".")
            space, _, rest = writer.partition("-")
            with contextlib.suppress(OSError):
                if is_dead(space, rest.partition("-")[0]) or leftover.stat().st_mtime < oldest:
                    leftover.unlink()

    def _temporary(self) -> Iterator[Path]:
        return (self.root / name for name in self.every(strict=False) if name.endswith(_TEMPORARY))

    def prune(self, folder: str) -> None:
        """Remove a folder and those below it that are empty."""
        for path, _, _ in os.walk(self.path(folder), topdown=False):
            with contextlib.suppress(OSError):
                os.rmdir(path)

    def close(self) -> None:
        """Close all file handles."""
        with self._lock:
            self._open.clear()

    def _handle(self, name: str) -> _Handle:
        """Return an open handle of the file. It stays open while referenced, even when evicted."""
        with self._lock:
            if self._pid != os.getpid():
                # The parent's threads may have been changing the table at the fork, so a child starts a new one.
                self._open, self._pid = OrderedDict(), os.getpid()
            handle = self._open.get(name)
            if handle is None:
                with _translated(self.path(name)):
                    faults.reach("open")
                    handle = _Handle(self.path(name))
                self._open[name] = handle
            self._open.move_to_end(name)
            while len(_LIVE) > MAX_OPEN_FILES and len(self._open) > max(1, MAX_OPEN_FILES // 8):
                self._open.popitem(last=False)
        return handle

    def _link(self, name: str, data: bytes) -> bool:
        """Write `data` to `name` if it does not exist, by a hard link: creating an existing link fails."""
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
        """Serialise swaps of `name` across threads and processes; the kernel releases a killed process's lock."""
        path = self.path(name)
        # A separate lock file: a lock belongs to the inode, and a swap replaces the file's inode.
        lock = path.with_name(f".{path.name}{_LOCK}")
        with _translated(lock):
            descriptor = lock_file(lock)
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)
            os.close(descriptor)


class _NoHardLinks(Exception):
    """The file system does not support hard links, like FAT and some network file systems."""


class _Raw(io.FileIO):
    """A file that raises StorageError when a write fails, as on a full disk."""

    def write(self, data: Buffer, /) -> int:
        with _translated(Path(os.fsdecode(self.name))):
            return super().write(data)


_LIVE: Final[set[int]] = set()  # the descriptors of all handles; no lock, because adding and removing are atomic


class _Handle:
    """A file descriptor that closes when its last reference is dropped."""

    __slots__ = ("descriptor",)

    def __init__(self, path: Path) -> None:
        self.descriptor = -1
        self.descriptor = _open_file(path)
        _LIVE.add(self.descriptor)

    def __del__(self) -> None:
        if self.descriptor >= 0:
            _LIVE.discard(self.descriptor)
            os.close(self.descriptor)


def _open_file(path: str | Path) -> int:
    """Open a regular file for reading. Without O_NONBLOCK, opening a named pipe would wait for a writer for ever."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        what = "a folder" if stat.S_ISDIR(mode) else "a pipe, a device or a socket"
        raise StorageError(f"expected a file, found {what}", file=path, hint="name a file, or restore it")
    return descriptor


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
        return StorageError("file does not exist", file=path, hint="restore the file, or correct the path")
    hint = "check that the disk is mounted, works and has room, and that you may access the file"
    return UnavailableError(f"{error.strerror or error}", file=path, hint=hint)


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
