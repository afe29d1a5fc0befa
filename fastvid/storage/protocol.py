"""The interface that every storage implements, and its options, file versions, errors and request counts."""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Final, Protocol

from fastvid.errors import StorageError, UsageError
from fastvid.storage.cache import NodeCache, UnitCache

REDIRECTS_VARIABLE: Final = "FASTVID_REDIRECTS"
CACHE_VARIABLE: Final = "FASTVID_CACHE"
CACHE_BYTES_VARIABLE: Final = "FASTVID_CACHE_BYTES"
VIDEO_CACHE_VARIABLE: Final = "FASTVID_CACHE_VIDEO"
DEFAULT_CACHE_BYTES: Final = 16 * 2**30
"""16 GiB: the sidecars of about ten thousand shards."""

_UNITS: Final = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True, slots=True)
class RemoteOptions:
    """Settings of `open_storage` for object stores and HTTP."""

    concurrency: int = 64  # maximum requests in flight per storage. 64 at 20 ms of latency is 3,200 ranges a second
    connect_seconds: float = 5.0
    stall_seconds: float = 10.0  # maximum wait for the next bytes of a response
    # A request is retried for this long after its first attempt. Object stores have outages of seconds; two
    # minutes also cover the restart of a server.
    patience_seconds: float = 120.0
    cache: str | os.PathLike[str] | None = None
    cache_bytes: int | None = None
    video_cache_bytes: int | None = None
    redirects: str = ""  # of web servers: "host" to the same host, "any"; REDIRECTS_VARIABLE by default

    def __post_init__(self) -> None:
        if self.follows() not in ("host", "any"):
            raise UsageError(f"redirects is {self.follows()!r}", hint='use "host" (the same host only) or "any"')
        for name in ("concurrency", "connect_seconds", "stall_seconds", "patience_seconds"):
            if getattr(self, name) <= 0:
                raise UsageError(f"{name} is {getattr(self, name)}, must be greater than 0")

    def follows(self) -> str:
        """Return "host" if redirects are followed to the same host only, "any" if also to others."""
        return self.redirects or os.environ.get(REDIRECTS_VARIABLE, "") or "host"

    def cache_folder(self) -> Path | None:
        """Return the folder that keeps mapped files, or None to keep them in memory."""
        folder = os.environ.get(CACHE_VARIABLE, "") if self.cache is None else os.fspath(self.cache)
        return Path(folder).absolute() if folder else None

    def cache_limit(self) -> int:
        """Return the maximum size of the cache folder in bytes."""
        return _size(CACHE_BYTES_VARIABLE, DEFAULT_CACHE_BYTES) if self.cache_bytes is None else self.cache_bytes

    def units(self) -> UnitCache | None:
        """Return the cache of videos, or None if there is none."""
        limit = self.video_cache_bytes
        if limit is None:
            limit = _size(VIDEO_CACHE_VARIABLE, 0)
        folder = self.cache_folder()
        if limit and folder is None:
            raise UsageError(
                f"{VIDEO_CACHE_VARIABLE} is set, but there is no folder for it",
                hint=f"set {CACHE_VARIABLE} to a folder on a fast local disk",
            )
        return UnitCache(folder / "video", limit) if limit and folder is not None else None


