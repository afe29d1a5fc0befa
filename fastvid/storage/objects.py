"""Storage in object stores (``s3://``, ``gs://``), read-only on web servers (``http(s)://``) and the Hub (``hf://``).

Credentials and endpoints come from the usual environment variables, such as AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY,
AWS_REGION, AWS_ENDPOINT_URL, AWS_SKIP_SIGNATURE and GOOGLE_APPLICATION_CREDENTIALS, or from the machine's role.
"""

from __future__ import annotations

import builtins
import contextlib
import io
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import IO, Final

from fastvid.errors import StorageError
from fastvid.runtime.values import sha256
from fastvid.storage.cache import NodeCache
from fastvid.storage.client import first_bytes, lacks_ranges
from fastvid.storage.local import LocalStorage
from fastvid.storage.protocol import (
    RemoteOptions,
    Version,
    changed_error,
    check_name,
    is_replaced,
    replaced_error,
    truncated_error,
)
from fastvid.storage.web import WebClient, open_client

PIECE_BYTES: Final = 16 * 2**20
"""Longer ranges are split into pieces of this size and read concurrently."""

DOWNLOAD_PIECES: Final = 4
"""Pieces that a download has in flight: 64 MiB in memory."""

MEMORY_BYTES: Final = 256 * 2**20
"""Bytes of mapped files that a storage keeps in memory; views of an evicted file stay valid."""


BYTES_PER_SECOND: Final = 64 * 2**20
"""Bytes that a process reads from a store in a second. Where the rate is limited to r requests a second, a request
costs as much time as 1/r of them."""

MOST_GAP: Final = 8 * 2**20
"""Maximum number of unneeded bytes that are read to save a request."""


_File = IO[bytes] | io.FileIO
_Part = tuple[memoryview, Version | None]


