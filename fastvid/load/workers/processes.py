"""Clips decoded in processes of their own, which can be killed: what ``workers="process"`` does.

A lane is a worker process, memory that both see, and a thread of the loader that sends the worker some rows of a batch
and waits. The worker decides what a row shows, reads, decodes and normalises, and writes the row where the step will
see it, so the training process spends microseconds on a clip. A worker that hangs in native code, crashes or sends a
malformed answer costs the clip it was at and nothing else: it is killed by its id, and the lane starts another for the
rest.

What the training process still does itself: it reads ahead where storage answers late, and sends the packets; it
decides clips that are cut out of one reading (views, repeats) or have flow beside them. Planes (of flow, of what clips
are cut out of, and of all clips for a CUDA device) are copied to where the batch wants them.

Messages to a worker travel by pickle, over a socket that nobody else can open. The worker reads hostile files, so its
answers are plain data that is checked here, and never unpickled. Workers are started, not forked, and import neither
torch nor the user's modules.
"""

from __future__ import annotations

import itertools
import os
import pickle
import select
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from fastvid.decode.backends import Backend
from fastvid.decode.request import EncodedClip, Planes
from fastvid.errors import FormatError, WorkerError
from fastvid.load.clips.clip import Clip
from fastvid.load.clips.planner import ClipPlanner
from fastvid.load.memory.buffers import SharedBufferPool
from fastvid.load.memory.row_layout import RowLayout, SharedRow
from fastvid.load.workers.clip_worker import At, Made, Task
from fastvid.load.workers.worker_process import PLACE_BYTES, Answer, Order, Place
from fastvid.runtime.arrays import UInt8Array
from fastvid.runtime.children import how_it_ended
from fastvid.runtime.messages import Inbox
from fastvid.storage import Storage

APART_CLIPS: Final = 16
"""Clips that a worker process is sent at once. Its thread here wakes up with cold caches, which costs 0.4 ms of the
interpreter's time however many clips it is about, and a training step waits for that."""

_START_SECONDS: Final = 120.0
"""Longest start of a worker; importing PyAV takes a second on an idle machine."""

_START_TRIES: Final = 3
"""Consecutive deaths at startup before the iteration fails: what kills one worker by chance (somebody who is short of
memory) rarely kills three."""

_POLL_MS: Final = 100
"""How often a waiting thread looks whether its iteration has ended, and whether its worker goes on."""

_PATIENCE_SECONDS: Final = 1.0
"""How long the end of an iteration waits for a clip before it kills the worker that decodes it."""

_EXIT_SECONDS: Final = 10.0
"""How long a worker that has closed its socket may take to exit; a healthy kernel takes milliseconds."""

_MOST_BYTES: Final = 64 << 20
"""The longest answer of a worker; a usual one has a kilobyte."""

_MAIN: Final = "from fastvid.load.workers.worker_process import main; main()"

_HINT: Final = "such a clip can be left out with where=; on_error='skip' masks and counts it"


