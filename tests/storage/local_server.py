"""HTTP servers in a thread of the test process, for servers that tests make up."""

import contextlib
import re
import socket
import socketserver
import struct
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self


class LocalServer(ThreadingHTTPServer):
    """Listens from its making on, and answers inside its ``with``."""

    daemon_threads = True

    def __init__(self, handler: Callable[..., socketserver.BaseRequestHandler], host: str = "127.0.0.1") -> None:
        super().__init__((host, 0), handler)
        self.endpoint = f"http://{host}:{self.server_address[1]}"
        self._connections: set[socket.socket] = set()
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join()
        # Handlers of open connections would continue to answer, because clients keep connections for later requests.
        for connection in list(self._connections):
            with contextlib.suppress(OSError):  # closed meanwhile
                connection.shutdown(socket.SHUT_RDWR)

    def process_request(self, request: socket.socket, client_address: object) -> None:
        self._connections.add(request)
        super().process_request(request, client_address)

    def close_request(self, request: socket.socket) -> None:
        self._connections.discard(request)
        super().close_request(request)

    def handle_error(self, request: object, client_address: object) -> None:
        pass  # clients go away in the middle, on purpose or because they have seen enough


class LocalHandler(BaseHTTPRequestHandler):
    """Keeps connections open, and logs nothing."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def answer(self, status: int, body: bytes = b"", headers: Mapping[str, object] | None = None) -> None:
        """Send a response, of which HEAD gets no body; a given Content-Length may differ from that of the body."""
        self.send_response(status)
        for name, value in {"Content-Length": len(body), **(headers or {})}.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def file(self, data: bytes, headers: Mapping[str, object] | None = None) -> None:
        """Send a file, or the range of it that was asked for."""
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if not asked:
            return self.answer(200, data, headers)
        start, stop = int(asked[1]), min(int(asked[2]) + 1, len(data))
        if start >= stop:
            return self.answer(416, headers=headers)
        place = {"Content-Range": f"bytes {start}-{stop - 1}/{len(data)}"}
        return self.answer(206, data[start:stop], {**place, **(headers or {})})

    def reset(self) -> None:
        """End the connection by a reset, which a linger of zero makes of a close."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
        self.close_connection = True

    def log_message(self, *_: object) -> None:
        pass


class RawServer(LocalServer):
    """Answers each request with the same bytes.

    Attributes:
        reply: The bytes.
        ends: Whether it closes the connection after them.
        connections: The number of connections so far.
        heads: The heads of the requests so far.
    """

    def __init__(self, reply: bytes = b"", *, ends: bool = False) -> None:
        super().__init__(_RawHandler)
        self.reply, self.ends = reply, ends
        self.connections, self.heads = 0, list[bytes]()


class _RawHandler(socketserver.StreamRequestHandler):
    server: RawServer

    def handle(self) -> None:
        self.server.connections += 1
        while line := self.rfile.readline():
            head = [line]
            while (line := self.rfile.readline()).strip():
                head.append(line)
            self.server.heads.append(b"".join(head))
            self.wfile.write(self.server.reply)
            if self.server.ends:
                break
