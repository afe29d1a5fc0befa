"""Simulate a slow network by delaying a process' communication, in real or in counted time.

Within a process group all-reduces and all-gathers are delayed: a message takes the latency once, and its bytes at the
rate of a rank's link, in the number that a ring sends. For a client of a parameter server or a stage of a relay each
message is delayed, in both directions, except on rank 0, which is on the machine of the server or hub.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class SlowLink:
    """Simulated cost of messages, in addition to their real cost.

    Attributes:
        delay_s: Delay before each message, in seconds.
        bytes_per_s: Bandwidth of each rank's link; 0 is unlimited.
    """

    delay_s: float = 0.0
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
    """Real time: what takes time sleeps."""

    def now(self) -> float:
        """Return the time in seconds."""
        return time.perf_counter()

    def meet(self, group: Any) -> float:  # noqa: ARG002
        """Return the time at which a collective operation starts."""
        return self.now()

    def wait_until(self, moment: float) -> None:
        """Wait until a time."""
        time.sleep(max(0.0, moment - self.now()))


class CountedClock:
    """Counted time: what takes time adds to a sum, so that neither the machine's load nor its speed matters.

    Valid if all ranks take part in each operation, because their clocks are compared only there.
    """

    def __init__(self) -> None:
        import torch.distributed as dist

        self._plain, self._largest = dist.all_reduce, dist.ReduceOp.MAX
        self._now = 0.0
        self._lock = threading.Lock()  # a transfer may end in another thread

    def now(self) -> float:
        """Return the counted seconds."""
        return self._now

    def meet(self, group: Any) -> float:
        """Return the time of the rank that comes last to a collective operation."""
        import torch

        latest = torch.tensor([self._now], dtype=torch.float64)
        self._plain(latest, op=self._largest, group=group)
        return float(latest)

    def wait_until(self, moment: float) -> None:
        """Count the time until a moment."""
        with self._lock:
            self._now = max(self._now, moment)


Clock = WallClock | CountedClock


class SlowNetwork:
    """Delays this process' communication inside a ``with`` block.

    Args:
        link: The simulated network.
        clock: Where the delays pass.
        far: Whether this process reaches servers and hubs over the network.

    Attributes:
        messages: Number of collective operations and, if `far`, of messages to and from a server or hub.
        bytes: Bytes in them, as the strategy hands them over.
        wire_bytes: Bytes that this rank sends in them, by the ring.
    """

    def __init__(self, link: SlowLink, clock: Clock, *, far: bool) -> None:
        self._link, self._clock, self._far = link, clock, far
        self._free_at = 0.0
        self._undo = contextlib.ExitStack()
        self.messages = self.bytes = 0
        self.wire_bytes = 0.0

    def __enter__(self) -> SlowNetwork:
        import torch.distributed as dist

        from fastvid.train.strategies.shared import link

        self._plain = dist.all_reduce
        self._undo.enter_context(_replaced(dist, "all_reduce", self._all_reduce))
        for name in ("all_gather_into_tensor", "all_gather"):
            self._undo.enter_context(_replaced(dist, name, self._gathering(getattr(dist, name))))
        if self._far:
            self._send, self._receive = link.Link.send, link.Link.receive
            self._header_bytes = 8 * (link.WORDS + 4)
            self._undo.enter_context(_replaced(link.Link, "send", self._slow_send))
            self._undo.enter_context(_replaced(link.Link, "receive", self._slow_receive))
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    # Not bound to this object: it replaces a method of the link.
    @property
    def _slow_send(self) -> Callable[..., None]:
        def send(link: Any, words: Any, payload: Any = None, checksum: int | None = None) -> None:
            self._take(payload)
            self._send(link, words, payload, checksum)

        return send

    @property
    def _slow_receive(self) -> Callable[..., Any]:
        def receive(link: Any, *args: Any) -> Any:
            words, payload = self._receive(link, *args)
            self._take(payload)
            return words, payload

        return receive

    def _take(self, payload: Any) -> None:
        size = self._header_bytes + (0 if payload is None else payload.nbytes)
        self.messages += 1
        self.bytes += size
        self.wire_bytes += size
        self._clock.wait_until(self._clock.now() + self._link.message_s(size))

    def _all_reduce(self, tensor: Any, *args: Any, async_op: bool = False, **kwargs: Any) -> Any:
        group = kwargs.get("group")
        late = self._delayed(tensor, group, lambda size, ranks: ring_bytes(size, ranks))
        late.work = self._plain(tensor, *args, async_op=True, **kwargs)
        return late if async_op else late.wait()

    def _gathering(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def gather(output: Any, tensor: Any, *args: Any, async_op: bool = False, **kwargs: Any) -> Any:
            # Each rank passes on every message except its successor's.
            late = self._delayed(tensor, kwargs.get("group"), lambda size, ranks: float((ranks - 1) * size))
            late.work = plain(output, tensor, *args, async_op=True, **kwargs)
            return late if async_op else late.wait()

        return gather

    def _delayed(self, tensor: Any, group: Any, sent: Callable[[int, int], float]) -> _DelayedWork:
        import torch.distributed as dist

        size = tensor.numel() * tensor.element_size()
        wire = sent(size, dist.get_world_size(group))
        self.messages += 1
        self.bytes += size
        self.wire_bytes += wire
        # Latencies of messages overlap; their bytes share the link's bandwidth.
        busy = self._link.message_s(wire) - self._link.delay_s
        self._free_at = max(self._clock.meet(group), self._free_at) + busy
        return _DelayedWork(self._clock, self._free_at + self._link.delay_s)


@dataclass
class _DelayedWork:
    clock: Clock
    ready: float
    work: Any = None

    def wait(self) -> bool:
        self.work.wait()
        self.clock.wait_until(self.ready)
        return True

    def is_completed(self) -> bool:
        return bool(self.work.is_completed()) and self.clock.now() >= self.ready


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
