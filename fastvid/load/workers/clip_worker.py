"""The worker's end of `fastvid.load.workers.processes`: decides, fetches and decodes clips into shared memory."""

from __future__ import annotations

import faulthandler
import mmap
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from multiprocessing.connection import Connection
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from fastvid.decode.backends import Backend
from fastvid.decode.clips import Scratch
from fastvid.decode.request import ClipRequest, Decoder, EncodedClip, Planes, Rgb
from fastvid.format.packets import StreamInfo
from fastvid.format.shard import Shard
from fastvid.load.clips.clip import Row
from fastvid.load.clips.planner import ClipPlanner
from fastvid.load.memory.row_layout import RowLayout
from fastvid.load.workers.fetch import fetch
from fastvid.load.workers.stats import Counters
from fastvid.runtime.arrays import BoolArray, IntArray
from fastvid.storage import Storage

_ORPHAN_SECONDS: Final = 30.0
"""How much longer than its parent would wait a worker that hangs lives on, should the parent have died."""


class Place(IntEnum):
    """Numbers in the shared memory that both sides look at while a worker is busy, as int64."""

    STEPS = 0
    """Steps begun since the worker started, written by it. While it grows, the worker does not hang."""
    TASK = 1
    """Which of its tasks the worker is at, written by it."""
    STOP = 2
    """1 when nobody wants the tasks that are not begun, written by the parent."""


PLACE_BYTES: Final = 8 * len(Place)


@dataclass(frozen=True, slots=True)
class Hello:
    """The first message.

    Attributes:
        backend: What to decode with.
        clip_seconds: How long a clip may take.
        memory: Bytes of the shared memory.
        place: Where `Place` lies there.
    """

    backend: Backend
    clip_seconds: float
    memory: int
    place: int


class Packets(NamedTuple):
    """What an `EncodedClip` holds besides what a task says, in a form that travels.

    Attributes:
        data: Bytes, with the padding behind them.
        starts: As in `EncodedClip`; the rest likewise.
    """

    data: bytes
    starts: IntArray
    sizes: IntArray
    shows: IntArray
    keys: BoolArray

    @classmethod
    def of(cls, clip: EncodedClip) -> Packets:
        """Those of a clip."""
        return cls(bytes(clip.data), clip.starts, clip.sizes, clip.shows, clip.keys)

    def clip(self, request: ClipRequest, info: StreamInfo, task: Task) -> EncodedClip:
        """The clip again."""
        parts = (memoryview(self.data), self.starts, self.sizes, self.shows, self.keys)
        return EncodedClip(request, info, *parts, key=task.key, shard=task.stem)


class Task(NamedTuple):
    """One clip. Travels as a plain tuple, which takes a tenth of the time where the interpreter's caches are cold.

    Attributes:
        offset: Where it goes in the shared memory.
        layout: How it lies there, the number of a `RowLayout`; -1 for packed planes.
        stem: Its shard.
        row: Its sample's row there.
        key: Its sample's key, for messages.
        sample: Its sample's number.
        position: Its place in the epoch's order.
        storage: Number of its shard's storage; -1 where the packets came along.
        request: What is wanted; None: to be decided here.
        info: Its stream, where it is known.
        packets: What it is decoded from, where the parent has read it; None lets the worker read.
    """

    offset: int
    layout: int
    stem: str
    row: int
    key: str
    sample: int
    position: int
    storage: int
    request: ClipRequest | None = None
    info: StreamInfo | None = None
    packets: Packets | None = None


class Failure(NamedTuple):
    """Why a task failed.

    Attributes:
        error: What went wrong.
        trace: Where in the worker, for errors that are nobody's clip's.
    """

    error: Exception
    trace: str = ""


class Answer(NamedTuple):
    """What came of some tasks. Travels as a plain tuple.

    Attributes:
        shown: Frames of each as bytes of int64 [T] where the worker decided them, else empty. Fewer than the tasks when
            the worker was told to stop.
        failures: By number of the task.
        costs: What they cost together, as `Counters.sums`.
    """

    shown: list[bytes]
    failures: dict[int, Failure]
    costs: tuple[float, ...]


