"""Requests to object stores and web servers: retries, versions, errors. The one file that imports obstore.

obstore rather than fsspec: on one server a ranged request costs it 0.1 ms of CPU and s3fs 2026.9 1.0 ms (measured), it
checks ranges against the answer, has conditional reads and puts, and aborts an upload whose block raises. fsspec
reaches more kinds of storage, but its reads of many ranges take no condition, and s3fs ties the user to one botocore.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import random
import time
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import cached_property, partial
from typing import IO, TYPE_CHECKING, Any, Final, TypeVar, cast
from urllib.parse import urlsplit

import obstore
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    GenericError,
    NotSupportedError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)
from obstore.store import GCSStore, HTTPStore, S3Store

from fastvid.errors import FastvidError, StorageError, UsageError
from fastvid.storage import answers
from fastvid.storage.options import RemoteOptions
from fastvid.storage.pool import pause
from fastvid.storage.protocol import REPLACED, replaced
from fastvid.storage.version import Version

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig

RANGE_SECONDS: Final = 60.0
"""Longest a read request may take in all, so that a server that trickles cannot hold a reader: 16 MiB at 280 kB/s."""

WRITE_SECONDS: Final = 600.0
"""Longest a write request may take: S3 may need minutes to put a large upload together."""

FIRST_SECONDS: Final = 15.0
"""Patience until the storage has answered once: what never worked is more likely a wrong address than a hiccup."""

FIRST_PAUSE: Final = 0.1
LONGEST_PAUSE: Final = 10.0
"""Pauses between tries double from the first to the longest, each drawn evenly from its upper half (jitter)."""

PART_BYTES: Final = 16 * 2**20
"""Part of an upload. S3 allows 10,000 parts, so a file may have 156 GiB; four parts in flight take 64 MiB."""

LIST_ENTRIES: Final = 1000
"""Names that come from the library at once: what S3 gives in one answer."""

STREAM_BYTES: Final = 2**20
"""Least bytes of an answer that are taken at once."""

RANGE_NOT_SATISFIABLE: Final = 416

_WRITER: Final = "fastvid-writer"
_TRIES_TO_REPORT: Final = 3

log = logging.getLogger(__name__)

_jitter = random.SystemRandom()  # the user's random numbers are left alone

T = TypeVar("T")
_Store = S3Store | GCSStore | HTTPStore

# The runtime of the library lives in threads, which a fork does not copy: a child that used it would wait for ever.
_process: int | None = None


class Client:
    """Requests to one folder of a remote storage.

    Args:
        url: ``s3://bucket/folder``, ``gs://bucket/folder`` or ``http(s)://host/folder``.
        options: Timeouts and patience.
        query: Sent with every request to a web server, such as a signature.

    Raises:
        UsageError: The URL is none of these or carries what does not belong there, or a setting of the environment
            is wrong.
    """

    def __init__(self, url: str, options: RemoteOptions, query: str = "") -> None:
        self.url, self.options, self._query = url.rstrip("/"), options, query
        self._answered = False
        self._reader = _store(
            self.url,
            {
                "allow_http": True,  # only where the user gave an http:// address
                "connect_timeout": timedelta(seconds=options.connect_seconds),
                "read_timeout": timedelta(seconds=options.stall_seconds),
                "timeout": timedelta(seconds=RANGE_SECONDS),
                "pool_max_idle_per_host": str(options.concurrency),
            },
            # Reads are tried again by `_call`: the library does not repeat a body without a tag, and tells nobody when
            # it repeats one with a tag.
            {"max_retries": 0},
            query,
        )

    @cached_property
    def _writer(self) -> _Store:
        # Reads do without: a client takes 40 ms to set up, for the certificates. The library tries parts of uploads
        # again one by one, with time and not the count as the limit.
        return _store(
            self.url,
            {
                "allow_http": True,
                "connect_timeout": timedelta(seconds=self.options.connect_seconds),
                # No read timeout: it would count the time in which a large part is sent.
                "timeout": timedelta(seconds=WRITE_SECONDS),
            },
            {"max_retries": 1000, "retry_timeout": timedelta(seconds=self.options.patience_seconds)},
            self._query,
        )

    def head(self, name: str) -> Version | None:
        """The version of `name` that is there, None without one."""
        try:
            return self._call(name, lambda: _version(obstore.head(self._reader, name)))
        except StorageError as error:
            if missing(error):
                return None
            raise

    def get(self, name: str, most: int) -> tuple[memoryview | None, Version]:
        """All of `name` in one request and its version; no bytes when it has more than `most`."""

        def call() -> tuple[memoryview | None, Version]:
            result = obstore.get(self._reader, name)
            version = _version(result.meta)
            return (memoryview(result.bytes()) if version.size <= most else None), version

        return self._call(name, call)

    def get_range(
        self, name: str, offset: int, length: int, version: Version | None
    ) -> tuple[memoryview, Version | None]:
        """Bytes of `name`, fewer than `length` where it ends, and the version that they are of, which may be None for
        no bytes.

        Args:
            name: The file.
            offset: First byte.
            length: Bytes, at least 1.
            version: The version that the server is asked for; None takes any. Not every server keeps to it.

        Raises:
            StorageError: The file was replaced, or another reason.
        """
        options: dict[str, Any] = {"range": (offset, offset + length)}
        # A weak tag never matches in a precondition (RFC 9110, 13.1.1); it is compared with the answer alone.
        if version is not None and version.tag and not version.tag.startswith("W/"):
            options["if_match"] = version.tag

        def call() -> tuple[memoryview, Version | None]:
            try:
                result = obstore.get(self._reader, name, options=cast(Any, options))
            except GenericError as error:
                if answers.status(error) == RANGE_NOT_SATISFIABLE:
                    return memoryview(b""), version
                raise
            return memoryview(result.bytes()), _version(result.meta)

        return self._call(name, call)

    def list(self, folder: str) -> list[tuple[str, Version]]:
        """Names below `folder`, which is "" or whole parts of a path, with their versions; any order."""

        def call() -> list[tuple[str, Version]]:
            pages = obstore.list(self._reader, folder or None, chunk_size=LIST_ENTRIES)
            return [(entry["path"], _version(entry)) for page in pages for entry in page]

        return self._call(folder, call)

    def stream(self, name: str, take: Callable[[Version, Iterator[bytes]], None]) -> None:
        """Has all of `name` taken from one answer, of a server without ranges; if it breaks off, from the start."""

        def call() -> None:
            result = obstore.get(self._writer, name)  # its limits leave time for large bodies
            take(_version(result.meta), (bytes(piece) for piece in result.stream(min_chunk_size=STREAM_BYTES)))

        self._call(name, call)

    def put(self, name: str, data: bytes) -> None:
        """Puts `data` at `name` in one request."""
        self._call(name, lambda: obstore.put(self._writer, name, data, use_multipart=False))

    def put_if(self, name: str, data: bytes, version: Version | None) -> bool:
        """Puts `data` at `name` if `version` is there, None standing for no file. Returns whether it did."""
        modes: list[Any] = ["create"]
        if version is not None:
            if not version.tag:
                raise StorageError("the store gives no tags, so nothing can be swapped safely", file=self.file(name))
            # Ceph 16 compares the tag with its quotes and refuses a right one; seen there, and without them it agrees.
            tags = dict.fromkeys((version.tag, version.tag.strip('"')))
            modes = [{"e_tag": tag} | ({"version": version.number} if version.number else {}) for tag in tags]
        # A put that is repeated because its answer was lost meets its own file; the mark tells it from a rival's.
        mark = uuid.uuid4().hex
        for mode in modes:
            if self._call(name, partial(self._put_once, name, data, mode, mark)):
                return True
            found_mark, found = self._look(name)
            if found_mark == mark:
                return True
            if version is None or found is None or not found.same(version):
                return False
        return False

    @contextlib.contextmanager
    def upload(self, name: str) -> Iterator[IO[bytes]]:
        """A file that is put together at `name` when the block ends; its parts are dropped when it raises."""

        def start() -> obstore.WritableFile:
            return obstore.open_writer(self._writer, name, buffer_size=PART_BYTES, max_concurrency=4)

        writer = self._call(name, start)
        try:
            yield cast(IO[bytes], _Upload(lambda data: self._once(name, lambda: writer.write(data))))
        except BaseException as error:
            try:
                writer.__exit__(type(error), error, error.__traceback__)
            except (BaseError, OSError) as second:
                log.warning("parts of an upload remain at %s: %s", self.file(name), answers.reason(second))
            raise
        self._once(name, writer.close)

    def delete(self, name: str) -> None:
        """Removes `name`; absent is fine."""
        try:
            self._call(name, lambda: obstore.delete(self._writer, name))
        except StorageError as error:
            if not missing(error):
                raise

    def file(self, name: str) -> str:
        """The address of `name`."""
        return f"{self.url}/{name}"

    def _put_once(self, name: str, data: bytes, mode: Any, mark: str) -> bool:
        try:
            obstore.put(self._writer, name, data, mode=mode, attributes={_WRITER: mark})
        except (AlreadyExistsError, PreconditionError):
            return False
        return True

    def _look(self, name: str) -> tuple[object, Version | None]:
        """The mark of the put that made the file, and its version."""

        def call() -> tuple[object, Version]:
            result = obstore.get(self._reader, name)
            return result.attributes.get(_WRITER), _version(result.meta)

        try:
            return self._call(name, call)
        except StorageError as error:
            if missing(error):
                return None, None
            raise

    def _once(self, name: str, call: Callable[[], T]) -> T:
        """Calls what must not be repeated: bytes would be written twice."""
        try:
            return call()
        except (BaseError, OSError, ValueError) as error:
            raise _translated(error, self.file(name)) from error

    def _call(self, name: str, call: Callable[[], T]) -> T:
        """Calls until it succeeds, fails for good, or patience ends."""
        global _process
        if _process not in (None, os.getpid()):
            raise StorageError(
                "remote storage was used before this process was forked",
                file=self.file(name),
                hint="start worker processes with the method spawn or forkserver",
            )
        _process = os.getpid()
        start, tries = time.monotonic(), 0
        while True:
            tries += 1
            try:
                result = call()
            except (BaseError, OSError, ValueError) as error:
                if isinstance(error, FastvidError):
                    raise
                patience = self.options.patience_seconds
                if not self._answered:
                    patience = min(patience, FIRST_SECONDS)
                wait = min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** (tries - 1)) * _jitter.uniform(0.5, 1.0)
                spent = time.monotonic() - start
                passing = isinstance(error, GenericError) and answers.passing(error)
                if not passing or spent + wait > patience:
                    raise _translated(error, self.file(name), tries, spent) from error
                say = log.warning if tries >= _TRIES_TO_REPORT else log.info
                say("try %d of %s failed, again in %.1f s: %s", tries, self.file(name), wait, answers.reason(error))
                if not pause(wait):
                    raise _translated(error, self.file(name), tries, spent) from error
            else:
                self._answered = True
                return result


def missing(error: StorageError) -> bool:
    """Whether the error says that a file is not there."""
    return isinstance(error.__cause__, FileNotFoundError)


def changed(error: StorageError) -> bool:
    """Whether the error says that a file is another one than before."""
    return error.message == REPLACED


def without_ranges(error: StorageError) -> bool:
    """Whether the error says that the server sends whole files only."""
    return isinstance(error.__cause__, NotSupportedError)


class _Upload(io.RawIOBase):
    """What a block of `Client.upload` writes to."""

    def __init__(self, write: Callable[[bytes], int]) -> None:
        self._write = write
        self._at = 0

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def write(self, data: Any) -> int:
        # The library keeps what it is given, so a buffer that its owner may change is copied.
        data = data if isinstance(data, bytes) else bytes(data)
        self._at += self._write(data)
        return len(data)


def _store(url: str, client: ClientConfig, retry: RetryConfig, query: str) -> _Store:
    parts = urlsplit(url)
    if "@" in parts.netloc or parts.query or parts.fragment:
        # The address is printed in messages and written to logs.
        raise UsageError(
            "address of a storage has a user, a query or a fragment",
            file=f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}",
            hint="credentials come from the environment",
        )
    if not parts.netloc:
        raise UsageError("address of a storage names no bucket or host", file=url)
    prefix = parts.path.strip("/") or None
    try:
        if parts.scheme == "s3":
            return S3Store(parts.netloc, prefix=prefix, client_options=client, retry_config=retry)
        if parts.scheme == "gs":
            return GCSStore(parts.netloc, prefix=prefix, client_options=client, retry_config=retry)
        return HTTPStore.from_url(f"{url}/?{query}" if query else url, client_options=client, retry_config=retry)
    except (BaseError, OSError, ValueError) as error:
        raise UsageError(f"storage cannot be set up: {answers.reason(error)}", file=url) from error


def _version(meta: obstore.ObjectMeta) -> Version:
    return Version(meta["e_tag"], meta["last_modified"], meta["size"], meta["version"])


def _translated(error: Exception, file: str, tries: int = 1, seconds: float = 0.0) -> FastvidError:
    if isinstance(error, FileNotFoundError):
        what = "bucket" if "NoSuchBucket" in str(error) else "file"
        return StorageError(f"{what} does not exist", file=file)
    if isinstance(error, PreconditionError):
        return replaced(file)
    if isinstance(error, NotSupportedError):
        return StorageError(
            "the server does not keep to byte ranges", file=file, hint="serve the files with one that does, as nginx"
        )
    if isinstance(error, ValueError):
        return UsageError(f"name is not possible: {answers.reason(error)}", file=file)
    text = answers.reason(error)
    if isinstance(error, PermissionDeniedError | UnauthenticatedError):
        text = f"access is denied: {text}"
    if tries > 1:
        text += f" ({tries} tries in {seconds:.0f} s)"
    return StorageError(text, hint=answers.hint(error), file=file)
