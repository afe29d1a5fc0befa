"""Seconds that a rank stands still for the others: communication that no computation hides.

The gradient of a model's first parameter is the last that backward computes; what backward still waits for after it is
the all-reduce of buckets that were not done by then. Strategies that average weights wait where they sync.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch
from torch import Tensor, nn


class Exposure:
    """Adds up exposed communication. On CUDA it is the device's time, read when asked for.

    Args:
        model: What is trained.
        device: Where it computes.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._seconds = 0.0
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
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def backward_ended(self) -> None:
        """Right after a backward whose gradients were agreed on."""
        if self._computed is not None:
            self._add(self._computed)
            self._computed = None

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Around communication that nothing runs beside."""
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
        """Seconds since the last call; waits for the device."""
        for began, ended in self._pairs:
            ended.synchronize()
            self._seconds += began.elapsed_time(ended) / 1000.0
        self._pairs.clear()
        seconds, self._seconds = self._seconds, 0.0
        return seconds
