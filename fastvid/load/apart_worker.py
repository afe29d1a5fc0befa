"""The worker's end of `fastvid.load.apart`: fetches and decodes what it is asked for into its slot."""

from __future__ import annotations

import faulthandler
import mmap
import signal
import sys
import time
import traceback
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from fastvid.decode.backends import Backend
from fastvid.decode.clips import Scratch
from fastvid.decode.request import ClipRequest, Decoder, EncodedClip, IntArray, Output, Planes, Rgb
from fastvid.format.packets import StreamInfo
from fastvid.format.shard import Shard
from fastvid.load.fetch import fetch
from fastvid.load.stats import Counters
from fastvid.storage import Storage

_ORPHAN_SECONDS: Final = 30.0
"""How much longer than its parent would wait a worker that hangs lives on, should the parent have died."""

_Shape = tuple[int, ...] | None
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Hello:
    """The first message: what to decode with, and how long a clip may take, in seconds."""

    backend: Backend
    clip_seconds: float


@dataclass(frozen=True, slots=True, eq=False)
class Packets:
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

    def clip(self, task: Task) -> EncodedClip:
        """The clip again."""
        data = memoryview(self.data)
        parts = (data, self.starts, self.sizes, self.shows, self.keys)
        return EncodedClip(task.request, task.info, *parts, key=task.key, shard=task.stem)


@dataclass(frozen=True, slots=True)
class Task:
    """One clip.

    Attributes:
        stem: Its shard.
        row: Its sample's row there.
        request: What is wanted.
        info: Its stream.
        key: Its sample's key, for messages.
        shape: Of RGB pictures; None for planes.
        slot_bytes: Size of the slot.
        packets: What it is decoded from, where the parent has read it; None lets the worker read.
    """

    stem: str
    row: int
    request: ClipRequest
    info: StreamInfo
    key: str
    shape: _Shape
    slot_bytes: int
    packets: Packets | None


@dataclass(slots=True)
class Answer:
    """What came of it.

    Attributes:
        error: What went wrong.
        trace: Where in the worker, for errors that are nobody's clip's.
        counters: What it cost.
    """

    error: Exception | None = None
    trace: str = ""
    counters: Counters = field(default_factory=Counters)


def layout(request: ClipRequest, *, planes: bool) -> tuple[_Shape, int]:
    """How a clip lies in a slot: the shape of RGB pictures, None for planes; and its bytes."""
    if planes:
        return None, Planes.nbytes(len(request.frames), request.box)
    shape = (3, len(request.frames), *request.size)
    return shape, int(np.prod(shape))


class Serving:
    """A worker's state.

    Args:
        slot: File descriptor of the slot.
        hello: What the parent said first.
    """

    def __init__(self, slot: int, hello: Hello) -> None:
        self._slot, self._memory = slot, memoryview(b"")
        self._decoder: Decoder = hello.backend.open()
        self._scratch = Scratch()
        self._storages: list[Storage] = []
        self._shards: dict[tuple[int, str], Shard] = {}

    def add(self, storage: Storage) -> None:
        """Knows one storage more."""
        self._storages.append(storage)

    def serve(self, storage: int, task: Task) -> Answer:
        """Decodes a clip into the slot."""
        answer = Answer()
        begun = time.perf_counter()
        try:
            if task.packets is not None:
                clip = task.packets.clip(task)
            else:
                clip = self._fetch(storage, task, answer.counters)
                answer.counters.fetch_seconds = time.perf_counter() - begun
            fetched = time.perf_counter()
            (answer.error,) = self._decoder.decode([clip], [self._output(task)])
            answer.counters.decode_seconds = time.perf_counter() - fetched
            answer.counters.clips = int(answer.error is None)
        except Exception as error:  # noqa: BLE001 - the parent decides
            answer.error, answer.trace = error, traceback.format_exc()
        return answer

    def _fetch(self, storage: int, task: Task, counters: Counters) -> EncodedClip:
        shard = self._shards.get((storage, task.stem))
        if shard is None:
            shard = self._shards[storage, task.stem] = Shard(self._storages[storage], task.stem)
        got = fetch(shard, task.row, task.request, key=task.key, info=task.info, scratch=self._scratch)
        counters.count(got)
        return got.clip

    def _output(self, task: Task) -> Output:
        if len(self._memory) < task.slot_bytes:
            self._memory = memoryview(mmap.mmap(self._slot, task.slot_bytes))
        _, size = layout(task.request, planes=task.shape is None)
        slot = np.frombuffer(self._memory, dtype=np.uint8, count=size)
        if task.shape is None:
            return Planes.packed(slot, len(task.request.frames), task.request.box)
        return Rgb(slot.reshape(task.shape))


def main() -> None:
    """Serves the parent at the other end of the socket until it closes."""
    # Ctrl-C reaches every process of the terminal; the parent ends its workers itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection: Connection[Any, Any] = Connection(int(sys.argv[1]))
    serving: Serving | None = None
    seconds = 0.0
    try:
        while True:
            number, message = connection.recv()
            if isinstance(message, Hello):
                answer, seconds = Answer(), message.clip_seconds + _ORPHAN_SECONDS
                try:
                    serving = Serving(int(sys.argv[2]), message)
                except Exception as error:  # noqa: BLE001 - the parent decides
                    answer = Answer(error, traceback.format_exc())
                connection.send(answer)
            elif isinstance(message, Task):
                assert serving is not None
                # In C, so that it also ends a loop that never lets go of the interpreter.
                faulthandler.dump_traceback_later(seconds, exit=True)
                answer = serving.serve(number, message)
                faulthandler.cancel_dump_traceback_later()
                connection.send(answer)
            else:
                assert serving is not None
                serving.add(message)
    except (EOFError, ConnectionError):
        return
