"""The worker process of `fastvid.load.workers.processes`: a `ClipWorker` that writes into shared memory.

Messages from the parent are pickled. The worker reads untrusted files, so its answers are plain data
(`fastvid.runtime.processes`) that the parent checks.
"""

from __future__ import annotations

import faulthandler
import math
import mmap
import pickle
import signal
import socket
import sys
import time
import traceback
from collections.abc import Mapping, Sequence, Set
from enum import IntEnum
from functools import partial
from typing import IO, Any, Final, NamedTuple

import numpy as np

from fastvid.decode.backends import Backend
from fastvid.decode.request import ClipRequest, DecoderOutput, EncodedClip, Rgb, packed, packed_size
from fastvid.decode.sound import AudioWindow, EncodedAudio
from fastvid.errors import FastvidError, FormatError, error_from_json, error_to_json
from fastvid.format.packets import StreamInfo
from fastvid.format.shard import OpenShards, Shard, ShardFolder
from fastvid.load.clips.clip import BatchRow, Clip
from fastvid.load.clips.plan import ClipPlanner, SoundTask
from fastvid.load.memory import RowLayout
from fastvid.load.order.epoch import ClipShape
from fastvid.load.workers.clip_worker import ClipResult, ClipTask, ClipWorker
from fastvid.load.workers.stats import Counters
from fastvid.runtime.arrays import UInt8Array
from fastvid.runtime.processes import pack

_ORPHAN_SECONDS: Final = 30.0
"""How much longer than the parent's timeout a hung worker lives, in case the parent has died."""


class Status(IntEnum):
    """Fields of the int64 array in shared memory that parent and worker use while the worker is busy."""

    STEPS = 0
    """Steps begun since the worker started; written by the worker. While it grows, the worker is not hung."""
    TASK = 1
    """Number of the order being processed; written by the worker."""
    STOP = 2
    """1 if the remaining orders are no longer needed; written by the parent."""


STATUS_BYTES: Final = 8 * len(Status)


class SoundOrder(NamedTuple):
    """The sound of one row of a batch, sent with the order of its clip."""

    offset: int  # offset of the samples, float32 [C, S], in the shared memory
    mask: int  # offset of the mask, bool [S]
    channels: int
    samples: int
    window: AudioWindow  # which samples to make
    packets: EncodedAudio | None


class ClipOrder(NamedTuple):
    """One clip to make. Sent as a plain tuple, which takes a tenth of the time when CPU caches are cold."""

    offset: int
    layout: int
    stem: str = ""
    row: int = 0  # row of the sample in the shard
    key: str = ""
    sample: int = 0
    position: int = 0
    folder: int = 0
    tar_sha256: str = ""
    request: ClipRequest | None = None  # frames and crop to decode; None if the worker plans the clip
    info: StreamInfo | None = None
    packets: EncodedClip | None = None
    shape: ClipShape | None = None
    sounds: Sequence[SoundOrder] = ()  # the sounds of the rows that the clip becomes
    anchor: int | None = None  # frame of the video that the row is about, if the worker plans the clip; None for none


class Answer(NamedTuple):
    """The results of some orders."""

    made: list[ClipResult]
    costs: Counters

    def to_bytes(self) -> bytes:
        """Return one message, see `fastvid.runtime.processes`."""
        made, blobs = [], []
        for number, error, frames, _ in self.made:
            trace = "" if error is None or isinstance(error, FastvidError) else _trace(error)
            made.append((number, 0 if frames is None else len(frames), error and error_to_json(error), trace))
            blobs += [] if frames is None else [frames.tobytes()]
        return pack({"made": made, "costs": self.costs.sums()}, *blobs)

    @classmethod
    def from_parts(cls, header: Mapping[str, Any], blobs: memoryview, frames: Sequence[int], pid: int) -> Answer:
        """Parse and check the result of `to_bytes`.

        `frames`: for each order, how many frames the worker plans.
        """
        try:
            made, start = dict[int, ClipResult](), 0
            for number, count, record, trace in header["made"]:
                if number in made or number not in range(len(frames)) or count != (0 if record else frames[number]):
                    raise FormatError(f"order {number} of {len(frames)} has {count} frames")
                error = error_from_json(record) if record else None
                if error is not None and not isinstance(error, FastvidError):
                    error.add_note(f"in worker process {pid}:\n{trace}")
                shown = np.frombuffer(blobs, dtype=np.int64, count=count, offset=8 * start) if count else None
                made[number], start = ClipResult(number, error, shown, None), start + count
            if not all(isinstance(cost, int | float) for cost in header["costs"]):
                raise FormatError("costs are not numbers")
            return cls(list(made.values()), Counters.of(header["costs"]))
        except (KeyError, TypeError, ValueError) as error:
            raise FormatError(f"cannot parse an answer: {error!r}") from error


