"""Both ends of the connection between a job and a child process; see `fastvid.runtime.messages`.

The child runs a module of fastvid in a new interpreter. Messages go through its standard input and output; its standard
error is stored. When the job dies, its children and their children die as well.
"""

from __future__ import annotations

import contextlib
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Final

import fastvid
from fastvid.runtime.children import SAFE_PATH
from fastvid.runtime.messages import HEADER_BYTES, Inbox, pack, piece_size, unpack

_READ_BYTES: Final = 1 << 20
_STDERR_TAIL_BYTES: Final = 4096
_SUMMARY_CHARS: Final = 300
_FRAME: Final = re.compile(r'File "(?:.*/)?([^"/]+)", line (\d+)')


class Child:
    """The job's end of the connection: starts a child process and exchanges messages with it."""

    def __init__(self, module: str, environment: Mapping[str, str] | None = None) -> None:
        # A file, not a pipe, so that nothing has to read it while the child runs.
        self._stderr: IO[bytes] = tempfile.TemporaryFile(prefix="fastvid-child-")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env=os.environ | SAFE_PATH | {"PYTHONPATH": _search_path()} | dict(environment or {}),
            # A separate process group: killing it also kills what the child has started, and Ctrl-C reaches only the
            # job.
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self.output = self._process.stdin, self._process.stdout
        self._inbox = Inbox()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message. If the child has died, do nothing: `receive` raises EOFError."""
        with contextlib.suppress(BrokenPipeError):
            self._input.write(pack(message))
            self._input.flush()

    def receive(self) -> Iterator[tuple[dict[str, Any], memoryview]]:
        """Read once, blocking if `output` is empty, and yield the complete messages."""
        data = os.read(self.output.fileno(), _READ_BYTES)
        if not data:
            raise EOFError
        yield from self._inbox.add(data)

    def wait(self, seconds: float) -> None:
        """Wait at most this long for the child to exit by itself."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)

    def kill(self) -> tuple[int, str]:
        """Kill the child and its children; return its exit status and a summary of its standard error."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        status = self._process.wait()
        with contextlib.suppress(BrokenPipeError):
            self._input.close()
        self.output.close()
        size = os.fstat(self._stderr.fileno()).st_size
        tail = os.pread(self._stderr.fileno(), _STDERR_TAIL_BYTES, max(0, size - _STDERR_TAIL_BYTES))
        self._stderr.close()
        return status, _summarize_stderr(tail.decode("utf-8", "replace"))


class Parent:
    """The child's end of the connection.

    It moves the pipes off the standard descriptors, out of reach of stray prints. When the input closes, because the
    job has finished or died, the child's process group is killed at once.
    """

    def __init__(self) -> None:
        source, self._sink = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(null, 1)
        os.close(null)
        self.messages: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        threading.Thread(target=_read_messages, args=(source, self.messages), daemon=True).start()

    def send(self, piece: bytes) -> None:
        """Send a message made by `fastvid.runtime.messages.pack` or `Outcome.to_bytes`."""
        self._sink.write(piece)
        self._sink.flush()


def _summarize_stderr(text: str) -> str:
    """Summarise the end of a standard error: of a traceback, the error and where it was raised."""
    frames, (*_, last) = _FRAME.findall(text), ("", *text.rstrip().splitlines())
    if frames and not last.startswith(" "):
        return f"{last[:_SUMMARY_CHARS]} ({':'.join(frames[-1])})"
    return " ".join(text.split())[-_SUMMARY_CHARS:]


def _read_messages(source: IO[bytes], messages: queue.SimpleQueue[dict[str, Any]]) -> None:
    try:
        while start := source.read(HEADER_BYTES):
            body = source.read(piece_size(start) - HEADER_BYTES)
            messages.put(unpack(start + body)[0])
    finally:
        # The job is gone: nothing needs a result any more.
        os.killpg(0, signal.SIGKILL)


def _search_path() -> str:
    """Return a PYTHONPATH with which a new interpreter imports this copy of fastvid."""
    ours = str(Path(fastvid.__file__).parents[1])
    theirs = os.environ.get("PYTHONPATH")
    return ours if not theirs else os.pathsep.join([ours, theirs])
