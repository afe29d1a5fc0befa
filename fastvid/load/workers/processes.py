"""Clips decoded in processes of their own, which can be killed: what ``workers="process"`` does.

A lane is a worker process, memory that both see, and a thread of the loader that sends the worker some rows of a batch
and waits. The worker decides what a row shows, reads, decodes and normalises, and writes the row where the step will
see it, so the training process spends microseconds on a clip. A worker that hangs in native code, or crashes, costs the
clip it was at and nothing else: it is killed by its id, and the lane starts another for the rest.

What the training process still does itself: it reads ahead where storage answers late, and sends the packets; it
decides clips that are cut out of one reading (views, repeats) or have flow, and copies these into their batch.

Messages travel by pickle between two processes of one program, over a socket that nobody else can open. Workers are
started, not forked, and import neither torch nor the user's modules.
"""

from __future__ import annotations

import itertools
import os
import select
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any, Final

import numpy as np

from fastvid.decode.backends import Backend
from fastvid.decode.request import EncodedClip, Output, Planes, Rgb
from fastvid.errors import FastvidError, WorkerError
from fastvid.load.clips.clip import Clip, Row
from fastvid.load.clips.planner import ClipPlanner
from fastvid.load.memory.arena import Arena
from fastvid.load.memory.row_layout import RowLayout, SharedRow
from fastvid.load.workers.clip_worker import PLACE_BYTES, Answer, Hello, Packets, Place, Task
from fastvid.load.workers.stats import Counters
from fastvid.runtime.arrays import IntArray, UInt8Array
from fastvid.runtime.children import how_it_ended
from fastvid.storage import Storage

_START_SECONDS: Final = 120.0
"""Longest start of a worker; importing PyAV takes a second on an idle machine."""

_START_TRIES: Final = 3
"""Workers that die at their start, one after another, before the iteration does: what kills one by chance (somebody who
is short of memory) rarely kills three."""

_POLL_MS: Final = 100
"""How often a waiting thread looks whether its iteration has ended, and whether its worker goes on."""

_PATIENCE_SECONDS: Final = 1.0
"""How long the end of an iteration waits for a clip before it kills the worker that decodes it."""

_MAIN: Final = "from fastvid.load.workers.clip_worker import main; main()"

_HINT: Final = "such a clip can be left out with where=; on_error='skip' masks and counts it"


class ProcessLane:
    """A worker process, used by one thread at a time.

    Args:
        backend: What the worker decodes with.
        clip_seconds: Longest that reading, or decoding, a clip may take.
        arena: The memory that workers write.
    """

    outputs: Final = frozenset({Planes, Rgb})

    def __init__(self, backend: Backend, clip_seconds: float, arena: Arena) -> None:
        self._backend, self._clip_seconds, self._arena = backend, clip_seconds, arena
        self._place = arena.take(PLACE_BYTES).view(np.int64)
        self._worker: _Worker | None = None
        self._alive: list[_Worker] = []
        self._end = weakref.finalize(self, _end, self._alive)

    def serve(
        self,
        rows: Sequence[Row],
        outputs: Sequence[Output | SharedRow],
        stopped: Callable[[], bool],
        counters: Counters,
        *,
        planner: ClipPlanner | None = None,
        encoded: EncodedClip | None = None,
        at: Callable[[int], None] = lambda _: None,
    ) -> Iterator[tuple[int, Exception | None, IntArray | None]]:
        """Fetches and decodes some clips.

        Args:
            rows: What is wanted.
            outputs: Where each goes.
            stopped: Whether the iteration has ended, so that nobody wants the clips any more.
            counters: Takes what they cost.
            planner: Decides those that are not decided yet.
            encoded: The packets of the only one, where they have been read; None lets the worker read them.
            at: Told which of them the worker is at, when that changes.

        Yields:
            As they are known, the number of one in `rows`; its error if it failed, a WorkerError where the worker hung
            or died; and the frames shown, int64 [T], if the worker decided them. Clips that nobody wants any more are
            left out.

        Raises:
            MissingDependency: The decoder does not open in the worker.
        """
        taken = [self._taken(row, output) for row, output in zip(rows, outputs, strict=True)]
        left = list(range(len(rows)))
        while left:
            idle = self._worker
            worker = idle or self._start(stopped)
            self._place[Place.TASK], steps = 0, int(self._place[Place.STEPS])
            try:
                worker.tell(planner)
                tasks = [self._task(worker, rows[number], outputs[number], taken[number], encoded) for number in left]
                answer = worker.ask(tasks, self._clip_seconds, stopped, lambda task: at(left[task]))
            except _Silent as silence:
                self._drop(worker)
                if silence.unwanted:
                    return
                if worker is idle and self._place[Place.STEPS] == steps:
                    continue  # it was lost before it was asked, which is no clip's fault
                lost = rows[number := left.pop(int(self._place[Place.TASK]))]
                where = {"shard": lost.shard.stem, "key": lost.key}
                yield number, WorkerError(f"worker process {worker.pid} {silence}", hint=_HINT, **where), None
                continue
            counters.add(Counters.of(answer.costs))
            for task, (number, shown) in enumerate(zip(left, answer.shown, strict=False)):
                if task not in answer.failures:
                    _copy(taken[number], rows[number], outputs[number])
                    yield number, None, np.frombuffer(shown, dtype=np.int64) if shown else None
                    continue
                error, trace = answer.failures[task]
                if not isinstance(error, FastvidError):
                    error.add_note(f"in worker process {worker.pid}:\n{trace}")
                yield number, error, None
            return

    def close(self) -> None:
        """Ends the worker."""
        self._end()
        self._worker = None

    def _taken(self, row: Row, output: Output | SharedRow) -> UInt8Array | None:
        """Memory for a clip that goes where workers cannot write."""
        if isinstance(output, SharedRow):
            return None
        if isinstance(output, Rgb):
            return self._arena.take(output.data.size)
        assert isinstance(row, Clip)
        return self._arena.take(Planes.nbytes(len(row.request.frames), row.request.box))

    def _task(
        self,
        worker: _Worker,
        row: Row,
        output: Output | SharedRow,
        taken: UInt8Array | None,
        encoded: EncodedClip | None,
    ) -> Task:
        if isinstance(output, SharedRow):
            offset, layout = output.offset, worker.number(output.layout)
        else:
            assert taken is not None
            offset, layout = self._arena.offset(taken), -1
            if isinstance(output, Rgb):
                _, frames, height, width = output.data.shape
                layout = worker.number(RowLayout(frames, (height, width)))
        storage = worker.number(row.shard.storage) if encoded is None else -1
        task = Task(offset, layout, row.shard.stem, row.shard_row, row.key, row.sample, row.position, storage)
        if not isinstance(row, Clip):
            return task
        packets = None if encoded is None else Packets.of(encoded)
        return task._replace(request=row.request, info=row.info, packets=packets)

    def _start(self, stopped: Callable[[], bool]) -> _Worker:
        hello = Hello(self._backend, self._clip_seconds, self._arena.size, self._arena.offset(self._place))
        for tries in itertools.count(1):
            worker = _Worker(self._arena.file, self._place)
            self._alive.append(worker)
            try:
                answer = worker.ask(hello, _START_SECONDS, stopped)
            except _Silent as silence:
                self._drop(worker)
                if silence.died and tries < _START_TRIES:
                    continue
                raise WorkerError(f"worker process {worker.pid} {silence} before it was ready") from None
            for failure in answer.failures.values():
                self._drop(worker)
                raise failure.error
            break
        self._worker = worker
        return worker

    def _drop(self, worker: _Worker) -> None:
        worker.kill()
        self._alive.remove(worker)
        self._worker = None