class WorkerState:
    """State of a worker process; also the `Target` of its tasks.

    `size`: size of the shared memory in bytes.
    """

    def __init__(self, backend: Backend, memory: int, size: int, status: int, clip_seconds: float) -> None:
        self._memory = np.frombuffer(mmap.mmap(memory, size), dtype=np.uint8)
        self._status = self._memory[status:][:STATUS_BYTES].view(np.int64)
        self._seconds = clip_seconds + _ORPHAN_SECONDS
        # One clip at a time, so that the parent knows which clip hangs.
        self._worker = ClipWorker(backend.open(), max_clips=1)
        self._known: list[Any] = []
        self._shards = OpenShards()
        self._planner: ClipPlanner | None = None
        self._levels = np.empty(0, dtype=np.uint8)
        self._orders: Sequence[ClipOrder] = ()

    def learn(self, thing: ShardFolder | RowLayout | ClipPlanner) -> None:
        """Store a folder of shards or layout, which orders name by number, or replace the planner."""
        if isinstance(thing, ClipPlanner):
            self._planner = thing
        else:
            self._known.append(thing)

    def serve(self, orders: Sequence[ClipOrder]) -> Answer:
        """Make clips in the shared memory."""
        self._orders = orders
        tasks, done, costs = list[ClipTask](), list[ClipResult](), Counters()
        for number, order in enumerate(orders):
            try:
                source = self._source(number, order)
                tasks.append(ClipTask(number, source, self, sounds=[self._sound(one, source) for one in order.sounds]))
            except Exception as error:  # noqa: BLE001 - the parent handles it
                done.append(ClipResult(number, error, None, None))
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
        costs.take_traffic()
        return Answer(done, costs)

    def output(self, row: int, _kinds: Set[type]) -> DecoderOutput:
        """See `fastvid.load.workers.clip_worker.Target`."""
        order = self._orders[row]
        memory = self._memory[order.offset :]
        if order.layout < 0:
            request = order.request
            assert request is not None
            return packed(memory[: packed_size(request)], request)
        layout: RowLayout = self._known[order.layout]
        return Rgb(layout.decoded(memory[: layout.nbytes]) if layout.as_decoded else self._staged(layout))

    def _begin(self, number: int) -> bool:
        self._status[Status.TASK] = number
        self._status[Status.STEPS] += 1
        # Implemented in C, so it also ends a loop that never releases the GIL.
        faulthandler.dump_traceback_later(self._seconds, exit=True)
        return not self._status[Status.STOP]

    def _source(self, number: int, order: ClipOrder) -> BatchRow | EncodedClip:
        if order.packets is not None:
            return order.packets
        shard = self._shards.get((order.folder, order.stem), partial(self._open, number, order))
        row = (0, order.key, shard, order.row, order.sample, order.position)
        if order.request is None or order.info is None:
            return BatchRow(*row, shape=order.shape, anchor=order.anchor)
        return Clip(*row, order.info, order.request, order.request.frames)

    def _open(self, number: int, order: ClipOrder, whole: bool) -> Shard:
        self._begin(number)
        folder: ShardFolder = self._known[order.folder]
        return folder.open(order.stem, order.tar_sha256, whole=whole)

    def _sound(self, order: SoundOrder, clip: BatchRow | EncodedClip) -> SoundTask:
        size = 4 * order.channels * order.samples
        data = self._memory[order.offset :][:size].view(np.float32).reshape(order.channels, order.samples)
        mask = self._memory[order.mask :][: order.samples].view(np.bool_)
        return SoundTask(order.window, data, mask, order.packets if isinstance(clip, EncodedClip) else clip)

    def _staged(self, layout: RowLayout) -> UInt8Array:
        size = math.prod(layout.levels_shape)
        if len(self._levels) < size:
            self._levels = np.empty(size, dtype=np.uint8)
        return self._levels[:size].reshape(layout.levels_shape)

    def _fill(self, order: ClipOrder) -> None:
        """Convert the decoded values, unless the decoder wrote the row directly."""
        layout: RowLayout | None = None if order.layout < 0 else self._known[order.layout]
        if layout is not None and not layout.as_decoded:
            layout.fill(layout.view(self._memory[order.offset :][: layout.nbytes]), self._staged(layout))


def _trace(error: Exception) -> str:
    return "".join(traceback.format_exception(error))


def main() -> None:
    """Process the parent's messages until it closes the socket.

    Arguments: descriptors of the socket and of the shared memory, then those of `WorkerState`. The first message is the
    back-end.
    """
    # Ctrl-C reaches every process of the terminal; the parent stops its workers itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    (socket_, memory, size, status), seconds = map(int, sys.argv[1:5]), float(sys.argv[5])
    with socket.socket(fileno=socket_) as parent, parent.makefile("rb") as messages:
        try:
            backend = _receive(messages)
            try:
                state = WorkerState(backend, memory, size, status, seconds)
            except Exception as error:  # noqa: BLE001 - the parent handles it
                parent.sendall(Answer([ClipResult(0, error, None, None)], Counters()).to_bytes())
                return
            parent.sendall(Answer([ClipResult(0, None, None, None)], Counters()).to_bytes())
            while True:
                message = _receive(messages)
                if isinstance(message, list):
                    parent.sendall(state.serve([ClipOrder(*order) for order in message]).to_bytes())
                else:
                    state.learn(message)
        except (EOFError, ConnectionError, pickle.UnpicklingError):
            return  # the parent is gone, perhaps in the middle of a message


def _receive(messages: IO[bytes]) -> Any:
    return pickle.load(messages)  # noqa: S301 - from the process that started this one
