"""Real server processes for tests, on loopback, stopped by the handle that started them."""

import contextlib
import getpass
import os
import re
import shutil
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
def started(command: list[str], port: int | None, log: Path) -> Iterator[None]:
    """Run a server during the block, with its output in `log`; wait until it listens if a port is given."""
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
    try:
        end = time.monotonic() + START_SECONDS
        while port is not None:
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

    def requests(self, folder: str, least: int) -> list[tuple[str, str, int, int]]:
        """Return method, path, status and body bytes of all requests below a folder, once there are `least`."""
        # The server writes the log line after it has sent the response.
        end = time.monotonic() + START_SECONDS
        while True:
            lines = [line.split(" ") for line in self.log.read_text().splitlines() if f" /{folder}/" in line]
            if len(lines) >= least or time.monotonic() > end:
                return [(method, path, int(status), int(size)) for method, path, status, size in lines]
            time.sleep(0.01)


def find_nginx() -> str | None:
    """Find nginx, which Debian installs outside the path of ordinary users."""
    return shutil.which("nginx", path=os.environ.get("PATH", "") + os.pathsep + "/usr/sbin")


@contextlib.contextmanager
def web_server(name: str, folder: Path) -> Iterator[WebServer]:
    """Run nginx or aiohttp's server in one process, with our access log format."""
    served, log = folder / "served", folder / "access.log"
    served.mkdir()
    with reserved_port() as port:
        if name == "nginx":
            command = _nginx(folder, served, port, log)
        else:
            command = [sys.executable, str(Path(__file__).with_name("web.py")), str(served), str(port), str(log)]
        with started(command, port, folder / "out"):
            yield WebServer(f"http://127.0.0.1:{port}", served, log)


def _nginx(folder: Path, served: Path, port: int, log: Path) -> list[str]:
    paths = "".join(
        f"{kind}_temp_path {folder}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    config = folder / "nginx.conf"
    config.write_text(
        f"user {getpass.getuser()}; daemon off; master_process off; pid {folder}/pid; error_log {folder}/error.log;"
        "events { worker_connections 512; }"
        "http { log_format plain '$request_method $uri $status $body_bytes_sent';"
        f"access_log {log} plain; {paths}"
        f"server {{ listen 127.0.0.1:{port}; root {served}; }} }}"
    )
    program = find_nginx()
    assert program is not None
    return [program, "-c", str(config), "-e", f"{folder}/error.log"]