class ObjectStorage:
    """A folder in an object store, or on a web server, which supports neither listing nor writing."""

    _GAP = 32 * 1024
    """Smallest `gap`, in bytes. In CPU time alone a larger gap would be cheaper, but the network is shared with others.
    Eight frames of a clip of the profile `compact` take about two requests and most of the video's bytes; with 128 kB
    they would take one request and nearly all bytes."""

    copies = True

    def __init__(self, url: str, options: RemoteOptions | None = None, *, query: str = "") -> None:
        self.url, self._query = url.rstrip("/"), query
        self.options = options or RemoteOptions()
        self._is_http, self._is_hub = self.url.startswith("http"), self.url.startswith("hf://")
        self._client = open_client(self.url, self.options, query)
        folder = self.options.cache_folder()
        limits = (self.options.cache_limit(), self.options.patience_seconds)
        self._cache = NodeCache(folder, *limits) if folder else None
        self.units = self.options.units()
        self._kept: dict[str, str] = {}  # name of each file in the node cache's folder, by its name in this storage
        self._local: LocalStorage | None = None
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._versions: dict[str, Version] = {}
        self._memory: OrderedDict[str, memoryview] = OrderedDict()
        self._memory_bytes = 0
        self._fetching: dict[str, threading.Lock] = {}

    @property
    def concurrency(self) -> int:
        """Maximum number of requests in flight."""
        return self.options.concurrency

    @property
    def gap(self) -> int:
        """Number of bytes that cost as much as one more request: more while the store limits the rate of requests."""
        limit = self._client.rate.limit
        return self._GAP if limit is None else int(min(MOST_GAP, max(self._GAP, BYTES_PER_SECOND / limit)))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    def __reduce__(self) -> tuple[object, ...]:
        return partial(type(self), query=self._query), (self.url, self.options)

    def list(self, prefix: str = "") -> builtins.list[str]:
        return [name for name, _ in self.entries(prefix)]

    def entries(self, prefix: str = "") -> builtins.list[tuple[str, Version]]:
        """Return the names that start with `prefix`, sorted, with their current versions."""
        if self._is_http:
            raise StorageError("cannot list files over HTTP", file=self.url, hint="name the files explicitly")
        found = self._client.list(prefix.rpartition("/")[0])
        return sorted(((name, version) for name, version in found if name.startswith(prefix)), key=lambda pair: pair[0])

    def version(self, name: str) -> Version | None:
        """Return the current version of `name`, or None if the file does not exist."""
        return self._client.head(check_name(name, self.url))

    def begin(self, name: str, most: int) -> tuple[Version, memoryview] | None:
        """Return the current version of `name` and up to `most` first bytes, or None if the file does not exist."""
        return first_bytes(self._client, check_name(name, self.url), most)

    def exists(self, name: str) -> bool:
        return self._client.head(check_name(name, self.url)) is not None

    def size(self, name: str) -> int:
        kept = self._kept.get(name)
        if kept is not None and self._local is not None:
            with contextlib.suppress(StorageError):
                return self._local.size(kept)
        return self._head(name).size

    def read(self, name: str) -> bytes:
        whole = io.BytesIO()
        self.download(name, whole, lambda _: None)
        return whole.getvalue()

    def read_into(self, name: str, ranges: Sequence[tuple[int, memoryview]], version: Version | None = None) -> None:
        check_name(name, self.url)
        if version is None and self._read_kept(name, ranges):
            return
        try:
            found = self._fill(name, ranges, version or self._versions.get(name))
        except StorageError as error:
            if is_replaced(error) and version is not None:
                raise changed_error(self._client.file(name)) from error
            raise
        if version is None and found is not None:
            with self._lock:
                known = self._versions.setdefault(name, found)
            if not known.same(found):
                raise replaced_error(self._client.file(name))

    def download(self, name: str, file: _File, check: Callable[[Version], None]) -> Version:
        """Copy all of `name` to a local file.

        `check`: called with the version before the first byte is written; may raise. Returns the version that
        was copied.
        """
        try:
            data, version = self._client.get_range(check_name(name, self.url), 0, PIECE_BYTES, None)
        except StorageError as error:
            if lacks_ranges(error) and isinstance(self._client, WebClient):
                return _download_whole(self._client, name, file, check)
            raise
        version = version or self._head(name)  # an empty file has no range to request
        check(version)
        file.write(data)
        step = PIECE_BYTES * DOWNLOAD_PIECES
        for start in range(len(data), version.size, step):
            piece = memoryview(bytearray(min(step, version.size - start)))
            self._fill(name, [(start, piece)], version)
            file.write(piece)
        return version

    def map(self, name: str) -> memoryview:
        check_name(name, self.url)
        with self._lock:
            fetching = self._fetching.setdefault(name, threading.Lock())
        with fetching:
            with self._lock:
                if name in self._memory:
                    self._memory.move_to_end(name)
                    return self._memory[name]
            kept = self._kept_content(name)
            data = memoryview(self.read(name) if kept is None else kept)
            with self._lock:
                self._memory[name] = data
                self._memory_bytes += len(data)
                while self._memory_bytes > MEMORY_BYTES:
                    self._memory_bytes -= len(self._memory.popitem(last=False)[1])
            return data

    def keep(self, name: str) -> bool:
        if self._cache is None:
            return False
        version = self._head(name)
        if version.size > self._cache.limit:
            return False
        key = self._cache_key(name, version)
        for _ in range(2):
            path = self._cache.file(key, partial(self._write_copy, name, version))
            if path is None:
                return False
            with contextlib.suppress(FileNotFoundError):  # another process has evicted it
                if path.stat().st_size == version.size:
                    with self._lock:
                        self._local = self._local or LocalStorage(self._cache.folder)
                        self._kept[name] = path.relative_to(self._cache.folder).as_posix()
                    return True
            self._cache.discard(key)
        return False

    def discard(self, name: str) -> bool:
        self._forget(name)
        if self._cache is not None:
            self._cache.discard(self._cache_key(name, self._head(name)))
        return True

    def write(self, name: str, data: bytes) -> None:
        self._writing(name)
        self._client.put(name, data)
        self._forget(name)

    def swap(self, name: str, data: bytes, expected: bytes | None) -> bool:
        self._writing(name)
        version = None
        if expected is not None:
            found = first_bytes(self._client, name, len(expected) + 1)
            if found is None or bytes(found[1]) != expected:
                return False
            version = found[0]
        done = self._client.put_if(name, data, version)
        self._forget(name)
        return done

    @contextlib.contextmanager
    def create(self, name: str) -> Iterator[IO[bytes]]:
        self._writing(name)
        with self._client.upload(name) as file:
            yield file
        self._forget(name)

    def delete(self, name: str) -> None:
        self._writing(name)
        self._client.delete(name)
        self._forget(name)

    def sweep(self) -> None:
        """Do nothing: interrupted uploads are invisible, and a bucket's lifecycle rule deletes their parts."""

    def close(self) -> None:
        with self._lock:
            pool, self._pool = self._pool, None
            self._memory.clear()
            self._memory_bytes = 0
        if pool is not None:
            pool.shutdown(wait=False)

    def _read_kept(self, name: str, ranges: Sequence[tuple[int, memoryview]]) -> bool:
        kept = self._kept.get(name)
        if kept is None or self._local is None:
            return False
        try:
            self._local.read_into(kept, ranges)
        except StorageError:  # the cache has dropped the file
            self._kept.pop(name, None)
            return False
        return True

    def _write_copy(self, name: str, version: Version, path: Path) -> None:
        def check(found: Version) -> None:
            if not version.same(found):
                raise replaced_error(self._client.file(name))

        with path.open("wb") as file:
            self.download(name, file, check)

    def _head(self, name: str) -> Version:
        version = self._client.head(check_name(name, self.url))
        if version is None:
            raise StorageError("file does not exist", file=self._client.file(name))
        return version

    def _kept_content(self, name: str) -> bytes | None:
        """Return the bytes of a file in the node's cache, first copying it there; None without a usable cache."""
        if self.keep(name) and self._local is not None:
            with contextlib.suppress(StorageError):  # another process has evicted the file
                return self._local.read(self._kept.get(name, ""))
        return None

    def _cache_key(self, name: str, version: Version) -> str:
        return sha256(repr((self.url, name, version.tag, version.modified, version.size)).encode())

    def _fill(self, name: str, ranges: Sequence[tuple[int, memoryview]], version: Version | None) -> Version | None:
        """Fill the views with bytes of one version of the file (None: the current one), and return that version."""
        pieces = [
            (offset + at, view[at : at + PIECE_BYTES])
            for offset, view in ranges
            for at in range(0, len(view), PIECE_BYTES)
        ]
        if len(pieces) < 2:
            parts: Sequence[_Part] = [
                self._client.get_range(name, offset, len(view), version) for offset, view in pieces
            ]
        else:
            parts = self._side_by_side(name, pieces, version)
        for (offset, view), (data, found) in zip(pieces, parts, strict=True):
            version = version or found
            # Compare the response as well: some servers ignore preconditions, and none can check them without tags.
            if version is not None and found is not None and not version.same(found):
                raise replaced_error(self._client.file(name))
            if len(data) != len(view):
                raise truncated_error(offset, len(view), len(data), self._client.file(name))
            view[:] = data
        return version

    def _side_by_side(
        self, name: str, pieces: Sequence[tuple[int, memoryview]], version: Version | None
    ) -> Sequence[_Part]:
        # The threads return bytes instead of filling the views, so that none writes to a view after an interrupt.
        futures: list[Future[_Part]] = []
        try:
            # While the interpreter exits no thread can be started, but running threads may still be reading.
            with contextlib.suppress(RuntimeError), self._lock:
                self._pool = self._pool or ThreadPoolExecutor(self.options.concurrency, "fastvid-storage")
                for offset, view in pieces:
                    futures.append(self._pool.submit(self._client.get_range, name, offset, len(view), version))
            rest = [self._client.get_range(name, offset, len(view), version) for offset, view in pieces[len(futures) :]]
            return [future.result() for future in futures] + rest
        finally:
            for future in futures:
                future.cancel()

    def _forget(self, name: str) -> None:
        with self._lock:
            self._versions.pop(name, None)
            self._memory_bytes -= len(self._memory.pop(name, b""))
            kept = self._kept.pop(name, None)
        if kept is not None and self._local is not None:
            self._local.discard(kept)

    def _writing(self, name: str) -> str:
        if self._is_http or self._is_hub:
            where = "over HTTP" if self._is_http else "to the Hub"
            raise StorageError(f"cannot write {where}", file=self.url, hint="use s3:// or gs://")
        return check_name(name, self.url)


def _download_whole(client: WebClient, name: str, file: _File, check: Callable[[Version], None]) -> Version:
    """Copy a file of a server without byte ranges."""
    found: list[Version] = []

    def take(version: Version, pieces: Iterator[bytes]) -> None:
        check(version)
        file.seek(0)
        file.truncate()
        for piece in pieces:
            file.write(piece)
        found.append(version)

    client.stream(name, take)
    return found[-1]
