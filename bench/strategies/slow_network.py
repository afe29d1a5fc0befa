"""Simulate a slow network by delaying a process' communication, in real or in counted time.

Within a process group all-reduces and all-to-alls are delayed: a message takes the latency once, which is the least
that any algorithm needs, and its bytes at the rate of a rank's link, in the number that a ring sends. For a client of a
parameter server or a stage of a relay each message is delayed, in both directions, except on rank 0, which is on the
machine of the server or hub.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fastvid.runtime.arrays import FloatArray


@dataclass(frozen=True)
class SlowLink:
    """Simulated cost of messages, in addition to their real cost."""

    delay_s: float = 0.0  # delay before each message, in seconds
    bytes_per_s: float = 0.0

    def seconds(self, size: int, ranks: int) -> float:
        """Return the seconds of a ring all-reduce of `size` bytes."""
        return self.message_s(ring_bytes(size, ranks))

    def message_s(self, size: float) -> float:
        """Return the seconds of one message of `size` bytes."""
        return self.delay_s + (size / self.bytes_per_s if self.bytes_per_s else 0.0)


def ring_bytes(size: int, ranks: int) -> float:
    """Return the bytes that each rank sends in a ring all-reduce of `size` bytes: 2 (P - 1) / P of them."""
    return 2 * (ranks - 1) / ranks * size


class WallClock:
    """Real time on one network: what takes time sleeps. Times are float64 [1], in seconds."""

    def now(self) -> FloatArray:
        """Return the time."""
        return np.array([time.perf_counter()])

    def meet(self, group: Any) -> FloatArray:  # noqa: ARG002
        """Return the time at which a collective operation starts."""
        return self.now()

    def wait_until(self, moment: FloatArray) -> None:
        """Wait until a time."""
        time.sleep(max(0.0, float((moment - self.now()).max())))


class CountedClock:
    """Counted time: what takes time adds to a sum, so that neither the machine's load nor its speed matters.

    Valid if all ranks take part in each message, because their clocks are compared only there. A run then does the same
    on every network, so one run counts the time on several: times are float64 [networks], in seconds.
    """

    def __init__(self, networks: int) -> None:
        import torch.distributed as dist

        self._plain, self._largest = dist.all_reduce, dist.ReduceOp.MAX
        self._now = np.zeros(networks)
        self._lock = threading.Lock()  # a transfer may end in another thread

    def now(self) -> FloatArray:
        """Return the counted time."""
        return self._now

    def meet(self, group: Any) -> FloatArray:
        """Return the time of the rank that comes last to a collective operation."""
        import torch

        latest = torch.tensor(self._now)
        self._plain(latest, op=self._largest, group=group)
        return latest.numpy()

    def wait_until(self, moment: FloatArray) -> None:
        """Count the time until a moment."""
        with self._lock:
            self._now = np.maximum(self._now, moment)


Clock = WallClock | CountedClock


class SlowNetwork:
    """Delays this process' communication inside a ``with`` block.

    `bytes`: bytes in them, as the strategy hands them over. `wire_bytes`: bytes that this rank sends in them, by
    the ring.
    """

    def __init__(self, links: Sequence[SlowLink], clock: Clock, *, far: bool) -> None:
        self._links, self._clock, self._far = links, clock, far
        self._free_at = np.zeros(len(links))
        self._delay = np.array([link.delay_s for link in links])
        self._undo = contextlib.ExitStack()
        self.messages = self.bytes = 0
        self.wire_bytes = 0.0

    def __enter__(self) -> SlowNetwork:
        import torch.distributed as dist

        from fastvid.train.strategies import link

        self._all_reduce, self._all_to_all = dist.all_reduce, dist.all_to_all_single
        self._undo.enter_context(_replaced(dist, "all_reduce", self._slow_all_reduce))
        self._undo.enter_context(_replaced(dist, "all_to_all_single", self._slow_all_to_all))
        if self._far:
            self._send, self._receive = link.Link.send, link.Link.receive
            self._undo.enter_context(_replaced(link.Link, "send", self._slow_send))
            self._undo.enter_context(_replaced(link.Link, "receive", self._slow_receive))
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    # Not bound to this object: it replaces a method of the link.
    @property
    def _slow_send(self) -> Callable[..., None]:
        def send(link: Any, kind: str, values: Any = None, payload: Any = b"", checksum: int | None = None) -> None:
            if kind:  # a heartbeat delays nothing
                self._take(kind, values, payload)
            self._send(link, kind, values, payload, checksum)

        return send

    @property
    def _slow_receive(self) -> Callable[..., Any]:
        def receive(link: Any, *args: Any) -> Any:
            message = self._receive(link, *args)
            self._take(message.kind, message.values, message.payload)
            return message

        return receive

    def _take(self, kind: str, values: Any, payload: Any) -> None:
        from fastvid.train.strategies.link import encode

        text = json.dumps([kind, dict(values or {})]).encode()
        carried = 0 if payload is None else len(payload) if isinstance(payload, bytes) else payload.nbytes
        size = len(encode(text)) + carried
        self._count(size, size)
        self._clock.wait_until(self._clock.now() + self._seconds(size))

    def _slow_all_reduce(
        self, tensor: Any, *args: Any, group: Any = None, async_op: bool = False, **kwargs: Any
    ) -> Any:
        import torch.distributed as dist

        size = tensor.numel() * tensor.element_size()
        late = self._delayed(size, ring_bytes(size, dist.get_world_size(group)), group)
        late.work = self._all_reduce(tensor, *args, group=group, async_op=True, **kwargs)
        return late if async_op else late.wait()

    def _slow_all_to_all(
        self, output: Any, tensor: Any, *args: Any, group: Any = None, async_op: bool = False, **kwargs: Any
    ) -> Any:
        import torch.distributed as dist

        size, ranks = tensor.numel() * tensor.element_size(), dist.get_world_size(group)
        # What a rank sends to itself stays there.
        late = self._delayed(size, (ranks - 1) / ranks * size, group)
        late.work = self._all_to_all(output, tensor, *args, group=group, async_op=True, **kwargs)
        return late if async_op else late.wait()

    def _delayed(self, size: int, wire: float, group: Any) -> _DelayedWork:
        self._count(size, wire)
        # Latencies of messages overlap; their bytes share the link's bandwidth.
        self._free_at = np.maximum(self._clock.meet(group), self._free_at) + self._seconds(wire) - self._delay
        return _DelayedWork(self._clock, self._free_at + self._delay)

    def _count(self, size: int, wire: float) -> None:
        self.messages += 1
        self.bytes += size
        self.wire_bytes += wire

    def _seconds(self, size: float) -> FloatArray:
        return np.array([link.message_s(size) for link in self._links])


@dataclass
class _DelayedWork:
    clock: Clock
    ready: FloatArray
    work: Any = None

    def wait(self) -> bool:
        self.work.wait()
        self.clock.wait_until(self.ready)
        return True


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
