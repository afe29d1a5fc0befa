"""A proxy that can lose responses, like a network that fails at the worst moment."""

import http.client
from collections.abc import Callable
from urllib.parse import urlsplit

from tests.storage.local_server import LocalHandler, LocalServer

HOP_BY_HOP = {"connection", "transfer-encoding", "keep-alive", "content-length", "date", "server"}


class LossyProxy(LocalServer):
    """A proxy of `endpoint`.

    Attributes:
        lose: Called with method and path after the server processed a request; returns whether to lose the response.
        garble: Whether to send garbage instead of a lost response, rather than nothing.
        lost: Requests whose responses were lost.
        refuse: Called with method and path of a request; a returned status is sent immediately, None forwards it.
        compares_quotes: Whether to reject puts whose precondition has a tag in quotes, like Ceph 16.
    """

    def __init__(self, endpoint: str) -> None:
        super().__init__(_Handler)
        self.upstream = urlsplit(endpoint).netloc
        self.lose: Callable[[str, str], bool] = lambda _method, _path: False
        self.refuse: Callable[[str, str], int | None] = lambda _method, _path: None
        self.garble = self.compares_quotes = False
        self.lost: list[tuple[str, str]] = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def lose_next(self, method: str, within: str = "") -> None:
        """Lose the response to the next request with a method and with `within` in its path."""
        left = [None]
        self.lose = lambda made, path: made == method and within in path and bool(left) and left.pop() is None


class _Handler(LocalHandler):
    server: LossyProxy

    def _do(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        status = self.server.refuse(self.command, self.path)
        if status is not None:
            return self.answer(status)
        expected = self.headers.get("If-Match", "")
        if self.command == "PUT" and expected and self.server.compares_quotes:
            if expected.startswith('"'):
                return self.answer(412)
            self.headers.replace_header("If-Match", f'"{expected}"')
        upstream = http.client.HTTPConnection(self.server.upstream, timeout=30)
        try:
            upstream.request(self.command, self.path, body, dict(self.headers.items()))
            answer = upstream.getresponse()
            data = answer.read()
        finally:
            upstream.close()
        if self.server.lose(self.command, self.path):
            self.server.lost.append((self.command, self.path))
            return self.answer(200, b"<nonsense") if self.server.garble else self.reset()
        headers = {key: value for key, value in answer.getheaders() if key.lower() not in HOP_BY_HOP}
        if self.command == "HEAD":
            headers["Content-Length"] = answer.getheader("Content-Length") or "0"
        return self.answer(answer.status, data, headers)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _do  # noqa: N815