class Serving:
    """A worker's state.

    Args:
        memory: File descriptor of the shared memory.
        hello: What the parent said first.
    """

    def __init__(self, memory: int, hello: Hello) -> None:
        self._memory = np.frombuffer(mmap.mmap(memory, hello.memory), dtype=np.uint8)
        self._place = self._memory[hello.place :][:PLACE_BYTES].view(np.int64)
        self._seconds = hello.clip_seconds + _ORPHAN_SECONDS
        self._decoder: Decoder = hello.backend.open()
        self._known: list[Any] = []
        self._shards: dict[tuple[int, str], Shard] = {}
        self._planner: ClipPlanner | None = None
        self._scratches: list[Scratch] = []
        self._levels = np.empty(0, dtype=np.uint8)

    def learn(self, thing: Storage | RowLayout | ClipPlanner) -> None:
        """Knows what tasks will name by its number, or what decides clips from now on."""
        if isinstance(thing, ClipPlanner):
            self._planner = thing
        else:
            self._known.append(thing)

    def serve(self, tasks: Sequence[Task]) -> Answer:
        """Decodes clips into the shared memory."""
        counters, shown, failures = Counters(), list[bytes](), dict[int, Failure]()
        fetched: list[EncodedClip | Failure] = []
        # All are fetched first: see `fastvid.load.workers.engine.FETCH_CLIPS`.
        for number, task in enumerate(tasks):
            self._begin(number)
            fetched.append(_attempt(self._fetch, task, number, counters))
        for number, (task, clip) in enumerate(zip(tasks, fetched, strict=True)):
            if self._place[Place.STOP]:
                break
            self._begin(number)
            failure = _attempt(self._decode, task, clip, counters) if isinstance(clip, EncodedClip) else clip
            if failure is not None:
                failures[number] = failure
            shown.append(b"")
            if task.request is None and isinstance(clip, EncodedClip):
                shown[number] = clip.request.frames.tobytes()
        faulthandler.cancel_dump_traceback_later()
        return Answer(shown, failures, counters.sums())

    def _begin(self, number: int) -> None:
        self._place[Place.TASK] = number
        self._place[Place.STEPS] += 1
        # In C, so that it also ends a loop that never lets go of the interpreter.
        faulthandler.dump_traceback_later(self._seconds, exit=True)

    def _fetch(self, task: Task, number: int, counters: Counters) -> EncodedClip:
        begun = time.perf_counter()
        request, info = task.request, task.info
        if task.packets is not None:
            assert request is not None
            assert info is not None
            return task.packets.clip(request, info, task)
        shard = self._shards.get((task.storage, task.stem))
        if shard is None:
            shard = self._shards[task.storage, task.stem] = Shard(self._known[task.storage], task.stem)
        if request is None:
            assert self._planner is not None
            (clip,) = self._planner.decide(Row(0, task.key, shard, task.row, task.sample, task.position))
            request, info = clip.request, clip.info
        if number == len(self._scratches):
            self._scratches.append(Scratch())
        got = fetch(shard, task.row, request, key=task.key, info=info, scratch=self._scratches[number])
        counters.count(got)
        counters.fetch_seconds += time.perf_counter() - begun
        return got.clip

    def _decode(self, task: Task, clip: EncodedClip, counters: Counters) -> Failure | None:
        begun = time.perf_counter()
        request = clip.request
        layout: RowLayout | None = None if task.layout < 0 else self._known[task.layout]
        memory = self._memory[task.offset :]
        if layout is None:
            size = Planes.nbytes(len(request.frames), request.box)
            (error,) = self._decoder.decode([clip], [Planes.packed(memory[:size], len(request.frames), request.box)])
            filled = time.perf_counter()
        else:
            row = memory[: layout.nbytes]
            levels = (row if layout.as_decoded else self._staged(layout)).reshape(layout.levels_shape)
            (error,) = self._decoder.decode([clip], [Rgb(levels)])
            filled = time.perf_counter()
            if error is None and not layout.as_decoded:
                layout.fill(layout.view(row), levels)
        counters.clips += error is None
        counters.decode_seconds += filled - begun
        counters.finish_seconds += time.perf_counter() - filled
        return None if error is None else Failure(error)

    def _staged(self, layout: RowLayout) -> npt.NDArray[np.uint8]:
        size = int(np.prod(layout.levels_shape))
        if len(self._levels) < size:
            self._levels = np.empty(size, dtype=np.uint8)
        return self._levels[:size]


_Step = TypeVar("_Step")


def _attempt(step: Callable[..., _Step], *arguments: object) -> _Step | Failure:
    try:
        return step(*arguments)
    except Exception as error:  # noqa: BLE001 - the parent decides
        return Failure(error, traceback.format_exc())


def main() -> None:
    """Serves the parent at the other end of the socket until it closes. Arguments: descriptors of the socket and of
    the shared memory."""
    # Ctrl-C reaches every process of the terminal; the parent ends its workers itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection: Connection[Any, Any] = Connection(int(sys.argv[1]))
    serving: Serving | None = None
    try:
        while True:
            message = connection.recv()
            if isinstance(message, Hello):
                failures = {}
                try:
                    serving = Serving(int(sys.argv[2]), message)
                except Exception as error:  # noqa: BLE001 - the parent decides
                    failures[0] = Failure(error, traceback.format_exc())
                connection.send(tuple(Answer([], failures, ())))
                continue
            assert serving is not None
            if isinstance(message, list):
                connection.send(tuple(serving.serve([Task(*task) for task in message])))
            else:
                serving.learn(message)
    except (EOFError, ConnectionError):
        return
