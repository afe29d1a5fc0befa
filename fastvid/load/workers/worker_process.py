"""The worker process' end of `fastvid.load.workers.processes`: a `ClipWorker` that writes into shared memory.

What the process is told comes by pickle, from the process that started it. It reads hostile files, so what it answers
is plain data (`fastvid.runtime.messages`), which the other end checks.
"""

from __future__ import annotations

import faulthandler
import mmap
import pickle
import signal
import socket
import sys
import time
import traceback
from collections.abc import Mapping, Sequence, Set
from enum import IntEnum
from typing import IO, Any, Final, NamedTuple

import numpy as np

from fastvid.decode.backends import Backend
from fastvid.decode.request import ClipRequest, EncodedClip, Output, Planes, Rgb
from fastvid.errors import FastvidError, FormatError, error_from_json, error_to_json
from fastvid.format.packets import StreamInfo
from fastvid.format.shard import Shard
from fastvid.load.clips.clip import Clip, Row
from fastvid.load.clips.planner import ClipPlanner
from fastvid.load.memory.row_layout import RowLayout
from fastvid.load.workers.clip_worker import ClipWorker, Made, Task
from fastvid.load.workers.stats import Counters
from fastvid.runtime.arrays import UInt8Array
from fastvid.runtime.messages import pack
from fastvid.storage import Storage

_ORPHAN_SECONDS: Final = 30.0
"""How much longer than its parent would wait a worker that hangs lives on, should the parent have died."""


class Place(IntEnum):
    """Numbers in the shared memory that both sides look at while a worker is busy, as int64."""

    STEPS = 0
    """Steps begun since the worker started, written by it. While it grows, the worker does not hang."""
    TASK = 1
    """Which of its orders the worker is at, written by it."""
    STOP = 2
    """1 when nobody wants the orders that are not begun, written by the parent."""


PLACE_BYTES: Final = 8 * len(Place)


class Order(NamedTuple):
    """One clip. Travels as a plain tuple, which takes a tenth of the time where the interpreter's caches are cold.

    Attributes:
        offset: Where it goes in the shared memory.
        layout: How it lies there, the number of a `RowLayout`; -1 for packed planes.
        stem: Its shard.
        row: Its sample's row there.
        key: Its sample's key, for messages.
        sample: Its sample's number.
        position: Its place in the epoch's order.
        storage: Number of its shard's storage.
        request: What is wanted; None: to be decided here.
        info: Its stream, where it is decided.
        packets: What it is decoded from, where the parent has read it; None lets the worker read.
    """

    offset: int
    layout: int
    stem: str = ""
    row: int = 0
    key: str = ""
    sample: int = 0
    position: int = 0
    storage: int = 0
    request: ClipRequest | None = None
    info: StreamInfo | None = None
    packets: EncodedClip | None = None


class Answer(NamedTuple):
    """What came of some orders.

    Attributes:
        made: By number of the order, in the order in which they were done, without counters. Fewer than the orders when
            the worker was told to stop.
        costs: What they cost together.
    """

    made: list[Made]
    costs: Counters

    def to_bytes(self) -> bytes:
        """One piece, see `fastvid.runtime.messages`."""
        made, blobs = [], []
        for number, error, frames, _ in self.made:
            trace = "" if error is None or isinstance(error, FastvidError) else _trace(error)
            made.append((number, 0 if frames is None else len(frames), error and error_to_json(error), trace))
            blobs += [] if frames is None else [frames.tobytes()]
        return pack({"made": made, "costs": self.costs.sums()}, *blobs)

    @classmethod
    def from_parts(cls, header: Mapping[str, Any], blobs: memoryview, frames: Sequence[int], pid: int) -> Answer:
        """The answer behind `to_bytes`' result.

        Args:
            header: Of the piece.
            blobs: Of the piece.
            frames: Of each order, how many frames are to be decided.
            pid: Of the worker, for messages.

        Raises:
            FormatError: It answers something else.
        """
        try:
            made, start = dict[int, Made](), 0
            for number, count, record, trace in header["made"]:
                if number in made or number not in range(len(frames)) or count != (0 if record else frames[number]):
                    raise FormatError(f"order {number} of {len(frames)} shows {count} frames")
                error = error_from_json(record) if record else None
                if error is not None and not isinstance(error, FastvidError):
                    error.add_note(f"in worker process {pid}:\n{trace}")
                shown = np.frombuffer(blobs, dtype=np.int64, count=count, offset=8 * start) if count else None
                made[number], start = Made(number, error, shown, None), start + count
            if not all(isinstance(cost, int | float) for cost in header["costs"]):
                raise FormatError("costs are not numbers")
            return cls(list(made.values()), Counters.of(header["costs"]))
        except (KeyError, TypeError, ValueError) as error:
            raise FormatError(f"an answer does not parse: {error!r}") from error


