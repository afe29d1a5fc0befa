"""Section `loader`: batches on the device have the right frames, also beside a busy stream, and memory stays flat."""

from __future__ import annotations

import hashlib
import itertools
import random
import time
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from bench.common.rounds import resident
from bench.gpu.conformance import POISON
from bench.gpu.measuring import batches, throughput
from bench.gpu.settings import Notes, Settings
from fastvid.errors import FastvidError
from fastvid.videos.dataset import VideoDataset

_BATCHES = 12
# Mean levels by which a batch may differ from the CPU's: planes differ by rounding, RGB of DALI by its chroma filter.
_MEAN_LEVELS = 3.0


def measure(settings: Settings, notes: Notes) -> None:
    """Compare batches of every decoder with PyAV's on the CPU, measure their rates and watch the memory."""
    name, dataset = settings.smallest()
    runs, reasons = settings.on_device()
    chosen: list[Any] = ["pyav", *runs, *(f"pyav+{one.name}" for one in runs[:1] if not settings.fake)]
    wrong = raced = 0
    notes.put(dataset=name, unavailable=reasons)
    small = replace(settings, batch=min(settings.batch, 8))
    right = _levels(replace(small, fake=True), dataset, "pyav")
    for decoder in chosen:
        row: dict[str, Any] = {"decoder": decoder if isinstance(decoder, str) else decoder.name}
        try:
            quiet = _levels(small, dataset, decoder)
            means = [float(np.abs(one.astype(np.int16) - two).mean()) for one, two in zip(right, quiet, strict=True)]
            row |= {"mean_levels": round(max(means), 3), "wrong": sum(mean > _MEAN_LEVELS for mean in means)}
            # A shared queue hands clips to whoever is free, so bits of a hybrid may differ from run to run.
            if "+" not in row["decoder"]:
                row["raced"] = _raced(small, dataset, decoder, quiet)
            row |= throughput(settings, dataset, decoder)
        except FastvidError as error:
            row |= {"failed": error.message, "wrong": 1}
        notes.row("decoders", **row)
        wrong, raced = wrong + row["wrong"], raced + row.get("raced", 0)
        notes.put(wrong_batches=wrong, raced_batches=raced)
    notes.put(**_growth(settings, dataset, runs[0] if runs else "pyav"))


def _levels(settings: Settings, dataset: VideoDataset, decoder: Any) -> list[Any]:
    """Return the first batches as levels, uint8 [B, 3, T, H, W] on the host."""
    with batches(settings, dataset, decoder, dtype=torch.uint8) as stream:
        return [batch.video.cpu().numpy() for batch in itertools.islice(stream, _BATCHES)]


def _raced(settings: Settings, dataset: VideoDataset, decoder: Any, quiet: list[Any]) -> int:
    """Return how many batches change beside a busy stream, when batches are dropped at random moments."""
    keep = random.Random(0)
    busy = torch.randn(2048, 2048, device=settings.device) if not settings.fake else None
    kept: list[tuple[int, torch.Tensor]] = []
    differ = 0

    def check(number: int, video: torch.Tensor) -> bool:
        return _digest(video.cpu().numpy()) != _digest(quiet[number])

    with batches(settings, dataset, decoder, dtype=torch.uint8) as stream:
        for number in range(_BATCHES):
            if busy is not None:
                for _ in range(20):
                    busy = (busy @ busy).clamp_(-1, 1)
            batch = next(stream)
            # Reads of a kept batch are queued behind the busy stream; a dropped one's memory may be reused at once.
            if keep.random() < 0.7:
                kept.append((number, batch.video.clone()))
            else:
                batch.video.fill_(POISON)
            del batch
            while len(kept) > 3:
                differ += check(*kept.pop(0))
        return differ + sum(check(number, video) for number, video in kept)


def _digest(levels: Any) -> bytes:
    return hashlib.sha256(levels.tobytes()).digest()


def _growth(settings: Settings, dataset: VideoDataset, decoder: Any) -> dict[str, float]:
    """Return how much the memory of the device and of this process grows in the second half of a run, in MB."""
    device, host = list[float](), list[float]()
    begun, spent = time.perf_counter(), 15 * settings.seconds if not settings.fake else 0.5
    with batches(settings, dataset, decoder) as stream:
        while time.perf_counter() - begun < spent:
            next(stream)
            device.append(_device_mb(settings))
            host.append(resident() / 1e6)
    return {"gpu_memory_growth_mb": growth(device), "host_memory_growth_mb": growth(host), "batches": len(device)}


def growth(values: list[float]) -> float:
    """Return the median of the last quarter minus that of the second; the first warms up."""
    quarter = max(1, len(values) // 4)
    return round(float(np.median(values[-quarter:]) - np.median(values[quarter : 2 * quarter] or values)), 2)


def _device_mb(settings: Settings) -> float:
    """Return what is used on the whole device, decoders' surfaces included."""
    if settings.device.type != "cuda":
        return 0.0
    free, total = torch.cuda.mem_get_info(settings.device)
    return (total - free) / 1e6
