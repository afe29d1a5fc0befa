"""Clocks and gauges of the GPU benchmark: throughput of a loader, utilisation of the engines, memory."""

from __future__ import annotations

import subprocess
import threading
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


def make_loader(
    settings: Settings, dataset: VideoDataset, decoder: str | Backend, **options: Any
) -> fastvid.ClipLoader:
    """Return a loader of eight frames per clip, randomly cropped and flipped, on the device."""
    output = {name: options.pop(name) for name in ("dtype", "channels_last") if name in options}
    workers = fastvid.Workers(device_lanes=options.pop("device_lanes", None))
    chosen: dict[str, Any] = {"device": settings.device, "global_batch_size": settings.batch} | options
    # An epoch of a small dataset must have several batches too.
    repeated = fastvid.Mixture([dataset], weights=[1.0], num_samples=max(len(dataset), 8 * settings.batch))
    return fastvid.ClipLoader(
        repeated,
        frames=fastvid.Segments(NUM_FRAMES),
        spatial=[fastvid.RandomCrop(crop_of(dataset)), fastvid.HorizontalFlip(0.5)],
        decoder=decoder,
        output=fastvid.Output(**{"dtype": torch.bfloat16} | output),
        workers=workers,
        **chosen,
    )


def crop_of(dataset: VideoDataset) -> int:
    """Return the side of a square crop: 224 of 256 lines, 624 of 720, even."""
    info = dataset[0].info
    return min(info.height, info.width) * 7 // 8 // 16 * 16


def endless(loader: fastvid.ClipLoader) -> Iterator[Any]:
    """Yield batches of epoch after epoch."""
    while True:
        yield from loader


@dataclass(frozen=True)
class Rate:
    """What a loader delivered."""

    clips_per_s: float  # clips per second
    host_cores: float  # CPU seconds of this process per second

    def as_row(self) -> dict[str, float]:
        """Return the numbers with clips and frames per second."""
        rate = self.clips_per_s
        row = {"clips_per_s": rate, "frames_per_s": rate * NUM_FRAMES, "host_cores": self.host_cores}
        return {name: round(value, 2) for name, value in row.items()}


def throughput(settings: Settings, dataset: VideoDataset, decoder: str | Backend, **options: Any) -> Rate:
    """Measure what a loader delivers on the device, after two warm-up batches."""
    loader = make_loader(settings, dataset, decoder, **options)
    try:
        batches, clips = endless(loader), 0
        next(batches), next(batches)
        synchronize(settings.device)
        begun, worked = time.perf_counter(), time.process_time()
        while time.perf_counter() - begun < settings.seconds:
            clips += len(next(batches).key)
        synchronize(settings.device)
        spent, worked = time.perf_counter() - begun, time.process_time() - worked
    finally:
        loader.close()
    return Rate(clips / spent, worked / spent)


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


class Utilization:
    """Reads ``nvidia-smi dmon`` while the block runs."""

    _COMMAND = ("nvidia-smi", "dmon", "-s", "u", "-d", "1", "-i")

    def __init__(self, index: int) -> None:
        self._index = index
        self._text: list[str] = []
        self._process: subprocess.Popen[str] | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Utilization:
        try:
            self._process = subprocess.Popen(
                [*self._COMMAND, str(self._index)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
        except OSError:  # a machine without NVIDIA's tools
            return self
        self._thread = threading.Thread(target=self._read)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None and self._thread is not None:
            self._process.terminate()
            self._thread.join()
            self._process.wait()

    def summary(self) -> dict[str, float]:
        """Return the medians in percent."""
        return medians(self._text)

    def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        self._text.extend(self._process.stdout)


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
