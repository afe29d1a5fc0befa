"""Which decoders serve an iteration: one back-end, or several that serve one queue, each with lanes of its own.

A lane is one decoder with one thread: a thread of a CPU back-end, or a pipeline of a GPU back-end, of which the device
says how many it wants. Every lane takes clips from the same queue in order, so several back-ends give the same frames
in the same order as one; colours differ by what each back-end states.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Final

from fastvid.decode.backends import Backend, backend
from fastvid.decode.request import DeviceRgb
from fastvid.errors import MissingDependency, UsageError
from fastvid.format.schema import Codec
from fastvid.load.memory.buffers import SharedBufferPool
from fastvid.load.workers.clip_worker import ClipWorker, Lane
from fastvid.load.workers.processes import ProcessLane

AUTO: Final = Backend(name="auto", target="", device="", codecs=frozenset(Codec), install="")
"""Stands for the back-end that is chosen when the first iteration begins."""


class Lanes:
    """What makes clips with one back-end, kept open between iterations.

    Args:
        open_lane: Opens one, see `open_lane`.
    """

    def __init__(self, open_lane: Callable[[], Lane]) -> None:
        self._open = open_lane
        self._idle: list[Lane] = []
        self._lock = threading.Lock()

    def take(self) -> Lane:
        """A lane for the calling thread alone."""
        with self._lock:
            if self._idle:
                return self._idle.pop()
        return self._open()

    def give(self, lane: Lane) -> None:
        """Puts a lane back."""
        with self._lock:
            self._idle.append(lane)

    def close(self) -> None:
        """Closes the lanes that nobody uses."""
        with self._lock:
            idle, self._idle = self._idle, []
        for lane in idle:
            lane.close()


def open_lane(one: Backend, clip_timeout: float = 0.0, memory: SharedBufferPool | None = None) -> Lane:
    """A lane with a decoder of its own.

    Args:
        one: The back-end.
        clip_timeout: Seconds after which a worker process that gets nowhere is killed.
        memory: Gives the lane a process of its own, which writes this memory; None decodes in this process.
    """
    return ClipWorker(one.open()) if memory is None else ProcessLane(one, clip_timeout, memory)


def choose_backends(decoder: str | Backend) -> tuple[Backend, ...]:
    """The back-ends that a user named; several are joined by "+", such as "pyav+dali-gpu".

    Raises:
        UsageError: No back-end has the name, or one is named twice.
        MissingDependency: One does not run on this machine.
    """
    chosen = (decoder,) if isinstance(decoder, Backend) else tuple(backend(name) for name in decoder.split("+"))
    if len({one.name for one in chosen}) < len(chosen):
        raise UsageError(f"decoder {decoder!r} names a back-end twice")
    for one in chosen:
        reason = one.why_unavailable()
        if reason is not None:
            raise MissingDependency(reason)
    return chosen


def merge(chosen: Sequence[Backend]) -> Backend:
    """Several back-ends as one: what all of them decode."""
    if len(chosen) == 1:
        return chosen[0]
    return Backend(
        name="+".join(one.name for one in chosen),
        target="",
        device=chosen[-1].device,
        codecs=frozenset.intersection(*(one.codecs for one in chosen)),
        install=" ".join(one.install for one in chosen),
    )


def split_lanes(chosen: Sequence[Backend], num_threads: int, device_lanes: int | None) -> list[Backend]:
    """The back-end of each thread that decodes.

    Args:
        chosen: The back-ends. Those of the CPU share its threads.
        num_threads: Threads of the CPU's back-ends, together.
        device_lanes: Lanes of each GPU back-end; by default what it says suits the device.
    """
    on_cpu = sum(not on_device(one) for one in chosen)
    split: list[Backend] = []
    for one in chosen:
        own = max(1, num_threads // on_cpu) if not on_device(one) else device_lanes or one.lanes(num_threads)
        split += [one] * own
    return split


def on_device(one: Backend) -> bool:
    """Whether a back-end leaves its frames on a device."""
    return DeviceRgb in one.load().outputs
