"""Read files of web servers, following only redirects that are allowed.

A server may redirect a request to any address, such as one inside this machine's own network. So a redirect is followed
only to the same host, or with ``redirects="any"`` to other hosts, but never from a public address to one that is not
public. obstore follows all redirects.

Connections are those of `http.client`, but heads of responses are read here: its parser, that of e-mail, takes much of
the time of a small range, and makes other threads wait for Python's lock.
"""

from __future__ import annotations

import http.client
import ipaddress
import re
import select
import ssl
import threading
import time
import weakref
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import cache, lru_cache
from io import BufferedReader
from typing import Any, Final, cast
from urllib.parse import SplitResult, quote, unquote, urljoin, urlsplit
from urllib.request import getproxies, proxy_bypass

from obstore import exceptions

from fastvid.errors import FastvidError, MissingDependency, StorageError
from fastvid.storage.client import RANGE_NOT_SATISFIABLE, RANGE_SECONDS, WRITE_SECONDS, StoreClient, checked_parts
from fastvid.storage.protocol import REDIRECTS_VARIABLE, TRAFFIC, RemoteOptions, Version
from fastvid.storage.requests import Client

_MOVED: Final = (301, 302, 303, 307, 308)
_REDIRECTS: Final = 5
_PIECE_BYTES: Final = 2**20
_EPOCH: Final = datetime.fromtimestamp(0, UTC)
_ERRORS: Final[Mapping[int, type[Exception]]] = {
    401: exceptions.UnauthenticatedError, 403: exceptions.PermissionDeniedError, 412: exceptions.PreconditionError,
    404: FileNotFoundError, 410: FileNotFoundError,
}  # fmt: skip
_SAFE: Final = "/:@!$&'()*+,;=~[]"
_NO_PLACE: Final = re.compile(r"[^!-~]")  # what the URL in a request cannot contain
_CONTROL: Final = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")  # what no line of a head may contain; tabs may be in it
_STATUS: Final = re.compile(rb"HTTP/(1\.[01]) (\d{3})(?: ([^\r\n]*))?\r?\n")
_DIGITS: Final = re.compile(r"[0-9]{1,18}")
_PART: Final = re.compile(r"bytes ([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18})")
_ENDED: Final = "the server closed the connection without a response"
# As in `http.client`: most fields of a head, and most bytes of a line.
_MOST_FIELDS: Final = 100
_LONGEST_LINE: Final = 65536
_MOST_HEADS: Final = 10  # of one response, interim ones included
_PORTS: Final = {"http": 80, "https": 443}


