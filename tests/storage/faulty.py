"""A small HTTP server that misbehaves on request, for tests of remote reading.

It keeps files in memory, supports ranges and preconditions in GET and HEAD like a good server, logs every request, and
applies each planned fault to one request.
"""

import contextlib
import hashlib
import re
import threading
import time
import urllib.parse
from collections import deque
from dataclasses import dataclass

from fastvid.storage import Storage
from tests.storage.local_server import LocalHandler, LocalServer


@dataclass
class Seen:
    """One request as the server saw it.

    Attributes:
        method: GET or HEAD.
        name: The requested file.
        range: First byte and the byte after the last; None for the whole file.
        if_match: The tag of the precondition.
        status: The response's status; 0 if the connection was closed without a response.
        body: Number of body bytes sent.
    """

    method: str
    name: str
    range: tuple[int, int] | None
    if_match: str | None
    status: int = 0
    body: int = 0


class FaultyServer(LocalServer):
    """Serves `files` and applies each of `faults` to one GET.

    A fault is a status code to respond, or one of: ``reset`` (no response), ``reset-body`` (reset inside the body),
    ``stall`` (no response, connection open), ``stall-body`` (half of the body, connection open), ``short`` (orderly
    close inside the body), ``short-range`` (declares and sends fewer bytes than requested), ``shifted-range`` (declares
    and sends other bytes than requested), ``whole`` (ignores the range), ``old-tag`` (ignores the precondition),
    ``none``.

    Args:
        store: A store whose files it serves; none by default.
        tags: Whether responses have entity tags.
        dates: Whether responses have dates.
        delay: Seconds before each response.
        meet: Number of requests that must be pending before any gets a response; after a time-out they get 400.
        rate: GETs that it serves in any second; more get 429.
    """

    def __init__(
        self,
        store: Storage | None = None,
        *,
        tags: bool = True,
        dates: bool = True,
        delay: float = 0.0,
        meet: int = 1,
        rate: int | None = None,
    ) -> None:
        super().__init__(_Handler)
        self.files: dict[str, bytes] = {name: store.read(name) for name in store.list()} if store is not None else {}
        self.faults: deque[int | str] = deque()
        self.tags, self.dates, self.delay = tags, dates, delay
        self.log: list[Seen] = []
        self.lock = threading.Lock()
        self.most_at_once = self._now = 0
        self.over = threading.Event()
        self.gate = threading.Barrier(meet)
        self.rate, self._served = rate, deque[float]()
        self.url = f"{self.endpoint}/set"

    def __exit__(self, *_: object) -> None:
        self.over.set()
        super().__exit__()

    @contextlib.contextmanager
    def counted(self):
        """Count the requests that wait for a response concurrently."""
        with self.lock:
            self._now += 1
            self.most_at_once = max(self.most_at_once, self._now)
        try:
            yield
        finally:
            with self.lock:
                self._now -= 1

    def refuses(self) -> bool:
        """Whether one more request exceeds the rate; the caller holds the lock."""
        if self.rate is None:
            return False
        now = time.monotonic()
        while self._served and self._served[0] < now - 1:
            self._served.popleft()
        if len(self._served) >= self.rate:
            return True
        self._served.append(now)
        return False

    def tag(self, data: bytes) -> str:
        return f'"{hashlib.sha256(data).hexdigest()[:16]}"'

    def gets(self) -> list[Seen]:
        """GET requests so far."""
        return [seen for seen in self.log if seen.method == "GET"]


class _Handler(LocalHandler):
    server: FaultyServer

    def _do(self) -> None:
        self._answer(body=self.command == "GET")

    do_GET = do_HEAD = _do  # noqa: N815

    def _answer(self, *, body: bool) -> None:
        server = self.server
        name = urllib.parse.unquote(self.path).removeprefix("/set/")
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if_match = self.headers.get("If-Match")
        with server.lock:
            data = server.files.get(name)
            fault = server.faults.popleft() if body and server.faults else None
            if body and fault is None and server.refuses():
                fault = 429
            size = len(data or b"")
            bounds = (int(asked[1]), int(asked[2] or size - 1) + 1) if asked else None
            seen = Seen(self.command, name, bounds, if_match)
            server.log.append(seen)
        with server.counted():
            server.over.wait(server.delay)
            try:
                server.gate.wait(10)
            except threading.BrokenBarrierError:
                fault = 400
        # Not counted: a client that has the last byte may send its next request before this thread goes on.
        self._send(seen, data, fault, body=body)

    def _send(self, seen: Seen, data: bytes | None, fault: int | str | None, *, body: bool) -> None:
        if fault == "reset":
            return self.reset()
        if fault == "stall":
            return self._stall()
        if isinstance(fault, int):
            return self._plain(seen, fault)
        if data is None:
            return self._plain(seen, 404)
        tag = self.server.tag(data)
        if seen.if_match not in (None, tag, "*") and self.server.tags and fault != "old-tag":
            return self._plain(seen, 412)
        start, stop = seen.range or (0, len(data))
        if seen.range and start >= len(data):
            return self._plain(seen, 416)
        stop = min(stop, len(data))
        if fault == "short-range":
            stop = (start + stop) // 2
        if fault == "shifted-range":
            start, stop = start + 1, stop + 1
        ranged = seen.range is not None and fault != "whole"
        part = data[start:stop] if ranged else data
        headers: dict[str, object] = {"Content-Length": len(part), "Accept-Ranges": "bytes"}
        if self.server.tags:
            headers["ETag"] = tag
        if self.server.dates:
            headers["Last-Modified"] = "Mon, 01 Jan 2024 00:00:00 GMT"
        if ranged:
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(data)}"
        half = fault in ("reset-body", "stall-body", "short")
        sent = part[: len(part) // 2] if half else part
        seen.status, seen.body = 206 if ranged else 200, len(sent) if body else 0
        self.answer(seen.status, sent, headers)
        if fault == "stall-body":
            self._stall()
        elif fault == "reset-body":
            self.reset()
        elif fault == "short":
            self.close_connection = True
        return None

    def _plain(self, seen: Seen, status: int) -> None:
        seen.status = status
        self.answer(status)

    def _stall(self) -> None:
        self.server.over.wait(30)
        self.close_connection = True
