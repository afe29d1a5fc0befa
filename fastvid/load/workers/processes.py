"""Decodes clips in worker processes that can be killed, for ``Workers("process")``.

A lane is a worker process, memory shared with it, and a thread of the loader that sends the worker some rows of a batch
and waits. The worker plans, reads, decodes and normalises each row and writes it where the training step will read it,
so the training process spends microseconds per clip. If a worker hangs in native code, crashes or sends a malformed
answer, only the clip that it was processing is lost: the worker is killed by its process id, and the lane starts
another for the remaining clips. If the worker died, for example killed by the OOM killer, its clip is tried once more.

If storage has high latency, the training process itself fetches clips in advance and sends the packets to the worker.
Planes (of flow, of clips that share a video's packets, and of all clips for a CUDA device) are copied to the batch.

Messages to a worker are pickled and sent over a private socket. The worker reads untrusted files, so its answers are
plain data that is checked here, never unpickled. Workers are spawned, not forked, and import neither torch nor the
user's modules.
"""

from __future__ import annotations

import itertools
import logging
import os
import pickle
import select
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from fastvid.decode.backends import Backend
from fastvid.decode.request import Levels, Planes, Rgb, packed, packed_size
from fastvid.errors import FormatError, WorkerError
from fastvid.format.shard import ShardFolder
from fastvid.load.memory import RgbRow, RowLayout, SharedBufferPool
from fastvid.load.stats import Counters
from fastvid.load.workers.clip_worker import Done, Row, Watch
from fastvid.load.workers.worker_process import STATUS_BYTES, Answer, RowOrder, Status
from fastvid.runtime.processes import SAFE_PATH, Inbox, how_it_ended

_log = logging.getLogger(__name__)

PROCESS_CLIPS: Final = 16
"""Clips sent to a worker process at once. Waking the lane's thread costs GIL time with cold CPU caches,
whatever the number of clips, and delays the training step."""

_START_SECONDS: Final = 120.0
"""Startup timeout of a worker; importing PyAV takes a second on an idle machine."""

_START_TRIES: Final = 3
"""Consecutive startup deaths tolerated before the iteration fails; an accidental cause, for example the OOM killer,
rarely kills three in a row."""

_POLL_MS: Final = 100
"""How often a waiting thread checks whether its iteration has ended and its worker makes progress."""

_GRACE_SECONDS: Final = 1.0
"""How long a lane whose iteration has ended waits for the current clip before it kills the worker that decodes it."""

_EXIT_SECONDS: Final = 10.0
"""How long a worker that has closed its socket may take to exit; normally milliseconds."""

_MOST_BYTES: Final = 64 << 20
"""Maximum size of a worker's answer; typically a kilobyte."""

_MAIN: Final = "from fastvid.load.workers.worker_process import main; main()"

_HINT: Final = "exclude the clip with where=, or use on_error=Skip() to mask and count it"


