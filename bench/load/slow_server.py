"""A web server on loopback that delays each response, limits bandwidth and requests, and counts requests and bytes.

Bytes are counted as they are sent: a client that closes a connection in the middle of a response has not read the rest.

Run as a process: ``python -m bench.load.slow_server FOLDER MILLISECONDS [MEGABITS [REQUESTS]]`` prints its port; ``GET
/log`` returns the counts. More than so many requests a second are refused. Its folders are buckets for clients of S3
that read.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import mmap
import socket
import subprocess
import sys
import urllib.request
from collections import deque
from collections.abc import Iterator
from email.utils import formatdate
from pathlib import Path
from typing import Final
from urllib.parse import parse_qs, urlsplit

_LOG: Final = "/log"
_CHUNK: Final = 1 << 16
_SMALL: Final = 1 << 20


class SlowServer:
    """Serves a folder.

    `rate`: GETs that it serves in any second; unlimited without it. More get 429.
    """

    def __init__(self, folder: Path, seconds: float, bits_per_second: float = 0, rate: int = 0) -> None:
        self.folder, self.seconds, self.bits_per_second, self.rate = folder, seconds, bits_per_second, rate
        self._served: deque[float] = deque()
        self.requests: dict[str, int] = {}
        self.bytes: dict[str, int] = {}
        self._maps: dict[str, memoryview] = {}
        self._free = 0.0  # when the network has sent what it was given

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve the requests of one connection in sequence."""
        # What waits in the kernel would count as sent.
        connection: socket.socket = writer.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _CHUNK)
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
                method, path, _ = head[0].split(" ", 2)
                fields = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])}
                if path == _LOG:
                    body = json.dumps({"requests": self.requests, "bytes": self.bytes}).encode()
                    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
                elif "list-type=2" in path:
                    await asyncio.sleep(self.seconds)
                    body = self._listing(path)
                    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
                else:
                    await asyncio.sleep(self.seconds)
                    if method == "GET" and self._refuses():
                        self.requests["429"] = self.requests.get("429", 0) + 1
                        writer.write(b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 0\r\n\r\n")
                        continue
                    name = path.lstrip("/")
                    body = self._answer(writer, method, name, fields.get("range"))
                    for start in range(0, len(body), _CHUNK):
                        await self._send(writer, body[start : start + _CHUNK], name.rpartition(".")[2])
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    def _listing(self, path: str) -> bytes:
        """Return the answer of S3 to a request for a listing; a bucket is a folder."""
        parts = urlsplit(path)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        bucket, prefix, delimiter = self.folder / parts.path.strip("/"), query.get("prefix", ""), query.get("delimiter")
        files, folders = [], set[str]()
        for file in sorted(bucket.rglob("*")):
            name = file.relative_to(bucket).as_posix()
            if not file.is_file() or not name.startswith(prefix):
                continue
            rest = name[len(prefix) :]
            if delimiter and delimiter in rest:
                folders.add(prefix + rest.partition(delimiter)[0] + delimiter)
            else:
                files.append((name, file.stat().st_size))
        self.requests["LIST"] = self.requests.get("LIST", 0) + 1
        time = "<LastModified>2024-01-01T00:00:00.000Z</LastModified>"
        listed = [f"<Contents><Key>{name}</Key>{time}<Size>{size}</Size></Contents>" for name, size in files]
        listed += [f"<CommonPrefixes><Prefix>{name}</Prefix></CommonPrefixes>" for name in sorted(folders)]
        count = f"<KeyCount>{len(listed)}</KeyCount><IsTruncated>false</IsTruncated>"
        return f"<ListBucketResult>{count}{''.join(listed)}</ListBucketResult>".encode()

    def _refuses(self) -> bool:
        if not self.rate:
            return False
        now = asyncio.get_running_loop().time()
        while self._served and self._served[0] < now - 1:
            self._served.popleft()
        if len(self._served) >= self.rate:
            return True
        self._served.append(now)
        return False

    async def _send(self, writer: asyncio.StreamWriter, chunk: memoryview, kind: str) -> None:
        if self.bits_per_second:
            now = asyncio.get_running_loop().time()
            self._free = max(now, self._free) + 8 * len(chunk) / self.bits_per_second
            await asyncio.sleep(self._free - now)
        writer.write(chunk)
        await writer.drain()
        self.bytes[kind] = self.bytes.get(kind, 0) + len(chunk)

    def _answer(self, writer: asyncio.StreamWriter, method: str, name: str, asked: str | None) -> memoryview:
        """Write the head of the response; return its body."""
        data = self._data(name)
        if data is None:
            writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
            return memoryview(b"")
        start, stop, status = 0, len(data), "200 OK"
        if asked:
            first, _, last = asked.removeprefix("bytes=").partition("-")
            start, stop, status = (
                int(first),
                min(len(data), int(last) + 1 if last else len(data)),
                "206 Partial Content",
            )
        lines = [
            f"HTTP/1.1 {status}",
            f"Content-Length: {stop - start}",
            "Accept-Ranges: bytes",
            f'ETag: "{name}-{len(data)}"',
            f"Last-Modified: {formatdate(0, usegmt=True)}",
        ]
        if asked:
            lines.append(f"Content-Range: bytes {start}-{stop - 1}/{len(data)}")
        writer.write("\r\n".join([*lines, "", ""]).encode())
        kind = name.rpartition(".")[2] if method == "GET" else method
        self.requests[kind] = self.requests.get(kind, 0) + 1
        if method != "GET":
            return memoryview(b"")
        return data[start:stop]

    def _data(self, name: str) -> memoryview | None:
        if name not in self._maps:
            path = self.folder / name
            if ".." in name or not path.is_file():
                return None
            if path.stat().st_size < _SMALL:
                # A map keeps its file open, and there may be ten thousand small ones.
                self._maps[name] = memoryview(path.read_bytes())
            else:
                with path.open("rb") as file:
                    self._maps[name] = memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
        return self._maps[name]


@contextlib.contextmanager
def slow_server(folder: Path, latency: float, megabits: float = 0, rate: int = 0) -> Iterator[tuple[str, int]]:
    """Start a slow server of `folder`; yields its URL and process id."""
    command = [sys.executable, "-m", "bench.load.slow_server", str(folder), str(latency), str(megabits), str(rate)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield f"http://127.0.0.1:{int(process.stdout.readline())}", process.pid
        finally:
            process.kill()


def served(url: str) -> dict[str, dict[str, int]]:
    """Return what a server has counted: requests and bytes, by the suffix of the file."""
    found: dict[str, dict[str, int]] = json.loads(urllib.request.urlopen(f"{url}{_LOG}").read())
    return found


def totals(url: str) -> dict[str, int]:
    """Return all requests and bytes that a server has counted."""
    return {name: sum(counts.values()) for name, counts in served(url).items()}


async def _main(folder: Path, seconds: float, bits_per_second: float, rate: int) -> None:
    server = await asyncio.start_server(SlowServer(folder, seconds, bits_per_second, rate).serve, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    limits = [float(text) for text in sys.argv[3:]] + [0.0, 0.0]
    asyncio.run(_main(Path(sys.argv[1]), float(sys.argv[2]) / 1e3, 1e6 * limits[0], int(limits[1])))