def _size(variable: str, default: int) -> int:
    text = os.environ.get(variable, "")
    if not text:
        return default
    found = re.fullmatch(r"(\d+)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if not found:
        raise UsageError(f"{variable} is {text!r}, not a size", hint="write it like 20G or 500M")
    return int(found[1]) * _UNITS[found[2].upper()]


_EPOCH: Final = datetime.fromtimestamp(0, UTC)


@dataclass(frozen=True, slots=True)
class Version:
    """Identifies one version of a file."""

    tag: str | None
    modified: datetime
    size: int  # size in bytes
    number: str | None = None

    @classmethod
    def parse(cls, tag: str | None, modified: str | None, size: int) -> Version:
        """Return a version that was stored as text: its tag, or without one its date in ISO 8601."""
        return cls(tag, datetime.fromisoformat(modified) if modified else _EPOCH, size)

    @property
    def text(self) -> tuple[str | None, str | None]:
        """The arguments of `parse`: the tag and None, or without a tag None and the date in ISO 8601."""
        return self.tag, None if self.tag else self.modified.isoformat()

    def same(self, other: Version) -> bool:
        """Return whether both may be the same version: by tags if both have one, as dates differ among replicas."""
        if self.tag and other.tag:
            return (self.tag, self.size) == (other.tag, other.size)
        return (self.modified, self.size) == (other.modified, other.size)


REPLACED: Final = "file was replaced while it was being read"
CHANGED: Final = "file is not the version that was indexed"
CHANGED_HINT: Final = "restore it, or run `fastvid index DIR` on the dataset to index changed files again"
MOVED_HINT: Final = (
    "restore it, or name the folder where the videos are now: `fastvid.open(DIR, root=FOLDER)`, or for good"
    " `fastvid index DIR --root FOLDER`"
)


class Storage(Protocol):
    """A folder of files that never change, and a few that are replaced atomically. Thread-safe and picklable.

    Methods raise StorageError, which names the file; UnavailableError if the cause is not the file, such as a network.

    Attributes:
        url: The folder.
        gap: Number of bytes that cost as much as one more range: ranges that are closer are better read as one.
        copies: Whether `map` keeps a copy in memory, so that all later reads of the file are free.
        units: Cache on this node for parts of videos; None without one.
        concurrency: Number of concurrent reads that pays off; 1 if sequential reads are as fast.
    """

    url: str
    copies: bool

    @property
    def gap(self) -> int: ...

    @property
    def concurrency(self) -> int: ...

    @property
    def units(self) -> UnitCache | None: ...

    def list(self, prefix: str = "") -> list[str]:
        """Return the names that start with `prefix`, sorted. Files being written are not listed.

        Raises:
            StorageError: If the storage cannot list, as over plain HTTP.
        """

    def exists(self, name: str) -> bool:
        """Return whether `name` is a complete file."""

    def size(self, name: str) -> int:
        """Return the size of `name` in bytes."""

    def version(self, name: str) -> Version | None:
        """Return the current version of `name`, or None if the file does not exist."""

    def read(self, name: str) -> bytes:
        """Return the current content of `name`."""

    def read_into(self, name: str, ranges: Sequence[tuple[int, memoryview]], version: Version | None = None) -> None:
        """Read several ranges, given as (byte offset, writable view to fill).

        The bytes of one call never mix two versions of the file.

        Args:
            name: The file.
            ranges: What to read.
            version: The version that the file must have; by default any.

        Raises:
            StorageError: If the file is missing, ends inside a range or is not of `version`; without `version`, also if
                it is a remote file that was replaced after this storage first read it.
        """

    def map(self, name: str) -> memoryview:
        """Return all of `name`, mapped read-only or fetched once. For files that do not change: SIGBUS kills a process
        that reads a mapped local file after it was truncated."""

    def keep(self, name: str) -> bool:
        """Copy a remote file that does not change to this node, once for all processes, so that reading parts is cheap.

        Returns:
            Whether parts of it are now cheap to read; False for a remote file without a node cache.
        """

    def discard(self, name: str) -> bool:
        """Drop the copies of a file in memory and in the node cache, and its open handles.

        Returns:
            Whether there was anything to drop, so that reading the file again may return other bytes.
        """

    def write(self, name: str, data: bytes) -> None:
        """Write `data` to `name` atomically: a reader sees the whole old file or the whole new one."""

    def swap(self, name: str, data: bytes, expected: bytes | None) -> bool:
        """Write `data` to `name` if its content is `expected` (None: no file exists).

        Of two concurrent swaps one succeeds.

        Returns:
            Whether the data was written; if not, nothing has changed.
        """

    def create(self, name: str) -> contextlib.AbstractContextManager[IO[bytes]]:
        """Open a new file that appears at `name` when the block ends, and not at all if the block raises."""

    def delete(self, name: str) -> None:
        """Delete `name` if it exists."""

    def sweep(self) -> None:
        """Delete temporary files of interrupted writers. Call only while nobody writes to the folder."""

    def close(self) -> None:
        """Release files, connections and threads; the storage reopens them when it is used again."""


def check_name(name: str, url: str) -> str:
    """Return `name`; raise UsageError if it leads outside its folder or contains a NUL byte."""
    if "\0" in name:
        raise UsageError(f"name {name!r} contains a NUL byte", file=url)
    if name.startswith("/") or ".." in name.split("/"):
        raise UsageError(f"name {name!r} leads outside its folder", file=url)
    return name


def truncated_error(offset: int, length: int, got: int, file: object) -> StorageError:
    """Return the error for a file that ends inside a range."""
    return StorageError(
        f"file ends inside the range {offset}+{length} after {got} bytes",
        file=file,
        hint="run `fastvid verify`: the file was truncated or replaced",
    )


def replaced_error(file: object) -> StorageError:
    """Return the error for a file that was replaced while it was being read."""
    return StorageError(REPLACED, file=file, hint="open the dataset again to read the new version")


def changed_error(file: object) -> StorageError:
    """Return the error for a file that is no longer the version that was indexed."""
    return StorageError(CHANGED, file=file, hint=CHANGED_HINT)


def is_missing(error: StorageError) -> bool:
    """Return whether the error means that a file does not exist."""
    return isinstance(error.__cause__, FileNotFoundError)


def is_replaced(error: StorageError) -> bool:
    """Return whether the error means that a file was replaced."""
    return error.message == REPLACED


@dataclass(frozen=True, slots=True)
class Prices:
    """What a store charges, in dollars."""

    request: float = 0.4e-6  # per request
    gigabyte: float = 0.0  # per 10^9 bytes that leave the store; reading inside one region is free in most clouds


class StoreTraffic:
    """Counts requests to stores and the bytes received. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.requests = self.bytes = 0  # since `take` was called last

    def sent(self) -> None:
        """Count a request, whether it succeeds or not."""
        with self._lock:
            self.requests += 1

    def received(self, data: memoryview) -> memoryview:
        """Count the bytes of a response, and return them."""
        with self._lock:
            self.bytes += len(data)
        return data

    def take(self) -> tuple[int, int]:
        """Return the requests and bytes since the last call."""
        with self._lock:
            taken = self.requests, self.bytes
            self.requests = self.bytes = 0
        return taken


TRAFFIC = StoreTraffic()
"""The traffic of all storages of this process."""


# Seconds to wait for another process: the first one may sort ten million keys and write gigabytes to a slow disk.
_PATIENCE: Final = 600.0


def node_cache() -> NodeCache | None:
    """Return the node's cache of files, or None if FASTVID_CACHE is set to an empty text, which switches it off.

    Its folder is FASTVID_CACHE; otherwise ``fastvid`` in XDG_CACHE_HOME, which is ``~/.cache`` unless set. Its size is
    limited by FASTVID_CACHE_BYTES as in `RemoteOptions`.
    """
    options = RemoteOptions()
    if CACHE_VARIABLE in os.environ:
        folder = options.cache_folder()
    else:
        base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        # Without a home folder, "~" stays: do not create a folder of that name.
        folder = Path(base) / "fastvid" if os.path.isabs(base) else None
    return NodeCache(folder, options.cache_limit(), _PATIENCE) if folder else None
