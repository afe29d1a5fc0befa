"""The device of a loader's batches, and the CUDA stream on which it allocates, fills and finishes them.

A block of CUDA memory that is freed goes at once to the next allocation on the stream that allocated it, even if work
on it is still queued; only that stream is in order with it. So everything is allocated on the loader's stream, and
whoever uses it on another one is put in order:

- Decoders wait for an event of the loader's stream before they write, see `LoaderStream.mark`.
- They return after their writes, so whatever is queued later, on any stream, follows them.
- The consumer's stream waits for the finished batch, and the allocator keeps its memory until that stream has used it,
  see `LoaderStream.hand_over`.

The host never waits for the device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Final

import torch
from torch import Tensor

from fastvid.errors import UsageError

_PRIORITY: Final = -1
"""Above a training step's stream (0): finishing a batch is short, and the next step waits for it. Not measured."""


def resolve(device: str | torch.device) -> torch.device:
    """Return a device with its index, which for "cuda" is the calling thread's current one.

    Other threads have a current device of their own, GPU 0 at first, so the index has to be known before they start.
    """
    device = torch.device(device)
    if device.type != "cuda":
        return device
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = torch.cuda.current_device() if count and str(device) == "cuda" else device.index
    if not count or index >= count:
        raise UsageError(
            f"device {str(device)!r} does not exist: torch finds {count or 'no'} CUDA devices",
            hint="use device='cpu', or run `fastvid doctor` to see what is missing",
        )
    return torch.device("cuda", index)


def upload(host: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor of the host to a device on the current stream, without waiting; on a CPU return it."""
    if device.type != "cuda":
        return host.to(device)
    # torch gives pinned memory to nobody else before the copy has completed.
    return (host if host.is_pinned() else host.pin_memory()).to(device, non_blocking=True)


class LoaderStream:
    """The stream of a loader's batches. On a CPU every method returns at once."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = _stream(device) if device.type == "cuda" else None
        # Whether work is queued on a device, so that a thread can queue it ahead of the consumer.
        self.is_asynchronous = self._stream is not None

    def enter_thread(self) -> None:
        """Make the device the calling thread's current one."""
        if self._stream is not None:
            torch.cuda.set_device(self.device)

    def use(self) -> AbstractContextManager[None]:
        """Return a context in which the calling thread allocates and works on this stream."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def mark(self) -> torch.cuda.Event | None:
        """Return an event behind everything queued so far; None on a CPU."""
        return None if self._stream is None else self._stream.record_event()

    def upload(self, host: Tensor) -> Tensor:
        """Copy a tensor of the host to the device, see `upload`. Call it within `use`."""
        return upload(host, self.device)

    def hand_over(self, tensors: Sequence[Tensor], done: torch.cuda.Event | None) -> None:
        """Give tensors of this stream to the calling thread's current stream."""
        if done is None:
            return
        consumer = torch.cuda.current_stream(self.device)
        consumer.wait_event(done)
        for tensor in tensors:
            tensor.record_stream(consumer)


def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=_PRIORITY)  # type: ignore[no-untyped-call]


class CopyClock:
    """Measures on the device's clock how long the consumer's stream waits for batches that are copied and converted.

    The host never waits: each measurement is read after the stream has passed it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None
        self._pending: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._free: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def __enter__(self) -> None:
        if self._device is not None:
            pair = self._free.pop() if self._free else (_event(), _event())
            self._pending.append(pair)
            pair[0].record(torch.cuda.current_stream(self._device))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._device is not None:
            self._pending[-1][1].record(torch.cuda.current_stream(self._device))

    def seconds(self) -> float:
        """Return the seconds of the waits that have ended since the last call."""
        spent = 0.0
        while self._pending and self._pending[0][1].query():  # type: ignore[no-untyped-call]
            start, stop = pair = self._pending.popleft()
            spent += start.elapsed_time(stop) / 1e3
            self._free.append(pair)
        return spent


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
