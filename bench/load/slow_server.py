"""A web server on loopback that delays each response and counts requests and bytes.

Run as a process: ``python -m bench.load.slow_server FOLDER MILLISECONDS`` prints its port; ``GET /log`` returns the
counts.
"""

from __future__ import annotations

import asyncio
import json
import mmap
import sys
from email.utils import formatdate
from pathlib import Path
from typing import Final

_LOG: Final = "/log"


class SlowServer:
    """Serves a folder.

    Args:
        folder: The folder.
        seconds: Delay before each response.
    """

    def __init__(self, folder: Path, seconds: float) -> None:
        self.folder, self.seconds = folder, seconds
        self.requests: dict[str, int] = {}
        self.bytes: dict[str, int] = {}
        self._maps: dict[str, memoryview] = {}

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve the requests of one connection in sequence."""
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
                method, path, _ = head[0].split(" ", 2)
                fields = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])}
                if path == _LOG:
                    body = json.dumps({"requests": self.requests, "bytes": self.bytes}).encode()
                    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
                else:
                    await asyncio.sleep(self.seconds)
                    self._answer(writer, method, path.lstrip("/"), fields.get("range"))
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    def _answer(self, writer: asyncio.StreamWriter, method: str, name: str, asked: str | None) -> None:
        data = self._data(name)
        if data is None:
            writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
            return
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
        if method == "GET":
            kind = name.rpartition(".")[2]
            self.requests[kind] = self.requests.get(kind, 0) + 1
            self.bytes[kind] = self.bytes.get(kind, 0) + stop - start
            writer.write(data[start:stop])

    def _data(self, name: str) -> memoryview | None:
        if name not in self._maps:
            path = self.folder / name
            if ".." in name or not path.is_file():
                return None
            with path.open("rb") as file:
                self._maps[name] = memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
        return self._maps[name]


async def _main(folder: Path, seconds: float) -> None:
    server = await asyncio.start_server(SlowServer(folder, seconds).serve, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_main(Path(sys.argv[1]), float(sys.argv[2]) / 1e3))
