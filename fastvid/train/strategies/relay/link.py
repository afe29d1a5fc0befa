"""A line between the hub and one stage: a process group of two, so that a death ends one line and no other.

A message is two lengths (int64 [2]: its JSON head, its body), then both as bytes. Lengths of zero are a beat, which a
side sends while it has nothing to say: whoever hears nothing for `timeout_s` takes the other for dead, and a process
that was killed is noticed at once, because its socket closes.

Receiving blocks in a thread of its own: gloo's ``irecv(...).is_completed()`` never turns true by itself (torch 2.13).
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed import ProcessGroupGloo
from torch.distributed.distributed_c10d import PrefixStore, Store

from fastvid.errors import WorkerError

_SEATS: Final = "relay/seats"
_BEATS: Final = 4  # beats in the time after which silence means death


@dataclass(frozen=True, slots=True)
class Message:
    """What one side tells the other.

    Attributes:
        kind: "own", "unit" and "end" from the hub; "ready", "done" and "failed" from a stage.
        values: JSON values.
        body: A token, or nothing.
    """

    kind: str
    values: dict[str, Any] = field(default_factory=dict)
    body: bytes = b""


class Link:
    """One side of a line.

    Args:
        store: Where hub and stages meet.
        seat: Number of the line.
        side: 0 for the hub, 1 for the stage.
        timeout_s: Silence that means death, and the longest wait for the other side to come.

    Raises:
        WorkerError: The other side did not come.
    """

    def __init__(self, store: Store, seat: int, side: int, timeout_s: float) -> None:
        self.seat, self.timeout_s = seat, timeout_s
        self._other = 1 - side
        self._lock = threading.Lock()
        # A store serves one call at a time, and this one waits: for a stage that died it would hold up all others.
        # Any: torch's stubs leave out clone, send and recv.
        own: Any = store
        with self._translated("did not come"):
            self._group: Any = ProcessGroupGloo(
                PrefixStore(f"relay/line/{seat}", own.clone()), side, 2, timedelta(seconds=timeout_s)
            )  # fmt: skip

    @property
    def beat_s(self) -> float:
        """Seconds between two beats."""
        return self.timeout_s / _BEATS

    def send(self, message: Message) -> None:
        """Blocks until the message is handed to the network.

        Raises:
            WorkerError: The other side is dead.
        """
        head = json.dumps([message.kind, message.values]).encode()
        self._send(torch.tensor([len(head), len(message.body)]), head + message.body)

    def beat(self) -> None:
        """Says that this side lives. Raises as `send` does."""
        self._send(torch.tensor([0, 0]), b"")

    def receive(self) -> Message:
        """The next message; beats are passed over.

        Raises:
            WorkerError: The other side is dead.
        """
        with self._translated("is gone"):
            while True:
                lengths = torch.zeros(2, dtype=torch.int64)
                self._group.recv([lengths], self._other, 0).wait()
                head, body = lengths.tolist()
                if head:
                    break
            data = torch.empty(head + body, dtype=torch.uint8)
            self._group.recv([data], self._other, 0).wait()
        text = data.numpy()
        kind, values = json.loads(text[:head].tobytes())
        return Message(kind, values, text[head:].tobytes())

    @contextlib.contextmanager
    def beating(self) -> Iterator[None]:
        """Beats from a thread while this one works."""
        over = threading.Event()

        def beats() -> None:
            # Who is dead is found out by the next message.
            with contextlib.suppress(WorkerError):
                while not over.wait(self.beat_s):
                    self.beat()

        thread = threading.Thread(target=beats, name=f"relay-beat-{self.seat}", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _send(self, lengths: Tensor, data: bytes) -> None:
        with self._lock, self._translated("is gone"):
            self._group.send([lengths], self._other, 0).wait()
            if data:
                # bytearray: torch refuses read-only memory without a warning.
                self._group.send([torch.frombuffer(bytearray(data), dtype=torch.uint8)], self._other, 0).wait()

    @contextlib.contextmanager
    def _translated(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            name = "stage" if self._other else "hub"
            raise WorkerError(f"the {name} on line {self.seat} {what}: {error}") from error


def take_seat(store: Store) -> int:
    """A line number for a stage that comes; the hub finds it by `num_seats`."""
    return int(store.add(_SEATS, 1)) - 1


def num_seats(store: Store) -> int:
    """Seats taken so far."""
    return int(store.add(_SEATS, 0))
