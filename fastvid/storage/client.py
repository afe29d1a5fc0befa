"""Requests to object stores and web servers, with retries and versions, through obstore.

obstore's errors have no fields, only a text: the HTTP status, the cause and a hint are extracted from the text.

Why obstore and not fsspec: a range request costs it less CPU than s3fs. obstore compares the response with the
requested range, has conditional reads and puts, and aborts an upload whose block raises. fsspec supports more kinds of
storage, but its multi-range reads take no precondition, and s3fs pins one botocore version.
"""

from __future__ import annotations

import contextlib
import io
import logging
import re
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import cached_property, partial
from http import HTTPStatus
from typing import IO, TYPE_CHECKING, Any, Final, TypeVar, cast
from urllib.parse import SplitResult, urlsplit

import obstore
from obstore import exceptions
from obstore.store import GCSStore, S3Store

from fastvid.errors import FastvidError, StorageError, UnavailableError, UsageError
from fastvid.storage.protocol import TRAFFIC, RemoteOptions, Version, replaced_error
from fastvid.storage.requests import Client, Failure, MissingIgnored

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig


_DEBUG: Final = "\n\nDebug source"
_NO_CREDENTIALS: Final = re.compile(r"169\.254\.169\.254|/latest/api/token|computeMetadata")
"""Metadata services of AWS and Google Cloud: obstore asks them for credentials if the environment has none."""

_TRANSIENT_STATUS: Final = frozenset({408, 425, 429})
"""Status codes below 500 that mean "not now" (RFC 9110, RFC 8470, RFC 6585)."""


_REFUSED: Final = frozenset({429, 503})
"""Status codes that mean "too many requests" (RFC 6585; S3 says "503 Slow Down")."""


def http_status(error: Exception) -> int | None:
    """Return the HTTP status of the response, or None without a response."""
    match = re.search(r"non-2xx status code: (\d{3})", str(error))
    return int(match[1]) if match else None


def is_transient(error: Exception) -> bool:
    """Return whether a retry of the request may succeed."""
    code = http_status(error)
    if code is not None:
        return code >= 500 or code in _TRANSIENT_STATUS
    return "redirect without LOCATION" not in str(error)


def reason(error: Exception) -> str:
    """Return the cause of a failed request on one line, without the URL."""
    head, _, debug = str(error).partition(_DEBUG)
    response = re.search(r"status code: (\d{3} ?[A-Za-z -]*)", head)
    if response:
        code = re.search(r"<Code>(\w+)</Code>", head)
        return f"the server responded {response[1].strip()}" + (f", {code[1]}" if code else "")
    if "TimedOut" in debug or "kind: Timeout" in debug:
        return "the request timed out"
    if "redirect without LOCATION" in head:
        return "the bucket is in another region"
    if "IncompleteBody" in debug:
        return "the response ended early"
    detail = re.findall(r'(?:message|error): "([^"]+)"', debug)
    return detail[-1] if detail else head.rpartition(": ")[2].strip() or type(error).__name__


_S3_KEYS: Final = "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and, for a temporary login, AWS_SESSION_TOKEN"
_REGION: Final = "set AWS_REGION: the bucket is in another region"
_CAUSES: Final = {
    "redirect without LOCATION": _REGION,
    "AuthorizationHeaderMalformed": _REGION,
    "IllegalLocationConstraint": _REGION,
    "InvalidToken": f"set {_S3_KEYS} of one login",
    "ExpiredToken": f"log in again and set {_S3_KEYS}",
    "InvalidAccessKeyId": f"set {_S3_KEYS}: the store does not know the first",
    "SignatureDoesNotMatch": f"set {_S3_KEYS}: the second does not belong to the first",
    "RequestTimeTooSkewed": "set the clock of this machine",
}
"""Hints, by a text that the store's error contains."""
_CREDENTIALS: Final = {
    "s3": f"set {_S3_KEYS}, or AWS_SKIP_SIGNATURE=true for a public bucket",
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS to a key file",
    "http": "use an address that needs no login: fastvid sends none to web servers",
}
_DENIED: Final = (401, 403)


def hint(error: Exception, file: str) -> str | None:
    """Return how the user can fix the cause, or None if unknown."""
    text, scheme = str(error), file.partition(":")[0]
    known = next((what for cause, what in _CAUSES.items() if cause in text), None)
    if known is not None:
        return known
    needed = _CREDENTIALS.get(scheme, _CREDENTIALS["http"])
    if _NO_CREDENTIALS.search(text):
        return f"{needed}: no credentials were found"
    if http_status(error) in _DENIED:
        return f"{needed}; without permission to list, missing files are denied, too"
    if http_status(error) == HTTPStatus.BAD_REQUEST and scheme == "s3":
        return f"set AWS_REGION to the bucket's region, and {_S3_KEYS}: one of them may be wrong or expired"
    return None


Store = S3Store | GCSStore