class ProcessLane:
    """Makes clips as `ClipWorker` does, but in a worker process, started on first use. For one thread at a time."""

    least: int = 1
    at_once: int = PROCESS_CLIPS

    def __init__(self, backend: Backend, clip_seconds: float, memory: SharedBufferPool) -> None:
        self._backend, self._clip_seconds, self._memory = backend, clip_seconds, memory
        self._status = memory.take(STATUS_BYTES).view(np.int64)
        self._worker: _WorkerProcess | None = None
        self._alive: list[_WorkerProcess] = []
        self._end = weakref.finalize(self, _end, self._alive)

    def make(self, rows: Sequence[Row], watch: Watch, done: Done) -> None:
        """See `ClipWorker`.

        A clip whose worker hangs, sends a malformed answer or dies twice fails with a WorkerError.
        """
        # One batch per message, because costs are counted per batch.
        for _, group in itertools.groupby(rows, key=lambda row: id(row.target)):
            left = {row.row: _Destination(row, self._memory) for row in group}
            retried = set[int]()
            while left and not watch.is_over:
                self._ask(left, retried, watch, done)

    def close(self) -> None:
        """Stop the worker."""
        self._end()
        self._worker = None

    def _ask(self, left: dict[int, _Destination], retried: set[int], watch: Watch, done: Done) -> None:
        """Send the rows to the worker once; finished ones are removed from `left`.

        If a worker dies, its rows are added to `retried` and stay in `left`, but only the first time.
        """
        rows = [spot.row for spot in left.values()]
        watch.rows, idle = rows[:1], self._worker
        worker = idle or self._start(watch)
        self._status[Status.TASK], steps = 0, int(self._status[Status.STEPS])
        try:
            orders = [worker.order(spot) for spot in left.values()]
            answer = worker.ask(orders, rows, self._clip_seconds, watch)
            if len(answer.made) < len(rows) and not watch.is_over:
                raise _NoAnswer("did not answer for every clip and was killed")
        except _NoAnswer as silence:
            self._drop(worker)
            if silence.unwanted:
                left.clear()
            elif worker is not idle or self._status[Status.STEPS] != steps:  # else it died before it received the rows
                row = rows[worker.task(len(rows))]
                error = WorkerError(f"worker process {worker.pid} {silence}", hint=_HINT)
                if silence.died and row.row not in retried:
                    retried.add(row.row)
                    _log.warning("%s; its clip is tried once more in a new process", error.message)
                else:
                    del left[row.row]
                    done(row, error, Counters())
            return
        costs = answer.costs
        for number, failure in answer.made:
            spot = left.pop(rows[number].row)
            if failure is None:
                spot.copy()
            done(rows[number], failure, costs)
            costs = Counters()  # counted once
        left.clear()

    def _start(self, watch: Watch) -> _WorkerProcess:
        memory = self._memory
        words = (memory.file, memory.size, memory.offset(self._status), self._clip_seconds)
        for tries in itertools.count(1):
            worker = _WorkerProcess(words, self._status)
            self._alive.append(worker)
            try:
                answer = worker.ask(self._backend, watch.rows, _START_SECONDS, watch)
            except _NoAnswer as silence:
                self._drop(worker)
                if silence.died and tries < _START_TRIES:
                    continue
                raise WorkerError(f"worker process {worker.pid} {silence} before it was ready") from None
            for _, error in answer.made:
                if error is not None:
                    self._drop(worker)
                    raise error
            break
        self._worker = worker
        return worker

    def _drop(self, worker: _WorkerProcess) -> None:
        worker.kill()
        self._alive.remove(worker)
        self._worker = None


class _Destination:
    """Where a worker writes a row: directly into the batch, or into shared memory from which its planes are copied."""

    def __init__(self, row: Row, memory: SharedBufferPool) -> None:
        self.row, (target, number, _) = row, row
        self.place, self.request = target.place(number), target.request(number)
        self.packets = target.packets.get(number)
        self.sounds = [
            (*map(memory.offset, (one.data, one.mask)), *one.data.shape, one.window, one.packets, one.is_read)
            for one in target.sounds.get(number, ())
        ]
        self.layout: RowLayout | None = None
        self.planes: tuple[tuple[npt.NDArray[Any], npt.NDArray[Any]], ...] = ()
        output = target.output(number, frozenset({Rgb, Planes, Levels}))
        if isinstance(output, RgbRow):
            self.offset, self.layout = memory.offset(output.memory), output.layout
            return
        assert isinstance(output, Planes | Levels)
        size = packed_size(self.request)
        room = memory.take(size)
        planes, self.offset = packed(room[:size], self.request), memory.offset(room)
        self.planes = tuple(zip(output.arrays, planes.arrays, strict=True))

    def copy(self) -> None:
        """Copy the planes to the batch."""
        for wanted, plane in self.planes:
            np.copyto(wanted, plane)


