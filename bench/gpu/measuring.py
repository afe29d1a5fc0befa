"""Clocks and gauges of the GPU benchmark: throughput of a loader, utilisation of the engines, memory."""

from __future__ import annotations

import contextlib
import itertools
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

import fastvid
from bench.gpu.settings import NUM_FRAMES, Settings
from fastvid.decode.backends import Backend
from fastvid.videos.dataset import VideoDataset


@dataclass(frozen=True, slots=True)
class Tuned(Backend):
    """A back-end whose decoders are opened with options; a loader takes it like any other."""

    options: Mapping[str, Any] = field(default_factory=dict)

    def open(self, **options: Any) -> Any:
        """Create a decoder with the options."""
        return self.load()(**self.options, **options)

    @classmethod
    def of(cls, one: Backend, **options: Any) -> Tuned:
        """Return a back-end with options."""
        return cls(one.name, one.target, one.device, one.codecs, one.install, options)


@contextlib.contextmanager
def batches(
    settings: Settings, dataset: VideoDataset, decoder: str | Backend, lanes: int | None = None, **output: Any
) -> Iterator[Iterator[Any]]:
    """Yield the batches, without end, of a loader of eight frames per clip, randomly cropped and flipped.

    `lanes`: number of GPU decoders. `output`: of `fastvid.Output`.
    """
    # An epoch of a small dataset must have several batches too.
    repeated = fastvid.Mixture([dataset], weights=[1.0], num_samples=max(len(dataset), 8 * settings.batch))
    loader = fastvid.ClipLoader(
        repeated,
        frames=fastvid.Segments(NUM_FRAMES),
        spatial=[fastvid.RandomCrop(settings.crop(dataset)), fastvid.HorizontalFlip(0.5)],
        global_batch_size=settings.batch,
        device=settings.device,
        decoder=decoder,
        output=fastvid.Output(**{"dtype": torch.bfloat16} | output),
        workers=fastvid.Workers(device_lanes=lanes),
    )
    with contextlib.closing(loader):
        yield itertools.chain.from_iterable(itertools.repeat(loader))


def throughput(
    settings: Settings, dataset: VideoDataset, decoder: str | Backend, lanes: int | None = None
) -> dict[str, float]:
    """Measure a loader on the device after two warm-up batches: clips, frames and CPU seconds per second."""
    with batches(settings, dataset, decoder, lanes) as stream:
        next(stream), next(stream)
        synchronize(settings.device)
        clips, begun, worked = 0, time.perf_counter(), time.process_time()
        while time.perf_counter() - begun < settings.seconds:
            clips += len(next(stream).key)
        synchronize(settings.device)
        spent, worked = time.perf_counter() - begun, time.process_time() - worked
    row = {"clips_per_s": clips, "frames_per_s": clips * NUM_FRAMES, "host_cores": worked}
    return {name: round(value / spent, 2) for name, value in row.items()}


def timed(work: Callable[[], object], settings: Settings) -> float:
    """Return the mean seconds of one call, after warm-up calls."""
    for _ in range(1 if settings.fake else 5):
        work()
    synchronize(settings.device)
    begun, count, chunk = time.perf_counter(), 0, 1 if settings.fake else 8
    while time.perf_counter() - begun < settings.seconds:
        for _ in range(chunk):
            work()
        synchronize(settings.device)
        count += chunk
    return (time.perf_counter() - begun) / count


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextlib.contextmanager
def utilization(index: int) -> Iterator[dict[str, float]]:
    """Yield a dict that has the medians of ``nvidia-smi dmon`` after the block, if there is nvidia-smi."""
    found: dict[str, float] = {}
    command = ["nvidia-smi", "dmon", "-s", "u", "-d", "1", "-i", str(index)]
    if shutil.which(command[0]) is None:
        yield found
        return
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        yield found
    finally:
        process.terminate()
        found.update(medians(process.communicate()[0].splitlines()))


def medians(lines: list[str]) -> dict[str, float]:
    """Return the medians of the columns `sm` and `dec` of ``nvidia-smi dmon -s u``, by name, in percent."""
    names: list[str] = []
    values: dict[str, list[float]] = {"sm": [], "dec": []}
    for line in lines:
        words = line.split()
        if words[:1] == ["#"] and "dec" in words:
            names = words[1:]
        elif words[:1] != ["#"]:
            for name, word in zip(names, words, strict=False):
                if name in values and word.isdecimal():
                    values[name].append(float(word))
    titles = {"sm": "gpu_percent", "dec": "nvdec_percent"}
    return {titles[name]: float(np.median(found)) for name, found in values.items() if found}
