"""Section `scaler`: fp16 with a loss scale trains, and its scale grows or shrinks as it should."""

from __future__ import annotations

import torch

from bench.gpu.measuring import batches
from bench.gpu.settings import Notes, Settings
from bench.gpu.step import Steps

_STEPS = 50


def measure(settings: Settings, notes: Notes) -> None:
    """Train 50 steps in fp16; a CPU has no fp16 and rehearses without."""
    name, dataset = settings.smallest()
    steps = Steps(settings, settings.crop(dataset), amp=None if settings.fake else "fp16")
    finite = 0
    with batches(settings, dataset, "pyav", dtype=torch.float32) as stream:
        for _ in range(_STEPS):
            steps(next(stream))
            finite += all(bool(torch.isfinite(one).all()) for one in steps.replica.model.parameters())
    notes.put(dataset=name, finite_steps=finite, scale=steps.replica.scaler.get_scale())
