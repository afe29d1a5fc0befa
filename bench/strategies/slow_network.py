"""Simulate a slow network by delaying a process' communication.

Within a process group all-reduces and all-to-alls are delayed. For a client of a parameter server or a stage of a relay
each message is delayed, in both directions, except on rank 0, which is on the machine of the server or hub.
"""

from __future__ import annotations

import contextlib
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
        return self.message_s(int(2 * (ranks - 1) / ranks * size))

    def message_s(self, size: int) -> float:
        """Return the seconds of one message of `size` bytes."""
        return self.delay_s + (size / self.bytes_per_s if self.bytes_per_s else 0.0)


class SlowNetwork:
    """Delays this process' communication inside a ``with`` block.

    Args:
        link: The simulated network.
        ranks: World size of the process group.
        far: Whether this process reaches servers and hubs over the network.

    Attributes:
        messages: Number of collective operations and, if `far`, of messages to and from a server or hub.
        bytes: Bytes in them. A ring all-reduce of n bytes sends 2 (P - 1) / P * n from each of P ranks; an all-to-all
            counts as the all-reduce that sends as many.
    """

    def __init__(self, link: SlowLink, ranks: int, *, far: bool) -> None:
        self._link, self._ranks, self._far = link, ranks, far
        self._free_at = 0.0
        self._undo = contextlib.ExitStack()
        self.messages = self.bytes = 0

    def __enter__(self) -> SlowNetwork:
        import torch.distributed as dist

        from fastvid.train.strategies.shared import link

        self._plain, self._plain_exchange = dist.all_reduce, dist.all_to_all_single
        self._undo.enter_context(_replaced(dist, "all_reduce", self._all_reduce))
        self._undo.enter_context(_replaced(dist, "all_to_all_single", self._exchange))
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
        time.sleep(self._link.message_s(size))

    def _all_reduce(self, tensor: Any, *args: Any, async_op: bool = False, **kwargs: Any) -> Any:
        ready = self._ready(tensor.numel() * tensor.element_size())
        late = _DelayedWork(self._plain(tensor, *args, async_op=True, **kwargs), ready)
        if async_op:
            return late
        late.wait()
        return None

    def _exchange(
        self, received: Any, sent: Any, received_sizes: Any, sizes: Any, *, group: Any = None, async_op: bool = False
    ) -> Any:
        import torch.distributed as dist

        own = sizes[dist.get_rank(group)]
        ready = self._ready((sum(sizes) - own) * sent.element_size() * self._ranks // (2 * max(1, self._ranks - 1)))
        work = self._plain_exchange(received, sent, received_sizes, sizes, group=group, async_op=True)
        late = _DelayedWork(work, ready)
        if async_op:
            return late
        late.wait()
        return None

    def _ready(self, size: int) -> float:
        """Count a message of the bytes of an all-reduce, and return when it has arrived."""
        self.messages += 1
        self.bytes += size
        # Latencies of messages overlap; their bytes share the link's bandwidth.
        now = time.perf_counter()
        busy = self._link.seconds(size, self._ranks) - self._link.delay_s
        self._free_at = max(now, self._free_at) + busy
        return self._free_at + self._link.delay_s


@dataclass
class _DelayedWork:
    work: Any
    ready: float

    def wait(self) -> None:
        self.work.wait()
        time.sleep(max(0.0, self.ready - time.perf_counter()))


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