class Serving:
    """A worker's state; also the `Target` of its tasks.

    Args:
        backend: What to decode with.
        memory: Descriptor of the shared memory.
        size: Bytes of it.
        place: Where `Place` lies there.
        clip_seconds: How long a clip may take.
    """

    def __init__(self, backend: Backend, memory: int, size: int, place: int, clip_seconds: float) -> None:
        self._memory = np.frombuffer(mmap.mmap(memory, size), dtype=np.uint8)
        self._place = self._memory[place:][:PLACE_BYTES].view(np.int64)
        self._seconds = clip_seconds + _ORPHAN_SECONDS
        # One by one, so that the parent knows which clip hangs.
        self._worker = ClipWorker(backend.open(), max_clips=1)
        self._known: list[Any] = []
        self._shards: dict[tuple[int, str], Shard] = {}
        self._planner: ClipPlanner | None = None
        self._levels = np.empty(0, dtype=np.uint8)
        self._orders: Sequence[Order] = ()

    def learn(self, thing: Storage | RowLayout | ClipPlanner) -> None:
        """Knows what orders will name by its number, or what decides clips from now on."""
        if isinstance(thing, ClipPlanner):
            self._planner = thing
        else:
            self._known.append(thing)

    def serve(self, orders: Sequence[Order]) -> Answer:
        """Decodes clips into the shared memory."""
        self._orders = orders
        tasks, done, costs = list[Task](), list[Made](), Counters()
        for number, order in enumerate(orders):
            try:
                tasks.append(Task(number, self._source(number, order), self))
            except Exception as error:  # noqa: BLE001 - the parent decides
                done.append(Made(number, error, None, None))
        for made in self._worker.make(tasks, lambda numbers: self._begin(tasks[numbers[0]].row), self._planner):
            assert made.counters is not None
            costs.add(made.counters)
            row = tasks[made.number].row
            if made.error is None:
                begun = time.perf_counter()
                self._fill(orders[row])
                costs.finish_seconds += time.perf_counter() - begun
            done.append(made._replace(number=row))
        faulthandler.cancel_dump_traceback_later()
        return Answer(done, costs)

    def output(self, row: int, _kinds: Set[type]) -> Output:
        """See `fastvid.load.workers.clip_worker.Target`."""
        order = self._orders[row]
        memory = self._memory[order.offset :]
        if order.layout < 0:
            request = order.request
            assert request is not None
            size = Planes.nbytes(len(request.frames), request.box)
            return Planes.packed(memory[:size], len(request.frames), request.box)
        layout: RowLayout = self._known[order.layout]
        return Rgb(memory[: layout.nbytes].reshape(layout.levels_shape) if layout.as_decoded else self._staged(layout))

    def _begin(self, number: int) -> bool:
        self._place[Place.TASK] = number
        self._place[Place.STEPS] += 1
        # In C, so that it also ends a loop that never lets go of the interpreter.
        faulthandler.dump_traceback_later(self._seconds, exit=True)
        return not self._place[Place.STOP]

    def _source(self, number: int, order: Order) -> Row | EncodedClip:
        if order.packets is not None:
            return order.packets
        shard = self._shards.get((order.storage, order.stem))
        if shard is None:
            self._begin(number)
            shard = self._shards[order.storage, order.stem] = Shard(self._known[order.storage], order.stem)
        row = (0, order.key, shard, order.row, order.sample, order.position)
        if order.request is None or order.info is None:
            return Row(*row)
        return Clip(*row, order.info, order.request, order.request.frames)

    def _staged(self, layout: RowLayout) -> UInt8Array:
        size = int(np.prod(layout.levels_shape))
        if len(self._levels) < size:
            self._levels = np.empty(size, dtype=np.uint8)
        return self._levels[:size].reshape(layout.levels_shape)

    def _fill(self, order: Order) -> None:
        """Converts what was decoded, where that is not the row itself."""
        layout: RowLayout | None = None if order.layout < 0 else self._known[order.layout]
        if layout is not None and not layout.as_decoded:
            layout.fill(layout.view(self._memory[order.offset :][: layout.nbytes]), self._staged(layout))


def _trace(error: Exception) -> str:
    return "".join(traceback.format_exception(error))


def main() -> None:
    """Serves the parent at the other end of the socket until it closes.

    Arguments: descriptors of the socket and of the shared memory, then what `Serving` takes. The first message is the
    back-end.
    """
    # Ctrl-C reaches every process of the terminal; the parent ends its workers itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    (socket_, memory, size, place), seconds = map(int, sys.argv[1:5]), float(sys.argv[5])
    with socket.socket(fileno=socket_) as parent, parent.makefile("rb") as messages:
        try:
            backend = _hear(messages)
            try:
                serving = Serving(backend, memory, size, place, seconds)
            except Exception as error:  # noqa: BLE001 - the parent decides
                parent.sendall(Answer([Made(0, error, None, None)], Counters()).to_bytes())
                return
            parent.sendall(Answer([Made(0, None, None, None)], Counters()).to_bytes())
            while True:
                message = _hear(messages)
                if isinstance(message, list):
                    parent.sendall(serving.serve([Order(*order) for order in message]).to_bytes())
                else:
                    serving.learn(message)
        except (EOFError, ConnectionError, pickle.UnpicklingError):
            return  # the parent is gone, perhaps in the middle of a message


def _hear(messages: IO[bytes]) -> Any:
    return pickle.load(messages)  # noqa: S301 - of the process that started this one
