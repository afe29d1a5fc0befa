"""Bytes: ranges, listings, maps and atomic writes. Nothing else in fastvid opens the files of a dataset.

A `Storage` is a folder, named by a path or URL; names inside it use forward slashes.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Protocol

from fastvid.errors import StorageError, UsageError

MAX_OPEN_FILES = 256
"""File handles that one LocalStorage keeps; a quarter of the usual limit of 1,024 a process."""

_TEMPORARY = ".tmp"


class Storage(Protocol):
    """A folder of immutable files and a few that are swapped atomically."""

    url: str

    def list(self, prefix: str = "") -> list[str]:
        """Names that start with `prefix`, sorted. Files being written are not listed."""
        ...

    def exists(self, name: str) -> bool:
        """Whether `name` is a complete file."""
        ...

    def size(self, name: str) -> int:
        """Bytes of `name`."""
        ...

    def read(self, name: str) -> bytes:
        """All of `name`."""
        ...

    def read_into(self, name: str, ranges: Sequence[tuple[int, memoryview]]) -> None:
        """Fills each writable view from the byte offset beside it.

        Raises:
            StorageError: The file is missing or ends inside a range.
        """
        ...

    def map(self, name: str) -> memoryview:
        """All of `name`, read-only, paged in on use where the storage can do that."""
        ...

    def write(self, name: str, data: bytes) -> None:
        """Puts `data` at `name` atomically: a reader sees the old file or the new one, whole."""
        ...

    def create(self, name: str) -> contextlib.AbstractContextManager[IO[bytes]]:
        """A file that appears at `name` when the block ends, and not at all when it raises."""
        ...

    def delete(self, name: str) -> None:
        """Removes `name`; absent is fine."""
        ...


class LocalStorage:
    """A folder on a local disk. Safe to use from many threads; never carries an open file across a fork or pickle."""

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
        if name.startswith("/") or ".." in name.split("/"):
            raise UsageError(f"name {name!r} leaves its folder", file=self.url)
        return self.root / name

    def list(self, prefix: str = "") -> list[str]:
        base = self.root / prefix.rpartition("/")[0]
        names = []
        for folder, _, files in os.walk(base):
            for file in files:
                name = os.path.relpath(os.path.join(folder, file), self.root)
                if name.startswith(prefix) and not name.endswith(_TEMPORARY):
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
        with self._handle(name) as handle, _translated(self.path(name)):
            for offset, view in ranges:
                filled = 0
                while filled < len(view):
                    got = os.preadv(handle, [view[filled:]], offset + filled)
                    if not got:
                        raise StorageError(
                            f"file ends inside the range {offset}+{len(view)} after {filled} bytes",
                            file=self.path(name),
                            hint="the file was cut or replaced; `fastvid verify` tells which",
                        )
                    filled += got

    def map(self, name: str) -> memoryview:
        path = self.path(name)
        with _translated(path), path.open("rb") as file:
            if not os.fstat(file.fileno()).st_size:
                return memoryview(b"")
            return memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))

    def write(self, name: str, data: bytes) -> None:
        with self.create(name) as file:
            file.write(data)

    @contextlib.contextmanager
    def create(self, name: str) -> Iterator[IO[bytes]]:
        path = self.path(name)
        # The process id keeps two writers of one name from mixing their bytes; the last rename wins, whole.
        temporary = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}{_TEMPORARY}")
        try:
            with _translated(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                with temporary.open("wb") as file:
                    yield file
                    file.flush()
                    os.fsync(file.fileno())
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

    def close(self) -> None:
        """Closes the handles kept open."""
        with self._lock:
            self._open.clear()

    @contextlib.contextmanager
    def _handle(self, name: str) -> Iterator[int]:
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
        # The reference held here keeps an evicted file open until the read that uses it has ended.
        yield handle.descriptor

    def _forget(self, name: str) -> None:
        with self._lock:
            self._open.pop(name, None)


class _Handle:
    """A file descriptor that closes when its last user lets go."""

    __slots__ = ("descriptor",)

    def __init__(self, path: Path) -> None:
        self.descriptor = -1
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)


def open_storage(url: str | os.PathLike[str]) -> Storage:
    """The storage behind a path or URL.

    Raises:
        UsageError: The scheme of the URL is not known.
    """
    text = os.fspath(url)
    scheme, separator, rest = text.partition("://")
    if not separator:
        return LocalStorage(text)
    if scheme == "file":
        return LocalStorage(rest)
    raise UsageError(f"storage scheme {scheme!r} is not known", file=text, hint="known are local paths and file://")


@contextlib.contextmanager
def _translated(path: Path) -> Iterator[None]:
    try:
        yield
    except StorageError:
        raise
    except FileNotFoundError as error:
        raise StorageError("file does not exist", file=path) from error
    except OSError as error:
        raise StorageError(f"{error.strerror or error}", file=path) from error


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
