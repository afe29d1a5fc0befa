"""The device of a loader's batches, and the CUDA stream on which it allocates, fills and finishes them.

torch gives a freed block of CUDA memory at once to the next allocation on the stream that allocated it, even if work on
the block is still queued: work on that stream runs in order, but work on other streams does not wait for it. So
everything is allocated on the loader's stream, and other streams are synchronised with it:

- Decoders wait for an event of the loader's stream before they write, see `LoaderStream.mark`.
- Decoders return after their writes have completed, so work that is queued later runs after them, on any stream.
- The consumer's stream waits for the finished batch, and the allocator does not reuse the batch's memory until the work
  queued on that stream has finished, see `LoaderStream.hand_over`.

The host never waits for the device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Final

import torch
from torch import Tensor

from fastvid.errors import UsageError

_PRIORITY: Final = -1
"""Above the priority of a training step's stream (0): finishing a batch takes little time, and the next step waits for
it. The benefit has not been measured."""


def resolve(device: str | torch.device) -> torch.device:
    """Return the device with an explicit index; "cuda" means the calling thread's current GPU.

    Each thread has a current GPU of its own, at first GPU 0, so the index must be known before other threads start.
    """
    try:
        device = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise UsageError(f"device is {device!r}", hint="use 'cuda', 'cuda:1' or 'cpu'") from error
    if device.type == "cpu":
        return device
    count = torch.cuda.device_count() if device.type == "cuda" and torch.cuda.is_available() else 0
    index = torch.cuda.current_device() if count and str(device) == "cuda" else device.index
    if not count or index >= count:
        hint = "use device='cpu', or run `fastvid doctor` to see what is missing"
        raise UsageError(f"device {str(device)!r} does not exist: torch finds {count or 'no'} CUDA devices", hint=hint)
    return torch.device("cuda", index)


def upload(host: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to a device on the current stream without waiting; for a CPU return the tensor itself."""
    if device.type != "cuda":
        return host.to(device)
    # torch does not reuse the pinned copy's memory before the transfer has completed, though nothing refers to it.
    return (host if host.is_pinned() else host.pin_memory()).to(device, non_blocking=True)


class LoaderStream:
    """The stream of a loader's batches. On a CPU every method returns at once."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device, priority=_PRIORITY) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        # True on a GPU: work is only queued, so a thread can queue it before the consumer asks for the result.
        self.is_asynchronous = self._stream is not None

    def enter_thread(self) -> None:
        """Make the device the calling thread's current one."""
        if self._stream is not None:
            torch.cuda.set_device(self.device)

    def use(self) -> AbstractContextManager[None]:
        """Return a context in which the calling thread allocates and works on this stream."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def mark(self) -> torch.cuda.Event | None:
        """Return an event that completes after everything queued on this stream so far; None on a CPU."""
        return None if self._stream is None else self._stream.record_event()

    def hand_over(self, tensors: Sequence[Tensor], done: torch.cuda.Event | None) -> None:
        """Make the calling thread's current stream wait for `done` before it uses `tensors`; None: do nothing."""
        if done is None:
            return
        consumer = torch.cuda.current_stream(self.device)
        consumer.wait_event(done)
        for tensor in tensors:
            tensor.record_stream(consumer)


class CopyClock:
    """Measures on the device's clock how long the consumer's stream waits for batches that are copied and converted.

    The host never waits: the two events of a measurement are read once the stream has passed them.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None
        self._pending: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._free: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Measure the waits that are queued in this context."""
        if self._device is None:
            yield
            return
        start, stop = pair = self._free.pop() if self._free else (_event(), _event())
        start.record(torch.cuda.current_stream(self._device))
        yield
        stop.record(torch.cuda.current_stream(self._device))
        self._pending.append(pair)

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
