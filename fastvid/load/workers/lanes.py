"""Chooses the decoder back-ends of an iteration and opens their lanes.

A lane is one decoder used by one thread: a CPU back-end has one per thread, a GPU back-end as many as suit the device.
All lanes take clips from one queue in order, so several back-ends decode the same frames in the same order as one;
colours differ within the tolerance that each back-end states.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Final

import torch

from fastvid.decode.backends import Backend, backend
from fastvid.decode.request import Decoder, DevicePlanes, DeviceRgb
from fastvid.errors import MissingDependency, UsageError
from fastvid.format.schema import Codec
from fastvid.load.memory import SharedBufferPool
from fastvid.load.workers.clip_worker import ClipWorker, Lane
from fastvid.load.workers.processes import ProcessLane

_ON_DEVICE: Final = frozenset({DevicePlanes, DeviceRgb})

AUTO: Final = Backend(name="auto", target="", device="", codecs=frozenset(Codec), install="")
"""Placeholder until the first iteration chooses a back-end."""


class Lanes:
    """A pool of lanes with one back-end, kept open between iterations."""

    def __init__(self, open_lane: Callable[[], Lane]) -> None:
        self._open = open_lane
        self._idle: list[Lane] = []
        self._lock = threading.Lock()

    def take(self) -> Lane:
        """Return a lane for exclusive use by the calling thread."""
        with self._lock:
            if self._idle:
                return self._idle.pop()
        return self._open()

    def give(self, lane: Lane) -> None:
        """Return a lane to the pool."""
        with self._lock:
            self._idle.append(lane)

    def close(self) -> None:
        """Close the idle lanes."""
        with self._lock:
            idle, self._idle = self._idle, []
        for lane in idle:
            lane.close()


def open_lane(
    one: Backend, device: torch.device, clip_timeout: float = 0.0, memory: SharedBufferPool | None = None
) -> Lane:
    """Open a lane with its own decoder, in the thread that uses it.

    `clip_timeout`: seconds without progress after which a worker process is killed.
    """
    return ClipWorker(open_decoder(one, device)) if memory is None else ProcessLane(one, clip_timeout, memory)


def open_decoder(one: Backend, device: torch.device) -> Decoder:
    """Open a decoder; one for CUDA on this device, not on the thread's current one, which is GPU 0 in a new thread."""
    return one.open(device_id=device.index) if one.device == "cuda" else one.open()


def choose_backends(decoder: str | Backend, device: torch.device) -> tuple[Backend, ...]:
    """Return the back-ends that a user named; "+" joins several, for example "pyav+dali-gpu"."""
    chosen = (decoder,) if isinstance(decoder, Backend) else tuple(backend(name) for name in decoder.split("+"))
    if len({one.name for one in chosen}) < len(chosen):
        raise UsageError(f"decoder {decoder!r} names a back-end twice")
    for one in chosen:
        reason = one.why_unavailable(device.index)
        if reason is not None:
            raise MissingDependency(reason)
    return chosen


def merge(chosen: Sequence[Backend]) -> Backend:
    """Combine back-ends into one that supports the codecs common to all."""
    if len(chosen) == 1:
        return chosen[0]
    return Backend(
        name="+".join(one.name for one in chosen),
        target="",
        device=chosen[-1].device,
        codecs=frozenset.intersection(*(one.codecs for one in chosen)),
        install=" ".join(one.install for one in chosen),
    )


def split_lanes(
    chosen: Sequence[Backend], num_threads: int, device_lanes: int | None, device: torch.device
) -> list[Backend]:
    """Return the back-end of each decode thread."""
    on_cpu = sum(not on_device(one) for one in chosen)
    split: list[Backend] = []
    for one in chosen:
        own = (
            max(1, num_threads // on_cpu)
            if not on_device(one)
            else device_lanes or one.lanes(num_threads, device.index)
        )
        split += [one] * own
    return split


def on_device(one: Backend) -> bool:
    """Return whether a back-end leaves its frames on a device."""
    return not _ON_DEVICE.isdisjoint(one.load().outputs)
