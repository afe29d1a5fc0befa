"""The worker process of `fastvid.load.workers.processes`: a `ClipWorker` that writes into shared memory.

Messages from the parent are pickled. The worker reads untrusted files, so its answers are plain data
(`fastvid.runtime.processes`) that the parent checks.
"""

from __future__ import annotations

import faulthandler
import mmap
import pickle
import signal
import socket
import sys
import traceback
from collections.abc import Mapping, Sequence, Set
from enum import IntEnum
from typing import IO, Any, Final, NamedTuple

import numpy as np

from fastvid.decode.backends import Backend
from fastvid.decode.request import ClipRequest, DecoderOutput, EncodedClip, packed, packed_size
from fastvid.decode.sound import AudioWindow, EncodedAudio
from fastvid.errors import FastvidError, FormatError, error_from_json, error_to_json
from fastvid.format.dataset import OpenShards
from fastvid.format.shard import ShardFolder
from fastvid.load.clips.plan import ClipPlace, SoundTask
from fastvid.load.memory import RgbRow, RowLayout
from fastvid.load.stats import Counters
from fastvid.load.workers.clip_worker import ClipWorker, Row
from fastvid.runtime.processes import pack

_ORPHAN_SECONDS: Final = 30.0
"""How many seconds longer than the parent's clip timeout a hung worker lives: it must end even if the parent died."""


class Status(IntEnum):
    """Fields of the int64 array in shared memory that parent and worker use while the worker is busy."""

    STEPS = 0
    """Grows when the worker begins to read or decode a row; written by the worker. While it grows, nothing hangs."""
    TASK = 1
    """Index of the row being processed; written by the worker."""
    STOP = 2
    """1 if the remaining rows are no longer needed; written by the parent."""


STATUS_BYTES: Final = 8 * len(Status)


class RowOrder(NamedTuple):
    """A message that orders one row. Sent as a plain tuple, which takes a tenth of the time with cold CPU caches."""

    offset: int  # byte in the shared memory where the row begins
    layout: int  # number of the row's layout; -1 to write planes
    request: ClipRequest  # frames and crop to decode
    # For each sound of the clip: byte offsets in the shared memory of its samples, float32 [C, S], and of its mask,
    # bool [S]; C; S; its window in time; its packets; and whether these were read already.
    sounds: Sequence[tuple[int, int, int, int, AudioWindow, EncodedAudio | None, bool]]
    packets: EncodedClip | None  # None if the worker must read them, from the place below
    # Number of the shard's folder, the shard's stem and hash, row of the sample in it, stream and key.
    folder: int = 0
    stem: str = ""
    tar_sha256: str = ""
    row: int = 0
    stream: str = ""
    key: str = ""


class Answer(NamedTuple):
    """The results of the rows of one message."""

    made: list[tuple[int, Exception | None]]  # index of each row that was processed, and its error or None
    costs: Counters

    def to_bytes(self) -> bytes:
        """Return the answer as one message of plain data, see `fastvid.runtime.processes`."""
        made = []
        for number, error in self.made:
            is_bug = error is not None and not isinstance(error, FastvidError)
            trace = "".join(traceback.format_exception(error)) if is_bug else ""
            made.append((number, error and error_to_json(error), trace))
        return pack({"made": made, "costs": self.costs.sums()})

    @classmethod
    def from_header(cls, header: Mapping[str, Any], count: int, pid: int) -> Answer:
        """Parse and check a message of `to_bytes`; `count`: number of rows that were ordered."""
        try:
            made = dict[int, Exception | None]()
            for number, record, trace in header["made"]:
                if number in made or number not in range(count):
                    raise FormatError(f"order {number} of {count}")
                error = error_from_json(record) if record else None
                if error is not None and not isinstance(error, FastvidError):
                    error.add_note(f"in worker process {pid}:\n{trace}")
                made[number] = error
            if not all(isinstance(cost, int | float) for cost in header["costs"]):
                raise FormatError("costs are not numbers")
            return cls(list(made.items()), Counters.of(header["costs"]))
        except (KeyError, TypeError, ValueError) as error:
            raise FormatError(f"cannot parse an answer: {error!r}") from error