class WebClient(StoreClient):
    """Requests to one folder of a web server."""

    def __init__(self, url: str, options: RemoteOptions, query: str = "") -> None:
        Client.__init__(self, url, options)
        checked_parts(self.url)
        self._query = query
        self._lock, self._idle = threading.Lock(), dict[tuple[bool, str, str], list[http.client.HTTPConnection]]()
        self._proxies = dict[tuple[str, str], SplitResult | None]()  # by scheme and host, looked up once
        self._is_public = False  # whether the host that the user named has a public address
        weakref.finalize(self, _close, self._idle)

    def _current(self, name: str) -> Version:
        def call() -> Version:
            with self._answer("HEAD", name) as answer:
                return answer.version

        return self._call(name, call)

    def get_range(
        self, name: str, offset: int, length: int, version: Version | None
    ) -> tuple[memoryview, Version | None]:
        """See `StoreClient`."""
        headers = {"Range": f"bytes={offset}-{offset + length - 1}"}
        # A weak tag never matches in a precondition (RFC 9110, 13.1.1); the caller compares it with the response.
        if version is not None and version.tag and not version.tag.startswith("W/"):
            headers["If-Match"] = version.tag

        def call() -> tuple[memoryview, Version | None]:
            with self._answer("GET", name, headers) as answer:
                if answer.status == RANGE_NOT_SATISFIABLE:
                    return memoryview(b""), version
                if answer.status != http.client.PARTIAL_CONTENT:
                    raise exceptions.NotSupportedError("the server sent the whole file")
                if answer.range != (offset, min(offset + length, answer.version.size)):
                    raise exceptions.GenericError("HTTP: the server sent another range")
                return TRAFFIC.received(memoryview(b"".join(answer.body))), answer.version

        return self._call(name, call)

    def stream(self, name: str, take: Callable[[Version, Iterator[bytes]], None]) -> None:
        """Pass version and bytes of `name` to `take`, for servers without ranges; a retry calls `take` again."""

        def call() -> None:
            with self._answer("GET", name, seconds=WRITE_SECONDS) as answer:
                take(answer.version, answer.body)

        self._call(name, call)

    @contextmanager
    def _answer(
        self, method: str, name: str, headers: Mapping[str, str] | None = None, seconds: float = RANGE_SECONDS
    ) -> Iterator[_Answer]:
        """Send a request, follow its redirects and yield the response; then keep the connection if it can be reused."""
        deadline = time.monotonic() + seconds
        root = quote(self.url, safe=_SAFE + "%")
        url = first = urlsplit(f"{root}/{quote(name, safe=_SAFE)}" + (f"?{self._query}" if self._query else ""))
        for _ in range(_REDIRECTS):
            connection, key = self._connect(url, is_first=url == first)
            response = None
            try:
                place = f"{url.path or '/'}?{url.query}".removesuffix("?")
                known = {"Accept-Encoding": "identity", "Host": url.netloc, **(headers or {})}
                if url.scheme == "http" and (proxy := self._proxy(url)):
                    place, known = url._replace(fragment="").geturl(), known | _credentials(proxy)
                response = _ask(connection, method, place, known)
                if response.status not in _MOVED or not (location := response.headers.get("location")):
                    yield _Answer.of(response, deadline)
                    return
                url = self._followed(first, url, urlsplit(urljoin(url.geturl(), location)))
            except (FileNotFoundError, FastvidError):
                raise
            except (http.client.HTTPException, OSError) as error:
                raise _failed(error) from error
            finally:
                if response is not None:
                    response.file.close()
                if response is not None and response.stays and response.left == 0:
                    with self._lock:
                        self._idle.setdefault(key, []).append(connection)
                else:
                    connection.close()
        raise StorageError(f"the server redirected {_REDIRECTS} times in a row", file=self.file(name))

    def _connect(self, url: SplitResult, *, is_first: bool) -> tuple[http.client.HTTPConnection, tuple[bool, str, str]]:
        """Return a connection to a URL's host or proxy, if possible an idle one, and its key in `_idle`."""
        key, host = (is_first, url.scheme, url.netloc), url.hostname or ""
        with self._lock:
            while self._idle.get(key):
                connection = self._idle[key].pop()
                if not _is_closed(connection):
                    return connection, key
                connection.close()
        proxy = self._proxy(url)
        place, seconds = proxy or url, self.options.connect_seconds
        at = place.hostname or "", place.port or _PORTS.get(place.scheme, 80)
        connection = http.client.HTTPConnection(*at, timeout=seconds)
        if url.scheme == "https":
            secure = connection = http.client.HTTPSConnection(*at, timeout=seconds, context=_tls())
            if proxy:
                secure.set_tunnel(host, url.port, _credentials(proxy))
        try:
            connection.connect()
            connection.sock.settimeout(self.options.stall_seconds)
            if not proxy:
                self._check_address(connection.sock.getpeername()[0], is_first=is_first)
        except (StorageError, OSError) as error:
            connection.close()
            if isinstance(error, StorageError):
                raise
            raise _failed(error) from error
        return connection, key

    def _proxy(self, url: SplitResult) -> SplitResult | None:
        key = (url.scheme, url.netloc)
        if key not in self._proxies:
            found = None if proxy_bypass(url.hostname or "") else getproxies().get(url.scheme)
            self._proxies[key] = urlsplit(found) if found else None
        return self._proxies[key]

    def _check_address(self, peer: str, *, is_first: bool) -> None:
        """Raise if a redirect led from a public address to another kind; by address, as names may resolve to any."""
        address = ipaddress.ip_address(peer.partition("%")[0])
        is_public = (getattr(address, "ipv4_mapped", None) or address).is_global
        if is_first:
            self._is_public |= is_public
        elif self._is_public and not is_public:
            raise StorageError(f"the server redirects to {address}, which is not a public address", file=self.url)

    def _followed(self, first: SplitResult, old: SplitResult, new: SplitResult) -> SplitResult:
        """Return `new`, the URL that a redirect from `old` leads to; raise if it must not be followed."""
        ports = [url.port or _PORTS.get(url.scheme, 0) for url in (first, new)]
        same = new.hostname == first.hostname and (ports[0] == ports[1] or (first.scheme, ports[1]) == ("http", 443))
        if new.scheme not in _PORTS or (old.scheme == "https" and new.scheme == "http"):
            raise StorageError(f"the server redirects to {new.scheme}://{new.netloc}", file=self.url)
        if not same and self.options.follows() != "any":
            raise StorageError(
                f"the server redirects to another host, {new.hostname}",
                file=self.url,
                hint=f"name the file there, or set {REDIRECTS_VARIABLE}=any if you trust the server",
            )
        return new


