"""A child process of the job, and the pieces that the two exchange, see `fastvid.runtime.messages`: both ends.

The child runs a module of fastvid in a fresh interpreter. Its standard input and output carry pieces; whatever it
prints as an error is kept. When the job dies, its children and their children die with it.
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
from fastvid.runtime.messages import HEADER_BYTES, Inbox, pack, piece_size, unpack

_READ: Final = 1 << 20
_TAIL: Final = 4096
_SAID: Final = 300
_FRAME: Final = re.compile(r'File "(?:.*/)?([^"/]+)", line (\d+)')


class Child:
    """The job's end: a process that is being spoken to.

    Args:
        module: What it runs, such as ``fastvid.sharding.engines.worker``.
        environment: Variables for it, on top of this process's.
    """

    def __init__(self, module: str, environment: Mapping[str, str] | None = None) -> None:
        # A file, not a pipe: nobody has to read it while the child lives.
        self._stderr: IO[bytes] = tempfile.TemporaryFile(prefix="fastvid-child-")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env=os.environ | {"PYTHONPATH": _search_path()} | dict(environment or {}),
            # A group of its own: killing the group takes what the child has started too, and Ctrl-C reaches only the
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
        """Sends a message. A child that died takes none; its closed output tells."""
        with contextlib.suppress(BrokenPipeError):
            self._input.write(pack(message))
            self._input.flush()

    def hear(self) -> Iterator[tuple[dict[str, Any], memoryview]]:
        """Reads once, which waits only when `output` has nothing, and gives the pieces that are complete.

        Raises:
            EOFError: The child has closed its output.
            FormatError: It does not speak the protocol.
        """
        data = os.read(self.output.fileno(), _READ)
        if not data:
            raise EOFError
        yield from self._inbox.add(data)

    def leave(self, seconds: float) -> None:
        """Waits for the child to end by itself, so long at most."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)

    def end(self) -> tuple[int, str]:
        """Kills the child and its children; gives its exit status and the end of what it printed as errors."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        status = self._process.wait()
        with contextlib.suppress(BrokenPipeError):
            self._input.close()
        self.output.close()
        size = os.fstat(self._stderr.fileno()).st_size
        text = os.pread(self._stderr.fileno(), _TAIL, max(0, size - _TAIL)).decode("utf-8", "replace")
        self._stderr.close()
        return status, _said(text)


class Parent:
    """The child's end: takes the two pipes away from the standard descriptors, where a stray print could reach them.

    When the input ends, because the job is over or dead, the child's whole group is killed at once.
    """

    def __init__(self) -> None:
        source, self._sink = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(null, 1)
        os.close(null)
        self.messages: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        threading.Thread(target=_listen, args=(source, self.messages), daemon=True).start()

    def send(self, piece: bytes) -> None:
        """Sends a piece, as `fastvid.runtime.messages.pack` and `Outcome.to_bytes` make it."""
        self._sink.write(piece)
        self._sink.flush()


def _said(text: str) -> str:
    """What counts of the end of a process's standard error: of a traceback, the error and where it was raised."""
    frames, (*_, last) = _FRAME.findall(text), ("", *text.rstrip().splitlines())
    if frames and not last.startswith(" "):
        return f"{last[:_SAID]} ({':'.join(frames[-1])})"
    return " ".join(text.split())[-_SAID:]


def _listen(source: IO[bytes], messages: queue.SimpleQueue[dict[str, Any]]) -> None:
    try:
        while start := source.read(HEADER_BYTES):
            body = source.read(piece_size(start) - HEADER_BYTES)
            messages.put(unpack(start + body)[0])
    finally:
        # Nobody waits for a result any more.
        os.killpg(0, signal.SIGKILL)


def _search_path() -> str:
    """Where a fresh interpreter finds this very fastvid."""
    ours = str(Path(fastvid.__file__).parents[1])
    theirs = os.environ.get("PYTHONPATH")
    return ours if not theirs else os.pathsep.join([ours, theirs])