class _NoAnswer(Exception):
    """The worker did not answer; the message says why."""

    def __init__(self, message: str, *, died: bool = False, unwanted: bool = False) -> None:
        super().__init__(message)
        self.died, self.unwanted = died, unwanted


class _WorkerProcess:
    """A worker process, the socket to it, and the folders and layouts it has been sent.

    `words`: numbers for its command line: descriptor and bytes of the shared memory, offset of `Status`, clip timeout.
    """

    def __init__(self, words: tuple[int, int, int, float], status: npt.NDArray[np.int64]) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-c", _MAIN, *map(str, (theirs.fileno(), *words))]
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), words[0]),
                env=os.environ | SAFE_PATH | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
            )
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        self._inbox = Inbox(_MOST_BYTES)
        self._status = status
        self._known: list[ShardFolder | RowLayout] = []

    @property
    def pid(self) -> int:
        return self._process.pid

    def order(self, spot: _Destination) -> RowOrder:
        """Return the message for one row; may first send the folder and layout that it refers to by number."""
        shard, row, stream, key, _ = spot.place
        layout = -1 if spot.layout is None else self._number(spot.layout)
        where = (shard.stem, shard.tar_sha256, row, stream, key)
        place = (self._number(shard.folder), *where) if spot.packets is None else ()
        return RowOrder(spot.offset, layout, spot.request, spot.sounds, spot.packets, *place)

    def task(self, count: int) -> int:
        """Return the index of the row being processed; clamped below `count`, as the worker may write any number."""
        return min(max(int(self._status[Status.TASK]), 0), count - 1)

    def ask(self, message: Backend | list[RowOrder], rows: Sequence[Row], seconds: float, watch: Watch) -> Answer:
        """Send a message and return the worker's answer.

        `rows`: the rows that the worker processes meanwhile. `seconds`: timeout for each of them.
        """
        status = self._status
        status[Status.STOP] = 0
        self._send([tuple(order) for order in message] if isinstance(message, list) else message)
        deadline, cut_short, steps = time.monotonic() + seconds, False, status[Status.STEPS]
        while True:
            if self._poll.poll(_POLL_MS):
                try:
                    for header, _ in self._inbox.add(self._receive()):
                        return Answer.from_header(header, len(rows), self.pid)
                except FormatError as error:
                    raise _NoAnswer(f"sent a malformed answer and was killed: {error.message}") from error
            elif not cut_short and watch.is_over:
                status[Status.STOP] = 1
                cut_short, deadline = True, min(deadline, time.monotonic() + _GRACE_SECONDS)
            elif not cut_short and status[Status.STEPS] != steps:
                deadline, steps = time.monotonic() + seconds, status[Status.STEPS]
                watch.rows = [rows[self.task(len(rows))]]
            if time.monotonic() >= deadline:
                if cut_short:
                    raise _NoAnswer("is no longer needed", unwanted=True)
                raise _NoAnswer(f"hung for {seconds:.0f} s and was killed")

    def kill(self) -> None:
        """Kill the process by its id and wait for it to exit."""
        self._socket.close()
        self._process.kill()
        self._process.wait()

    def _number(self, thing: ShardFolder | RowLayout) -> int:
        """Return the index by which the worker knows a folder of shards or a layout, sending it first if necessary."""
        if thing not in self._known:
            self._send(thing)
            self._known.append(thing)
        return self._known.index(thing)

    def _send(self, message: object) -> None:
        try:
            self._socket.sendall(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))
        except OSError:
            raise self._lost() from None

    def _receive(self) -> bytes:
        try:
            data = self._socket.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            raise self._lost()
        return data

    def _lost(self) -> _NoAnswer:
        try:
            return _NoAnswer(how_it_ended(self._process.wait(_EXIT_SECONDS)), died=True)
        except subprocess.TimeoutExpired:
            return _NoAnswer("closed its socket and was killed", died=True)


def _end(alive: list[_WorkerProcess]) -> None:
    for worker in alive:
        worker.kill()
    alive.clear()