@cache
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()


def _is_closed(connection: http.client.HTTPConnection) -> bool:
    """Return whether the server has closed an idle connection: its socket is then readable."""
    waiting = select.poll()
    waiting.register(connection.sock, select.POLLIN)
    return bool(waiting.poll(0))


def _close(idle: Mapping[Any, list[http.client.HTTPConnection]]) -> None:
    for connections in idle.values():
        for connection in connections:
            connection.close()


def _credentials(proxy: SplitResult) -> dict[str, str]:
    if proxy.username is None:
        return {}
    user = f"{unquote(proxy.username)}:{unquote(proxy.password or '')}"
    return {"Proxy-Authorization": f"Basic {b64encode(user.encode()).decode()}"}


def _failed(error: Exception) -> exceptions.GenericError:
    told = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return exceptions.GenericError(f"HTTP: {'the request timed out' if isinstance(error, TimeoutError) else told}")


@dataclass(slots=True, eq=False)
class _Response:
    """The head of a response, and its body, which is read from `file`."""

    status: int
    reason: str
    headers: Mapping[str, str]  # by names in lower case; of equal names the first
    file: BufferedReader
    length: int  # of the body in bytes, for HEAD of that of GET; -1 if unknown
    left: int  # bytes of the body that were not read yet; -1 if unknown
    stays: bool  # whether the server keeps the connection open


