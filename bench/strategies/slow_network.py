"""Makes what a process says to the others take as long as over a slower network.

Between ranks of a group an all-reduce is delayed. A client of a parameter server and a stage of a relay are delayed in
each message, there and back, unless they are on the machine of the server or the hub, which is rank 0's.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Link:
    """What a message costs beyond what the machine takes for it.

    Attributes:
        delay_s: Before each message.
        bytes_per_s: Of each rank's link; 0 is unlimited.
    """

    delay_s: float = 0.0
    bytes_per_s: float = 0.0

    def seconds(self, size: int, ranks: int) -> float:
        """Of a ring all-reduce of `size` bytes."""
        return self.message_s(int(2 * (ranks - 1) / ranks * size))

    def message_s(self, size: int) -> float:
        """Of one message of `size` bytes."""
        return self.delay_s + (size / self.bytes_per_s if self.bytes_per_s else 0.0)


class Slow:
    """Slows this process down inside a ``with``.

    Args:
        link: The network.
        ranks: Processes of the group.
        far: Whether this process reaches servers and hubs over the network.

    Attributes:
        messages: All-reduces; or messages to and from a server or hub, where this process is far from it.
        bytes: In them.
    """

    def __init__(self, link: Link, ranks: int, *, far: bool) -> None:
        self._link, self._ranks, self._far = link, ranks, far
        self._free_at = 0.0
        self._undo = contextlib.ExitStack()
        self.messages = self.bytes = 0

    def __enter__(self) -> Slow:
        import torch.distributed as dist

        from fastvid.train.strategies.shared import link

        self._plain = dist.all_reduce
        self._undo.enter_context(_replaced(dist, "all_reduce", self._all_reduce))
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
        size = tensor.numel() * tensor.element_size()
        self.messages += 1
        self.bytes += size
        # The latency of messages overlaps; their bytes share the link.
        now = time.perf_counter()
        busy = self._link.seconds(size, self._ranks) - self._link.delay_s
        self._free_at = max(now, self._free_at) + busy
        ready = self._free_at + self._link.delay_s
        work = self._plain(tensor, *args, async_op=True, **kwargs)
        late = _Late(work, ready)
        if async_op:
            return late
        late.wait()
        return None


@dataclass
class _Late:
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
