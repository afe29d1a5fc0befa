"""Clips decoded in a process of their own, which can be killed: what ``workers="process"`` does.

A lane is a worker process and a slot, memory that both see, which holds one decoded clip. A thread of the loader sends
the worker a request, waits, and copies the clip from the slot into its batch. So a worker that hangs in native code, or
crashes, costs its clip and nothing else: it is killed by its id, and the lane starts another.

The worker reads the clip's packets itself. Where storage answers late, threads of the loader read ahead, and the
request brings the packets.

Requests travel by pickle between two processes of one program, over a socket that nobody else can open. Workers are
started, not forked, and import neither torch nor the user's main module.
"""

from __future__ import annotations

import logging
import mmap
import os
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Final

import numpy as np

from fastvid.decode.backends import Backend
from fastvid.decode.request import EncodedClip, Output, Planes, Rgb
from fastvid.errors import FastvidError, WorkerError
from fastvid.load.apart_worker import Answer, Hello, Packets, Task, layout
from fastvid.load.stats import Counters
from fastvid.storage import Storage

if TYPE_CHECKING:
    from fastvid.load.plan import Clip

_START_SECONDS: Final = 120.0
"""Longest start of a worker; importing PyAV takes a second on an idle machine."""

_POLL_SECONDS: Final = 0.1
"""How often a waiting thread looks whether its iteration has ended."""

_PATIENCE_SECONDS: Final = 1.0
"""How long the end of an iteration waits for a clip before it kills the worker that decodes it."""

_MAIN: Final = "from fastvid.load.apart_worker import main; main()"

_log = logging.getLogger(__name__)


class ProcessLane:
    """A worker process and its slot, used by one thread at a time.

    Args:
        backend: What the worker decodes with.
        clip_seconds: Longest a clip may take.
    """

    outputs: Final = frozenset({Planes, Rgb})

    def __init__(self, backend: Backend, clip_seconds: float) -> None:
        self._backend, self._clip_seconds = backend, clip_seconds
        self._slot = os.memfd_create("fastvid-slot", os.MFD_CLOEXEC)
        self._size = 0
        self._memory: mmap.mmap | None = None
        self._worker: _Worker | None = None
        self._alive: list[_Worker] = []
        self._end = weakref.finalize(self, _end, self._alive, self._slot)

    def serve(
        self, clip: Clip, output: Output, stopped: Callable[[], bool], encoded: EncodedClip | None = None
    ) -> tuple[Exception | None, Counters]:
        """Fetches and decodes one clip.

        Args:
            clip: What is wanted.
            output: Where it goes.
            stopped: Whether the iteration has ended, so that nobody wants the clip any more.
            encoded: Its packets, where they have been read; None lets the worker read them.

        Returns:
            What went wrong with the clip, if anything, and what it cost. WorkerError: the worker hung or died.

        Raises:
            MissingDependency: The decoder does not open in the worker.
        """
        worker = self._worker or self._start(stopped)
        shape, size = layout(clip.request, planes=isinstance(output, Planes))
        if size > self._size:
            self._grow(size)
        packets = None if encoded is None else Packets.of(encoded)
        task = Task(clip.shard.stem, clip.shard_row, clip.request, clip.info, clip.key, shape, self._size, packets)
        storage = clip.shard.storage if packets is None else None
        try:
            answer = worker.ask(storage, task, self._clip_seconds, stopped)
        except _Silent as silence:
            self._drop(worker)
            where = {"shard": clip.shard.stem, "key": clip.key}
            return WorkerError(f"worker process {worker.pid} {silence}", hint=_HINT, **where), Counters()
        if answer.error is None:
            assert self._memory is not None
            _copy(np.frombuffer(self._memory, dtype=np.uint8, count=size), clip, output)
        elif not isinstance(answer.error, FastvidError):
            answer.error.add_note(f"in worker process {worker.pid}:\n{answer.trace}")
        return answer.error, answer.counters

    def close(self) -> None:
        """Ends the worker."""
        self._end()

    def _start(self, stopped: Callable[[], bool]) -> _Worker:
        worker = _Worker(self._slot)
        self._alive.append(worker)
        try:
            answer = worker.ask(None, Hello(self._backend, self._clip_seconds), _START_SECONDS, stopped)
        except _Silent as silence:
            self._drop(worker)
            raise WorkerError(f"worker process {worker.pid} {silence} before it was ready", hint=_HINT) from None
        if answer.error is not None:
            self._drop(worker)
            raise answer.error
        self._worker = worker
        return worker

    def _drop(self, worker: _Worker) -> None:
        worker.kill()
        self._alive.remove(worker)
        self._worker = None

    def _grow(self, size: int) -> None:
        os.ftruncate(self._slot, size)
        self._memory, self._size = mmap.mmap(self._slot, size), size


_HINT: Final = "such a clip can be left out with where=; on_error='skip' masks and counts it"


class _Silent(Exception):
    """A worker will not answer; says what became of it."""


class _Worker:
    def __init__(self, slot: int) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-c", _MAIN, str(theirs.fileno()), str(slot)]
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), slot),
                env=os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
            )
        self._connection = Connection(ours.detach())
        self._storages: list[Storage] = []

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(
        self, storage: Storage | None, message: Hello | Task, seconds: float, stopped: Callable[[], bool]
    ) -> Answer:
        """The worker's answer.

        Raises:
            _Silent: There is none in time, or the worker died, or nobody wants it any more.
        """
        deadline = time.monotonic() + seconds
        cut_short = False
        try:
            number = -1 if storage is None else self._number(storage)
            self._connection.send((number, message))
            while not self._connection.poll(_POLL_SECONDS):
                if not cut_short and stopped():
                    cut_short, deadline = True, min(deadline, time.monotonic() + _PATIENCE_SECONDS)
                if time.monotonic() >= deadline:
                    raise _Silent("was not waited for" if cut_short else f"hung for {seconds:.0f} s and was killed")
            answer: Answer = self._connection.recv()
        except (EOFError, OSError):
            raise _Silent(_ended(self._process.wait())) from None
        return answer

    def kill(self) -> None:
        """Kills the process by its id and waits for its end; an idle one ends by itself."""
        self._connection.close()
        self._process.kill()
        self._process.wait()

    def _number(self, storage: Storage) -> int:
        for number, known in enumerate(self._storages):
            if known is storage:
                return number
        self._storages.append(storage)
        self._connection.send((len(self._storages) - 1, storage))
        return len(self._storages) - 1


def _copy(slot: np.ndarray[tuple[int], np.dtype[np.uint8]], clip: Clip, output: Output) -> None:
    if isinstance(output, Rgb):
        np.copyto(output.data, slot.reshape(output.data.shape))
        return
    assert isinstance(output, Planes)
    planes = Planes.packed(slot, len(clip.request.frames), clip.request.box)
    for source, target in ((planes.y, output.y), (planes.u, output.u), (planes.v, output.v)):
        np.copyto(target, source)


def _end(alive: list[_Worker], slot: int) -> None:
    for worker in alive:
        worker.kill()
    alive.clear()
    os.close(slot)


def _ended(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"died of {signal.Signals(-status).name}"
    except ValueError:
        return f"died of signal {-status}"