class ProcessLane:
    """A worker process, used by one thread at a time.

    Args:
        backend: What the worker decodes with.
        clip_seconds: Longest that reading, or decoding, a clip may take.
        memory: The memory that workers write.
    """

    max_clips: int = 1
    at_once: int = APART_CLIPS

    def __init__(self, backend: Backend, clip_seconds: float, memory: SharedBufferPool) -> None:
        self._backend, self._clip_seconds, self._memory = backend, clip_seconds, memory
        self._place = memory.take(PLACE_BYTES).view(np.int64)
        self._worker: _Worker | None = None
        self._alive: list[_Worker] = []
        self._end = weakref.finalize(self, _end, self._alive)

    def make(self, tasks: Sequence[Task], at: At, planner: ClipPlanner | None = None) -> Iterator[Made]:
        """See `fastvid.load.workers.clip_worker.Lane`. The error of a clip whose worker is lost is a WorkerError.

        Raises:
            MissingDependency: The decoder does not open in the worker.
            WorkerError: No worker starts.
        """
        # Batch by batch, because costs are counted for each.
        for _, group in itertools.groupby(range(len(tasks)), key=lambda number: tasks[number].target):
            left = {number: _Spot(tasks[number], self._memory) for number in group}
            while left and at([next(iter(left))]):
                yield from self._ask(left, at, planner)

    def close(self) -> None:
        """Ends the worker."""
        self._end()
        self._worker = None

    def _ask(self, left: dict[int, _Spot], at: At, planner: ClipPlanner | None) -> Iterator[Made]:
        """Asks the worker once; what is settled leaves `left`."""
        numbers = list(left)
        idle = self._worker
        worker = idle or self._start(lambda: at(numbers[:1]))
        self._place[Place.TASK], steps = 0, int(self._place[Place.STEPS])
        try:
            worker.tell(planner)
            orders = [worker.order(spot) for spot in left.values()]
            frames = [spot.frames for spot in left.values()]
            answer = worker.ask(orders, frames, self._clip_seconds, lambda task: at([numbers[task]]))
            if len(answer.made) < len(numbers) and at(numbers[:1]):
                raise _Silent("did not answer for every clip and was killed")
        except _Silent as silence:
            self._drop(worker)
            if silence.unwanted:
                left.clear()
            elif worker is not idle or self._place[Place.STEPS] != steps:  # or else it was lost before it was asked
                del left[number := numbers[worker.task(len(numbers))]]
                yield Made(number, WorkerError(f"worker process {worker.pid} {silence}", hint=_HINT), None, None)
            return
        for made in answer.made:
            spot = left.pop(numbers[made.number])
            if made.error is None:
                spot.copy()
            yield made._replace(number=numbers[made.number], counters=None if made.number else answer.costs)
        left.clear()

    def _start(self, wanted: Callable[[], bool]) -> _Worker:
        memory = self._memory
        words = (memory.file, memory.size, memory.offset(self._place), self._clip_seconds)
        for tries in itertools.count(1):
            worker = _Worker(words, self._place)
            self._alive.append(worker)
            try:
                answer = worker.ask(self._backend, [0], _START_SECONDS, lambda _: wanted())
            except _Silent as silence:
                self._drop(worker)
                if silence.died and tries < _START_TRIES:
                    continue
                raise WorkerError(f"worker process {worker.pid} {silence} before it was ready") from None
            for made in answer.made:
                if made.error is not None:
                    self._drop(worker)
                    raise made.error
            break
        self._worker = worker
        return worker

    def _drop(self, worker: _Worker) -> None:
        worker.kill()
        self._alive.remove(worker)
        self._worker = None


class _Spot:
    """Where a worker writes the clip of a task: its row, or memory from which its planes are copied."""

    def __init__(self, task: Task, memory: SharedBufferPool) -> None:
        self.source = task.source
        self.layout: RowLayout | None = None
        self.planes: tuple[tuple[UInt8Array, UInt8Array], ...] = ()
        output = task.target.output(task.row, frozenset({SharedRow, Planes}))
        if isinstance(output, SharedRow):
            self.offset, self.layout = output.offset, output.layout
            return
        assert isinstance(output, Planes)
        assert isinstance(task.source, Clip | EncodedClip)
        frames, box = len(task.source.request.frames), task.source.request.box
        room = memory.take(Planes.nbytes(frames, box))
        planes, self.offset = Planes.packed(room, frames, box), memory.offset(room)
        self.planes = ((output.y, planes.y), (output.u, planes.u), (output.v, planes.v))

    @property
    def frames(self) -> int:
        """Frames that the worker is to decide."""
        return 0 if self.layout is None or isinstance(self.source, Clip | EncodedClip) else self.layout.num_frames

    def copy(self) -> None:
        """Copies planes to where the batch wants them."""
        for wanted, plane in self.planes:
            np.copyto(wanted, plane)