def checked_parts(url: str) -> SplitResult:
    """Return the parts of a folder's URL; UsageError if it has too many or too few."""
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise UsageError(f"storage URL is invalid: {error}", file=url, hint="write it like http://HOST/DIR") from error
    if "@" in parts.netloc or parts.query or parts.fragment:
        # URLs appear in messages and logs, so they must not contain secrets.
        raise UsageError(
            "storage URL contains a user, a query or a fragment",
            file=f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}",
            hint="pass credentials through environment variables",
        )
    if not parts.netloc:
        raise UsageError("storage URL has no bucket or host", file=url)
    return parts


def open_store(url: str, client: ClientConfig, retry: RetryConfig) -> Store:
    """Open a store at a folder's URL."""
    parts = checked_parts(url)
    kind, prefix = S3Store if parts.scheme == "s3" else GCSStore, parts.path.strip("/") or None
    try:
        return kind(parts.netloc, prefix=prefix, client_options=client, retry_config=retry)
    except (exceptions.BaseError, OSError, ValueError) as error:
        raise UsageError(f"cannot open the storage: {reason(error)}", file=url) from error


RANGE_SECONDS: Final = 60.0
"""Time limit of a read request, so that a slow server cannot block a reader: 16 MiB at 280 kB/s."""

WRITE_SECONDS: Final = 600.0
"""Time limit of a write request: S3 may need minutes to assemble a large upload."""

PART_BYTES: Final = 16 * 2**20
"""Size of an upload's part. S3 allows 10,000 parts, so up to 156 GiB a file; four parts in flight take 64 MiB."""

LIST_ENTRIES: Final = 1000
"""Page size of a listing: the maximum of one S3 response."""

RANGE_NOT_SATISFIABLE: Final = 416

_WRITER: Final = "fastvid-writer"
log = logging.getLogger(__name__)

T = TypeVar("T")


