"""Real server processes for tests, on loopback, stopped by the handle that started them."""

import contextlib
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bench.common.ports import reserved_port

START_SECONDS = 200


@contextlib.contextmanager
def started(command: list[str], port: int, log: Path) -> Iterator[None]:
    """Run a server during the block, once it listens, with its output in `log`."""
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
    try:
        end = time.monotonic() + START_SECONDS
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"{command[0]} did not start:\n{log.read_text()}")
            time.sleep(0.05)
        yield
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@dataclass
class S3Server:
    """An S3 endpoint with one bucket for each test.

    Attributes:
        endpoint: Its address.
        log: Its log, with one line per request.
    """

    endpoint: str
    log: Path
    buckets: int = 0

    def bucket(self) -> str:
        """Create a new, empty bucket and return its name."""
        self.buckets += 1
        name = f"bucket-{self.buckets}"
        urllib.request.urlopen(urllib.request.Request(f"{self.endpoint}/{name}", method="PUT")).close()
        return name

    def requests(self, bucket: str) -> list[tuple[str, str, int]]:
        """Return method, path inside the bucket and status of all requests to a bucket so far."""
        text = re.sub(r"\x1b\[[0-9;]*m", "", self.log.read_text())
        found = re.findall(rf'"(\w+) /{bucket}/(\S*) HTTP/1.1" (\d+)', text)
        return [(method, path, int(status)) for method, path, status in found]

    def uploads(self, bucket: str) -> int:
        """Return the uploads that were started but neither completed nor aborted."""
        with urllib.request.urlopen(f"{self.endpoint}/{bucket}?uploads") as answer:
            return answer.read().count(b"<UploadId>")


@contextlib.contextmanager
def s3_server(folder: Path) -> Iterator[S3Server]:
    """Run moto's server."""
    log, program = folder / "moto.log", str(Path(__file__).with_name("moto_s3.py"))
    with reserved_port() as port, started([sys.executable, program, str(port)], port, log):
        yield S3Server(f"http://127.0.0.1:{port}", log)


@dataclass
class WebServer:
    """A file server.

    Attributes:
        url: URL of the folder.
        folder: The folder that it serves.
        log: Its access log.
    """

    url: str
    folder: Path
    log: Path


@contextlib.contextmanager
def web_server(folder: Path) -> Iterator[WebServer]:
    """Run aiohttp's server in one process."""
    served, log, program = folder / "served", folder / "access.log", str(Path(__file__).with_name("web.py"))
    served.mkdir()
    with (
        reserved_port() as port,
        started([sys.executable, program, str(served), str(port), str(log)], port, folder / "out"),
    ):
        yield WebServer(f"http://127.0.0.1:{port}", served, log)