class WorkerState:
    """State of a worker process. Also the `Target` of the rows of a message, and the `Watch` that the parent reads.

    `memory`, `size`: descriptor and bytes of the shared memory. `status`: byte offset of `Status` in it.
    """

    def __init__(self, backend: Backend, memory: int, size: int, status: int, clip_seconds: float) -> None:
        self._memory = np.frombuffer(mmap.mmap(memory, size), dtype=np.uint8)
        self._status = self._memory[status:][:STATUS_BYTES].view(np.int64)
        self._seconds = clip_seconds + _ORPHAN_SECONDS
        # One clip at a time, so that the parent knows which clip hangs.
        self._worker = ClipWorker(backend.open(), max_clips=1)
        self._known: list[Any] = []
        self._shards = OpenShards()
        self._orders: Sequence[RowOrder] = ()
        self.packets: dict[int, EncodedClip] = {}
        self.sounds: dict[int, Sequence[SoundTask]] = {}

    def learn(self, thing: ShardFolder | RowLayout) -> None:
        """Store a folder of shards or a layout; rows refer to it by the number of those stored before it."""
        self._known.append(thing)

    def serve(self, orders: Sequence[RowOrder]) -> Answer:
        """Make the clips of one message in the shared memory."""
        self._orders, answer = orders, Answer([], Counters())
        self.packets = {row: order.packets for row, order in enumerate(orders) if order.packets is not None}
        self.sounds = {
            row: [self._sound(*one) for one in order.sounds] for row, order in enumerate(orders) if order.sounds
        }

        def done(row: Row, error: Exception | None, cost: Counters) -> None:
            answer.made.append((row.row, error))
            answer.costs.add(cost)

        self._worker.make([Row(self, row) for row in range(len(orders))], self, done)
        faulthandler.cancel_dump_traceback_later()
        answer.costs.take_traffic()
        return answer

    def place(self, row: int) -> ClipPlace:
        """See `fastvid.load.workers.clip_worker.Target`."""
        order = self._orders[row]
        folder: ShardFolder = self._known[order.folder]
        shard = self._shards.get(
            (order.folder, order.stem), lambda whole: folder.open(order.stem, order.tar_sha256, whole=whole)
        )
        return ClipPlace(shard, order.row, order.stream, order.key)

    def request(self, row: int) -> ClipRequest:
        """See `fastvid.load.workers.clip_worker.Target`."""
        return self._orders[row].request

    def keep(self, row: int, clip: EncodedClip, cost: Counters) -> None:
        """Drop them: the batch is in the training process, which still has the packets that it sent."""

    def output(self, row: int, _kinds: Set[type]) -> DecoderOutput | RgbRow:
        """See `fastvid.load.workers.clip_worker.Target`."""
        order = self._orders[row]
        memory = self._memory[order.offset :]
        if order.layout < 0:
            return packed(memory[: packed_size(order.request)], order.request)
        layout: RowLayout = self._known[order.layout]
        return RgbRow(layout, memory[: layout.nbytes])

    @property
    def rows(self) -> Sequence[Row]:
        """See `Watch`. Setting it tells the parent which clip is being processed, in case the worker hangs."""
        return ()

    @rows.setter
    def rows(self, rows: Sequence[Row]) -> None:
        self._status[Status.TASK] = rows[0].row
        self._status[Status.STEPS] += 1
        # Ends this process if the clip takes too long. Implemented in C, so it works even if the GIL is never released.
        faulthandler.dump_traceback_later(self._seconds, exit=True)

    @property
    def is_over(self) -> bool:
        """See `Watch`."""
        return bool(self._status[Status.STOP])

    def _sound(self, offset: int, mask: int, channels: int, samples: int, *rest: Any) -> SoundTask:
        window, packets, is_read = rest
        data = self._memory[offset:][: 4 * channels * samples].view(np.float32).reshape(channels, samples)
        return SoundTask(window, data, self._memory[mask:][:samples].view(np.bool_), packets, is_read)


def main() -> None:
    """Process the parent's messages until it closes the socket.

    Arguments: descriptors of the socket and of the shared memory, then the last three of `WorkerState`. The first
    message is the back-end; each later one is a folder of shards, a layout, or a list of rows to make.
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
                parent.sendall(Answer([(0, error)], Counters()).to_bytes())
                return
            parent.sendall(Answer([(0, None)], Counters()).to_bytes())
            while True:
                message = _receive(messages)
                if isinstance(message, list):
                    parent.sendall(state.serve([RowOrder(*order) for order in message]).to_bytes())
                else:
                    state.learn(message)
        except (EOFError, ConnectionError, pickle.UnpicklingError):
            return  # the parent is gone, perhaps in the middle of a message


def _receive(messages: IO[bytes]) -> Any:
    return pickle.load(messages)  # noqa: S301 - from the process that started this one