class StoreClient(Client):
    """Requests to one folder of an object store."""

    def __init__(self, url: str, options: RemoteOptions) -> None:
        super().__init__(url, options)
        self._reader = open_store(
            self.url,
            {
                "allow_http": True,  # has an effect only if the user gave an http:// address
                "connect_timeout": timedelta(seconds=options.connect_seconds),
                "read_timeout": timedelta(seconds=options.stall_seconds),
                "timeout": timedelta(seconds=RANGE_SECONDS),
                "pool_max_idle_per_host": str(options.concurrency),
            },
            # `_call` retries reads: obstore does not retry a body without an entity tag, and retries one with a tag
            # silently.
            {"max_retries": 0},
        )

    @cached_property
    def _writer(self) -> Store:
        # Created on first write only: a client loads its certificates. obstore retries the parts of an
        # upload one by one, limited by time rather than by the number of attempts.
        return open_store(
            self.url,
            {
                "allow_http": True,
                "connect_timeout": timedelta(seconds=self.options.connect_seconds),
                # No read timeout: it would include the time to send a large part.
                "timeout": timedelta(seconds=WRITE_SECONDS),
            },
            {"max_retries": 1000, "retry_timeout": timedelta(seconds=self.options.patience_seconds)},
        )

    def _explain(self, error: Exception) -> Failure:
        if not isinstance(error, exceptions.BaseError | OSError | ValueError):
            raise error
        transient = isinstance(error, exceptions.GenericError) and is_transient(error)
        return Failure(reason(error), transient=transient, refused=http_status(error) in _REFUSED)

    def _translated(self, error: Exception, file: str, tries: int = 1, seconds: float = 0.0) -> FastvidError:
        if isinstance(error, FileNotFoundError):
            what = "bucket" if "NoSuchBucket" in str(error) else "file"
            return StorageError(f"{what} does not exist", file=file)
        if isinstance(error, exceptions.PreconditionError):
            return replaced_error(file)
        if isinstance(error, exceptions.NotSupportedError):
            return StorageError(
                "server does not support byte ranges", file=file, hint="use one that does, such as nginx"
            )
        if isinstance(error, ValueError):
            return UsageError(f"invalid file name: {reason(error)}", file=file)
        text = reason(error)
        if isinstance(error, exceptions.PermissionDeniedError | exceptions.UnauthenticatedError):
            text = f"access denied: {text}"
        if tries > 1:
            text += f" ({tries} attempts in {seconds:.0f} s)"
        too_short = http_status(error) == 416  # the file ends before the range
        return (StorageError if too_short else UnavailableError)(text, hint=hint(error, file), file=file)

    def _current(self, name: str) -> Version:
        return self._call(name, lambda: _version(obstore.head(self._reader, name)))

    def get_range(
        self, name: str, offset: int, length: int, version: Version | None
    ) -> tuple[memoryview, Version | None]:
        """Read a range of `name`.

        `offset`: first byte. `length`: number of bytes, at least 1. Returns the bytes, fewer than `length` if
        the file ends inside the range, and their version, which may be None when there are no bytes.
        """
        options: dict[str, Any] = {"range": (offset, offset + length)}
        # A weak tag never matches in a precondition (RFC 9110, 13.1.1); the caller compares it with the response.
        if version is not None and version.tag and not version.tag.startswith("W/"):
            options["if_match"] = version.tag

        def call() -> tuple[memoryview, Version | None]:
            try:
                result = obstore.get(self._reader, name, options=cast(Any, options))
            except exceptions.GenericError as error:
                if http_status(error) == RANGE_NOT_SATISFIABLE:
                    return memoryview(b""), version
                raise
            return TRAFFIC.received(memoryview(result.bytes())), _version(result.meta)

        return self._call(name, call)

    def list(self, folder: str) -> list[tuple[str, Version]]:
        """List the names below `folder` ("" or whole path components) with their versions, in any order."""

        def call() -> list[tuple[str, Version]]:
            pages = obstore.list(self._reader, folder or None, chunk_size=LIST_ENTRIES)
            return [(entry["path"], _version(entry)) for page in pages for entry in page]

        return self._call(folder, call)

    def put(self, name: str, data: bytes) -> None:
        """Write `data` to `name` in one request."""
        self._call(name, lambda: obstore.put(self._writer, name, data, use_multipart=False))

    def put_if(self, name: str, data: bytes, version: Version | None) -> bool:
        """Write `data` to `name` if `version` is current (None: no file); return whether it was written."""
        modes: list[Any] = ["create"]
        if version is not None:
            if not version.tag:
                raise StorageError("store sends no entity tags, so it cannot swap files safely", file=self.file(name))
            # Ceph 16 rejects a correct tag in quotes but accepts it without them (observed), so try both.
            tags = dict.fromkeys((version.tag, version.tag.strip('"')))
            modes = [{"e_tag": tag} | ({"version": version.number} if version.number else {}) for tag in tags]
        # If the response of a put is lost, its retry finds the file already there; the mark tells whose file it is.
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
        """Upload a file that appears at `name` when the block ends; discard it if the block raises."""

        def start() -> obstore.WritableFile:
            return obstore.open_writer(self._writer, name, buffer_size=PART_BYTES, max_concurrency=4)

        writer = self._call(name, start)
        try:
            yield cast(IO[bytes], _Upload(lambda data: self._once(name, lambda: writer.write(data))))
        except BaseException as error:
            try:
                writer.__exit__(type(error), error, error.__traceback__)
            except (exceptions.BaseError, OSError) as second:
                log.warning("cannot abort the upload of %s: %s", self.file(name), reason(second))
            raise
        self._once(name, writer.close)

    def delete(self, name: str) -> None:
        """Delete `name` if it exists."""
        with MissingIgnored():
            self._call(name, lambda: obstore.delete(self._writer, name))

    def _put_once(self, name: str, data: bytes, mode: Any, mark: str) -> bool:
        try:
            obstore.put(self._writer, name, data, mode=mode, attributes={_WRITER: mark})
        except (exceptions.AlreadyExistsError, exceptions.PreconditionError):
            return False
        return True

    def _look(self, name: str) -> tuple[object, Version | None]:
        """Return the mark of the put that wrote `name`, and the file's version; (None, None) without a file."""

        def call() -> tuple[object, Version]:
            result = obstore.get(self._reader, name)
            return result.attributes.get(_WRITER), _version(result.meta)

        with MissingIgnored():
            return self._call(name, call)
        return None, None

    def _once(self, name: str, call: Callable[[], T]) -> T:
        """Make a call without retries: a retry would write the bytes twice."""
        try:
            return call()
        except (exceptions.BaseError, OSError, ValueError) as error:
            raise self._translated(error, self.file(name)) from error


def first_bytes(client: StoreClient, name: str, most: int) -> tuple[Version, memoryview] | None:
    """Return the current version of `name` and up to `most` of its first bytes, if possible by one request.

    Returns None if the file does not exist. A server without byte ranges gives no bytes.
    """
    with MissingIgnored():
        try:
            data, version = client.get_range(name, 0, most, None)
        except StorageError as error:
            if not lacks_ranges(error):
                raise
            data, version = memoryview(b""), None
        version = version or client.head(name)  # an empty file has no range to request
        return None if version is None else (version, data)
    return None


def lacks_ranges(error: StorageError) -> bool:
    """Return whether the error means that the server does not support byte ranges."""
    return isinstance(error.__cause__, exceptions.NotSupportedError)


class _Upload(io.RawIOBase):
    """The writable file that `StoreClient.upload` yields."""

    def __init__(self, write: Callable[[bytes], int]) -> None:
        self._write = write
        self._at = 0

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def write(self, data: Any) -> int:
        # obstore keeps a reference to the data, and the caller may change its buffer, so copy the buffer.
        data = data if isinstance(data, bytes) else bytes(data)
        self._at += self._write(data)
        return len(data)


def _version(meta: obstore.ObjectMeta) -> Version:
    return Version(meta["e_tag"], meta["last_modified"], meta["size"], meta["version"])