class _Silent(Exception):
    """A worker will not answer; says what became of it."""

    def __init__(self, message: str, *, died: bool = False, unwanted: bool = False) -> None:
        super().__init__(message)
        self.died, self.unwanted = died, unwanted


class _Worker:
    """The process, and what it was told.

    Args:
        words: For its command line: descriptor and bytes of the shared memory, where `Place` lies, seconds for a clip.
        place: That place.
    """

    def __init__(self, words: tuple[int, int, int, float], place: npt.NDArray[np.int64]) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-c", _MAIN, *map(str, (theirs.fileno(), *words))]
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), words[0]),
                env=os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
            )
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        self._inbox = Inbox(_MOST_BYTES)
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

    def order(self, spot: _Spot) -> Order:
        """The message for one clip."""
        layout = -1 if spot.layout is None else self._number(spot.layout)
        source = spot.source
        if isinstance(source, EncodedClip):
            return Order(spot.offset, layout, request=source.request, packets=source)
        storage = self._number(source.shard.storage)
        row = (source.shard.stem, source.shard_row, source.key, source.sample, source.position, storage)
        decided = (source.request, source.info) if isinstance(source, Clip) else ()
        return Order(spot.offset, layout, *row, *decided)

    def task(self, count: int) -> int:
        """Which of so many orders the worker is at; it writes this number itself, and may write anything."""
        return min(max(int(self._place[Place.TASK]), 0), count - 1)

    def ask(
        self, message: Backend | list[Order], frames: Sequence[int], seconds: float, at: Callable[[int], bool]
    ) -> Answer:
        """The worker's answer.

        Args:
            message: What is asked.
            frames: Of each order, how many frames the worker is to decide.
            seconds: How long the worker may get nowhere.
            at: Told which order the worker is at; returns whether anybody wants the answer.

        Raises:
            _Silent: The worker got nowhere for so many seconds, or died, or answered something else, or nobody wants
                its answer any more.
        """
        place = self._place
        place[Place.STOP] = 0
        self._send([tuple(order) for order in message] if isinstance(message, list) else message)
        deadline, cut_short, steps = time.monotonic() + seconds, False, place[Place.STEPS]
        while True:
            if self._poll.poll(_POLL_MS):
                try:
                    for header, blobs in self._inbox.add(self._receive()):
                        return Answer.from_parts(header, blobs, frames, self.pid)
                except FormatError as error:
                    raise _Silent(f"sent a malformed answer and was killed: {error.message}") from error
            elif not cut_short and not at(self.task(len(frames))):
                place[Place.STOP] = 1
                cut_short, deadline = True, min(deadline, time.monotonic() + _PATIENCE_SECONDS)
            elif not cut_short and place[Place.STEPS] != steps:
                deadline, steps = time.monotonic() + seconds, place[Place.STEPS]
            if time.monotonic() >= deadline:
                if cut_short:
                    raise _Silent("was not waited for", unwanted=True)
                raise _Silent(f"hung for {seconds:.0f} s and was killed")

    def kill(self) -> None:
        """Kills the process by its id and waits for its end; an idle one ends by itself."""
        self._socket.close()
        self._process.kill()
        self._process.wait()

    def _number(self, thing: Storage | RowLayout) -> int:
        """The worker's number of a storage or a layout, which it then has."""
        for number, known in enumerate(self._known):
            if known is thing or (isinstance(thing, RowLayout) and known == thing):
                return number
        self._send(thing)
        self._known.append(thing)
        return len(self._known) - 1

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

    def _lost(self) -> _Silent:
        try:
            return _Silent(how_it_ended(self._process.wait(_EXIT_SECONDS)), died=True)
        except subprocess.TimeoutExpired:
            return _Silent("closed its socket and was killed", died=True)


def _end(alive: list[_Worker]) -> None:
    for worker in alive:
        worker.kill()
    alive.clear()
