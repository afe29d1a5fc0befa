"""Exposed communication: the seconds that a rank waits for communication not hidden by computation.

Backward computes the gradient of the model's first parameter last. The time from then to the end of backward is spent
waiting for the all-reduce of the remaining buckets. Strategies that average weights wait in `maybe_sync`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch
from torch import Tensor, nn


class Exposure:
    """Sums up exposed communication time; on CUDA it is measured with events, which `take` reads."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._seconds = 0.0
        self._idle: list[torch.cuda.Event] = []  # read, and ready to be recorded again
        self._pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._computed: float | torch.cuda.Event | None = None
        first = next((parameter for parameter in model.parameters() if parameter.requires_grad), None)
        if first is not None:
            first.register_post_accumulate_grad_hook(self._mark)  # type: ignore[no-untyped-call]

    def _mark(self, _parameter: Tensor) -> None:
        self._computed = self._now()

    def _now(self) -> float | torch.cuda.Event:
        if not self._cuda:
            return time.perf_counter()
        # A step takes several events, and creating one costs the driver more than recording it.
        event = self._idle.pop() if self._idle else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def backward_ended(self) -> None:
        """Record the end of a backward whose gradients were reduced."""
        if self._computed is not None:
            self._add(self._computed)
            self._computed = None

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Measure the block as exposed communication."""
        began = self._now()
        yield
        self._add(began)

    def _add(self, began: float | torch.cuda.Event) -> None:
        now = self._now()
        if isinstance(began, float) and isinstance(now, float):
            self._seconds += now - began
        elif isinstance(began, torch.cuda.Event) and isinstance(now, torch.cuda.Event):
            self._pairs.append((began, now))

    def take(self) -> float:
        """Return the seconds since the last call; waits for the device."""
        for began, ended in self._pairs:
            ended.synchronize()
            self._seconds += began.elapsed_time(ended) / 1000.0
            self._idle += (began, ended)
        self._pairs.clear()
        seconds, self._seconds = self._seconds, 0.0
        return seconds