def _ask(connection: http.client.HTTPConnection, method: str, place: str, headers: Mapping[str, str]) -> _Response:
    """Send a request and read the head of its response. Raises errors of `http.client` and OSError."""
    lines = [f"{method} {place} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
    if _NO_PLACE.search(place) or any(map(_CONTROL.search, lines)):
        raise http.client.InvalidURL(f"a request cannot contain {place!r}")
    connection.sock.sendall("\r\n".join(lines).encode("latin-1"))
    file = connection.sock.makefile("rb")
    try:
        for _ in range(_MOST_HEADS):
            found = _STATUS.fullmatch(line := _line(file))
            if found is None:
                raise http.client.BadStatusLine(repr(line)) if line else http.client.RemoteDisconnected(_ENDED)
            fields = _fields(file)
            if found[2] >= b"200":  # otherwise this is no final response, and another follows
                break
        else:
            raise http.client.HTTPException(f"the server sent {_MOST_HEADS} heads before its response")
    except BaseException:
        file.close()
        raise
    told = fields.get("connection", "").lower()
    stays = "close" not in told if found[1] == b"1.1" else "keep-alive" in told
    length = fields.get("content-length", "")
    size = int(length) if _DIGITS.fullmatch(length) and "transfer-encoding" not in fields else -1
    reason = (found[3] or b"").decode("latin-1")
    return _Response(int(found[2]), reason, fields, file, size, 0 if method == "HEAD" else size, stays)


def _fields(file: BufferedReader) -> dict[str, str]:
    """Read the fields of a head, up to the empty line after them."""
    fields = dict[str, str]()
    for _ in range(_MOST_FIELDS):
        line = _line(file)
        if not line.strip():
            return fields
        name, colon, value = line.decode("latin-1").partition(":")
        if name[:1].isspace():
            continue  # more of the field before, which is none that is used
        if not colon or name != name.strip() or _CONTROL.search(value.strip()):
            raise http.client.HTTPException(f"the response has the wrong field {name!r}")
        fields.setdefault(name.lower(), value.strip())
    raise http.client.HTTPException(f"the response has more than {_MOST_FIELDS} fields")


def _line(file: BufferedReader) -> bytes:
    line = file.readline(_LONGEST_LINE + 1)
    if len(line) > _LONGEST_LINE:
        raise http.client.LineTooLong("head of a response")
    return line


@dataclass(frozen=True, slots=True)
class _Answer:
    """A server's response."""

    status: int
    version: Version
    range: tuple[int, int]  # first byte of the body in the file, and the byte after its last
    body: Iterator[bytes]

    @classmethod
    def of(cls, response: _Response, deadline: float) -> _Answer:
        """Understand the head of a response. Raises errors of obstore's types, which `StoreClient` understands."""
        status, headers = response.status, response.headers
        if status >= 300 and status != RANGE_NOT_SATISFIABLE:
            raise _ERRORS.get(status, exceptions.GenericError)(f"non-2xx status code: {status} {response.reason}")
        if headers.get("content-encoding", "identity") != "identity":
            raise exceptions.NotSupportedError("the server compresses the file")
        size = response.length
        part = _PART.fullmatch(headers.get("content-range", ""))
        if status != RANGE_NOT_SATISFIABLE and (size < 0 or (status == http.client.PARTIAL_CONTENT and not part)):
            raise exceptions.GenericError("HTTP: the server does not say how much it sends")
        first, stop, whole = (int(part[1]), int(part[2]) + 1, int(part[3])) if part else (0, size, size)
        version = Version(headers.get("etag"), _moment(headers.get("last-modified", "")), whole)
        return cls(status, version, (first, stop), _pieces(response, deadline))


@lru_cache(maxsize=256)
def _moment(text: str) -> datetime:
    with suppress(ValueError, OverflowError):
        return parsedate_to_datetime(text)
    return _EPOCH


def _pieces(response: _Response, deadline: float) -> Iterator[bytes]:
    """Yield the bytes of a response's body; raise TimeoutError after `deadline`, in seconds of the clock."""
    while response.left:
        piece = response.file.read1(min(response.left, _PIECE_BYTES))
        if not piece:
            raise exceptions.GenericError("HTTP: the response ended early")
        response.left -= len(piece)
        yield piece
        if time.monotonic() > deadline:
            raise TimeoutError


def open_client(url: str, options: RemoteOptions, query: str = "") -> StoreClient:
    """Return the client of a folder; for the Hub one that has only the reading methods of `StoreClient`."""
    if url.startswith("http"):
        return WebClient(url, options, query)
    if not url.startswith("hf://"):
        return StoreClient(url, options)
    try:
        from fastvid.storage.hub import HubClient
    except ImportError as error:
        raise MissingDependency(
            f"storage hf:// needs a package that fails to import: {error}", hint="pip install 'fastvid-toolkit[hub]'"
        ) from error
    return cast(StoreClient, HubClient(url, options))