class _Silent(Exception):
    """A worker will not answer; says what became of it."""

    def __init__(self, message: str, *, died: bool = False, unwanted: bool = False) -> None:
        super().__init__(message)
        self.died, self.unwanted = died, unwanted


class _Worker:
    def __init__(self, memory: int, place: np.ndarray[Any, np.dtype[np.int64]]) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-c", _MAIN, str(theirs.fileno()), str(memory)]
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), memory),
                env=os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
            )
        self._connection: Connection[Any, Any] = Connection(ours.detach())
        self._poll = select.poll()
        self._poll.register(self._connection.fileno(), select.POLLIN)
        self._place = place
        self._known: list[Storage | RowLayout] = []
        self._planner: ClipPlanner | None = None

    @property
    def pid(self) -> int:
        return self._process.pid

    def tell(self, planner: ClipPlanner | None) -> None:
        """Sees to it that the worker has what decides clips."""
        if planner is not None and planner is not self._planner:
            self._send(planner)
            self._planner = planner

    def number(self, thing: Storage | RowLayout) -> int:
        """The worker's number of a storage or a layout, which it then has."""
        for number, known in enumerate(self._known):
            if known is thing or (isinstance(thing, RowLayout) and known == thing):
                return number
        self._send(thing)
        self._known.append(thing)
        return len(self._known) - 1

    def ask(
        self,
        message: Hello | list[Task],
        seconds: float,
        stopped: Callable[[], bool],
        at: Callable[[int], None] = lambda _: None,
    ) -> Answer:
        """The worker's answer.

        Raises:
            _Silent: The worker got nowhere for so many seconds, or died, or nobody wants its answer any more.
        """
        place = self._place
        place[Place.STOP] = 0
        self._send([tuple(task) for task in message] if isinstance(message, list) else message)
        deadline, cut_short, steps, task = time.monotonic() + seconds, False, place[Place.STEPS], 0
        while not self._poll.poll(_POLL_MS):
            if not cut_short and stopped():
                place[Place.STOP] = 1
                cut_short, deadline = True, min(deadline, time.monotonic() + _PATIENCE_SECONDS)
            elif not cut_short and place[Place.STEPS] != steps:
                deadline, steps = time.monotonic() + seconds, place[Place.STEPS]
                if place[Place.TASK] != task:
                    at(task := int(place[Place.TASK]))
            if time.monotonic() >= deadline:
                if cut_short:
                    raise _Silent("was not waited for", unwanted=True)
                raise _Silent(f"hung for {seconds:.0f} s and was killed")
        try:
            return Answer(*self._connection.recv())
        except (EOFError, OSError):
            raise _Silent(how_it_ended(self._process.wait()), died=True) from None

    def kill(self) -> None:
        """Kills the process by its id and waits for its end; an idle one ends by itself."""
        self._connection.close()
        self._process.kill()
        self._process.wait()

    def _send(self, message: object) -> None:
        try:
            self._connection.send(message)
        except OSError:
            raise _Silent(how_it_ended(self._process.wait()), died=True) from None


def _copy(memory: UInt8Array | None, row: Row, output: Output | SharedRow) -> None:
    """To where the loader wants it, when that is not where the worker wrote it."""
    if memory is None:
        return
    if isinstance(output, Rgb):
        np.copyto(output.data, memory.reshape(output.data.shape))
        return
    assert isinstance(output, Planes)
    assert isinstance(row, Clip)
    planes = Planes.packed(memory, len(row.request.frames), row.request.box)
    for source, target in ((planes.y, output.y), (planes.u, output.u), (planes.v, output.v)):
        np.copyto(target, source)


def _end(alive: list[_Worker]) -> None:
    for worker in alive:
        worker.kill()
    alive.clear()
