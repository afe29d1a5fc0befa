"""Compare implementations (contenders) that take turns at decoding the same clips: wall and CPU time, and ratios.

All contenders decode the same frames and crops of the same MP4s, which are stored in a dataset's tars and, for decoders
that need files, also as files next to the dataset. In each round every contender decodes all clips, so the machine's
other load affects all of them alike. CPU time is recorded as well as wall time, because it hardly changes when the
machine is shared.

The times of fastvid's own decoder include planning, reading and checksums.
"""

from __future__ import annotations

import itertools
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, partial
from math import prod
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np

from fastvid.decode.backends import backend
from fastvid.decode.clips import PacketBuffer, read_clip, reader_of
from fastvid.decode.request import Box, ClipRequest, DecoderOutput, EncodedClip, Planes, Rgb
from fastvid.errors import UsageError
from fastvid.load.workers.clip_worker import FETCH_CLIPS, fetch
from fastvid.runtime.arrays import IntArray, UInt8Array
from fastvid.runtime.processes import safe_path
from fastvid.videos.dataset import VideoDataset
from fastvid.videos.dataset import open as open_dataset

CROP: Final = 224
"""Side of the square crop in pixels, as usual for networks trained on 256-pixel videos."""

_SAMPLING: Final = re.compile(r"tsn(\d+)|dense(\d+)x(\d+)")


def parse_sampling(text: str) -> tuple[int, int | None]:
    """Return the number of frames per clip and their stride.

    ``tsn8`` is one random frame from each of eight segments, with stride None; ``dense16x4`` is sixteen frames, four
    apart.
    """
    found = _SAMPLING.fullmatch(text)
    count, stride = (int(found[1] or found[2]), int(found[3] or 0) or None) if found else (0, None)
    if found is None or not count or (found[2] and stride is None):
        raise UsageError(f"unknown sampling {text!r}", hint="use tsn8, or dense16x4 for 16 frames 4 apart")
    return count, stride


@dataclass(frozen=True)
class Corpus:
    """The clips to decode: videos of a dataset, random frames and crops. Picklable: the dataset is opened lazily."""

    folder: str  # folder of the dataset
    sampling: str  # see `parse_sampling`
    repeats: int = 2  # how often each video is decoded, with other frames and crops
    seed: int = 0  # seed of frames and crops
    crop: int = CROP  # side of the crop in pixels, for videos whose short side is `of`
    # Short side in pixels that `crop` refers to; None: the crops of all videos have `crop` pixels, or as many as the
    # smallest video.
    of: int | None = None
    keys: tuple[str, ...] | None = None  # keys of the samples to use; None for all
    # Number of clips of a video, with the same crop, in one request: it decodes the frames of all of them.
    together: int = 1

    def __reduce__(self) -> tuple[object, ...]:
        # Do not pickle the cached properties.
        place = (self.crop, self.of, self.keys, self.together)
        return Corpus, (self.folder, self.sampling, self.repeats, self.seed, *place)

    @cached_property
    def dataset(self) -> VideoDataset:
        """The opened dataset."""
        return open_dataset(self.folder)

    @cached_property
    def requests(self) -> list[ClipRequest]:
        """The clips, with videos in random order."""
        rng = np.random.default_rng(self.seed)
        count = len(self.dataset)
        samples = np.arange(count) if self.keys is None else np.asarray([self.dataset.find(key) for key in self.keys])
        short = [min(video.height, video.width) & ~1 for video in map(self.dataset.__getitem__, samples.tolist())]
        requests = []
        for sample in np.tile(samples, self.repeats).tolist():
            video = self.dataset[sample]
            sides = (video.height & ~1, video.width & ~1)
            side = self.crop if self.of is None else 2 * round(self.crop * min(sides) / self.of / 2)
            side = min(side, *(short if self.of is None else sides))
            y, x = (int(rng.integers(0, (length - side) // 2 + 1)) * 2 for length in sides)
            clips = [sample_frames(video.num_frames, self.sampling, rng) for _ in range(self.together)]
            frames = clips[0] if self.together == 1 else np.concatenate(clips)
            requests.append(ClipRequest(sample, frames, Box(y, x, side, side), (side, side)))
        return [requests[place] for place in rng.permutation(len(requests)).tolist()]

    def mp4(self, sample: int) -> bytes:
        """Read a sample's MP4 from its tar."""
        shards, rows = self.dataset.locate([sample])
        shard = self.dataset.shard(int(shards[0]))
        start, size = shard.member(int(rows[0]))
        data = bytearray(size)
        shard.storage.read_into(shard.data, [(start, memoryview(data))])
        return bytes(data)

    @cached_property
    def mp4s(self) -> list[bytes]:
        """The MP4 of every sample, in memory."""
        return [self.mp4(sample) for sample in range(len(self.dataset))]

    @cached_property
    def files(self) -> list[str]:
        """Paths of every sample's MP4 as a separate file, in a folder next to the dataset."""
        folder = Path(f"{self.folder.rstrip('/')}.files")
        folder.mkdir(exist_ok=True)
        paths = []
        for sample in range(len(self.dataset)):
            path = folder / f"{sample:06d}.mp4"
            data = self.mp4(sample)
            if not path.exists() or path.read_bytes() != data:
                path.write_bytes(data)
            paths.append(str(path))
        return paths

    def mean_packets(self) -> dict[str, float]:
        """Return mean numbers of packets decoded per clip: "planned" by fastvid, "from_keys" without a decode plan.

        Without a plan a decoder starts at the key frame before each frame.
        """
        plans = [self.dataset[request.sample].table.plan(request.frames) for request in self.requests]
        return {
            "planned": float(np.mean([len(plan.packets) for plan in plans])),
            "from_keys": float(np.mean([plan.packets_from_keys for plan in plans])),
        }


def sample_frames(num_frames: int, sampling: str, rng: np.random.Generator) -> IntArray:
    """Draw the frame indices of one clip, int64 [T], sorted."""
    count, stride = parse_sampling(sampling)
    if stride is None:
        edges = np.linspace(0, num_frames, count + 1)
        picks = (edges[:-1] + rng.random(count) * np.diff(edges)).astype(np.int64)
    else:
        start = int(rng.integers(0, max(1, num_frames - (count - 1) * stride)))
        picks = start + np.arange(count, dtype=np.int64) * stride
    # In a video shorter than the clip, the last frame is repeated.
    return np.minimum(picks, num_frames - 1)


class TaskRunner(Protocol):
    """A function that runs task number `task`: it decodes a clip. Each worker creates its own."""

    def __call__(self, task: int, /) -> object: ...


@dataclass(frozen=True, eq=False)
class Contender:
    """One of the implementations that are compared."""

    name: str
    settings: Mapping[str, Any]  # shown next to the name
    open_runner: Callable[[], TaskRunner]
    workers: int  # number of threads or processes
    processes: bool = False  # whether workers are processes
    chunk: int = 1  # number of tasks that a thread takes at once

    @property
    def label(self) -> str:
        """Name and settings on one line."""
        kind = "processes" if self.processes else "threads"
        return ", ".join([self.name, f"{self.workers} {kind}", *(f"{k}={v}" for k, v in self.settings.items())])


def spread(name: str, values: Sequence[float]) -> dict[str, float]:
    """Return median, minimum and maximum of values as ``NAME``, ``NAME_min`` and ``NAME_max``."""
    return {name: statistics.median(values), f"{name}_min": min(values), f"{name}_max": max(values)}


@dataclass
class RoundTimes:
    """Measurements of one contender, one value per round."""

    rates: list[float] = field(default_factory=list)  # tasks per second of wall time
    cpu_ms: list[float] = field(default_factory=list)  # CPU milliseconds per task, all workers together

    def summary(self) -> dict[str, float]:
        """Return median and range of ``rate`` and ``cpu_ms``, see `spread`."""
        return spread("rate", self.rates) | spread("cpu_ms", self.cpu_ms)

    def cost(self, by: str) -> float:
        """Return the median time per task in milliseconds; `by`: "wall" or "cpu" time."""
        return statistics.median(self.cpu_ms if by == "cpu" else [1e3 / rate for rate in self.rates])


class ThreadWorkers:
    """Threads that take tasks from a shared counter. Task runners, and their decoders, are kept between rounds."""

    def __init__(self, contender: Contender) -> None:
        self._chunk = contender.chunk
        self._runners = [contender.open_runner() for _ in range(contender.workers)]

    def round(self, tasks: int) -> tuple[float, float]:
        """Run tasks 0 to tasks - 1 and return wall and CPU seconds."""
        counter = itertools.count(step=self._chunk)

        def work(runner: Any) -> None:
            while (task := next(counter)) < tasks:
                if self._chunk > 1:
                    runner.run(range(task, min(task + self._chunk, tasks)))
                else:
                    runner(task)

        cpu, wall = time.process_time(), time.perf_counter()
        with ThreadPoolExecutor(len(self._runners)) as pool:
            list(pool.map(work, self._runners))
        return time.perf_counter() - wall, time.process_time() - cpu

    def close(self) -> None:
        """Release the task runners."""
        self._runners.clear()


class ProcessWorkers:
    """Processes that take tasks one after another from a shared counter."""

    def __init__(self, contender: Contender) -> None:
        context = get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        with safe_path():
            self._counter = context.Value("q", 0)  # inside the block: it starts a process, the resource tracker
            for _ in range(contender.workers):
                ours, theirs = context.Pipe()
                target = (theirs, self._counter, contender.open_runner)
                process = context.Process(target=_serve, args=target, daemon=True)
                process.start()
                self._pipes.append(ours)
                self._processes.append(process)
        for pipe in self._pipes:
            pipe.recv_bytes()

    def round(self, tasks: int) -> tuple[float, float]:
        """Run tasks 0 to tasks - 1 and return wall and CPU seconds."""
        self._counter.value = 0
        wall = time.perf_counter()
        for pipe in self._pipes:
            pipe.send(tasks)
        # Received as bytes: the processes decode videos, so nothing from them is unpickled here.
        cpu = [float(pipe.recv_bytes()) for pipe in self._pipes]
        return time.perf_counter() - wall, sum(cpu)

    def close(self) -> None:
        """Stop the processes."""
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join()


def _serve(pipe: Connection, counter: Any, open_runner: Callable[[], TaskRunner]) -> None:
    runner = open_runner()
    pipe.send_bytes(b"ready")
    while (tasks := pipe.recv()) is not None:
        cpu = time.process_time()
        while True:
            with counter.get_lock():
                task = counter.value
                counter.value = task + 1
            if task >= tasks:
                break
            runner(task)
        pipe.send_bytes(repr(time.process_time() - cpu).encode())


def measure(contenders: Sequence[Contender], tasks: int, rounds: int) -> list[RoundTimes]:
    """Time contenders in turn: a warm-up round, then `rounds`, each starting with another contender.

    `tasks`: number of tasks in a round. Returns the times of each contender, in order.
    """
    workers = [ProcessWorkers(c) if c.processes else ThreadWorkers(c) for c in contenders]
    timings = [RoundTimes() for _ in contenders]
    try:
        for number in range(-1, rounds):
            for step in range(len(contenders)):
                index = (step + number) % len(contenders)
                wall, cpu = workers[index].round(tasks)
                if number >= 0:
                    timings[index].rates.append(tasks / wall)
                    timings[index].cpu_ms.append(1e3 * cpu / tasks)
    finally:
        for group in workers:
            group.close()
    return timings


def ratio(ours: RoundTimes, theirs: RoundTimes) -> dict[str, float]:
    """Return how many times as fast `ours` is as `theirs`, by wall and by CPU time: median and range over rounds."""
    pairs = [a / b for a, b in zip(ours.rates, theirs.rates, strict=True)]
    by_cpu = [b / a for a, b in zip(ours.cpu_ms, theirs.cpu_ms, strict=True)]
    return spread("wall", pairs) | spread("cpu", by_cpu)


class FastvidRunner:
    """Decodes clips with one of fastvid's back-ends on the CPU.

    `product`: "rgb", or "planes" for YUV planes. `source`: "memory" for MP4s in memory, "disk" for the dataset's tars.
    """

    def __init__(self, corpus: Corpus, product: str, source: str, decoder: str = "pyav") -> None:
        self._requests, self._dataset = corpus.requests, corpus.dataset
        self._decoder = backend(decoder).open()
        shards, rows = self._dataset.locate(np.arange(len(self._dataset)))
        self._places = [
            (self._dataset.shard(int(shard)), int(row), self._dataset.key(number))
            for number, (shard, row) in enumerate(zip(shards, rows, strict=True))
        ]
        self._scratches = [PacketBuffer() for _ in range(FETCH_CLIPS)]
        self._read = [reader_of(data) for data in corpus.mp4s] if source == "memory" else None
        # Reused for every clip, like a loader's buffers.
        self._rgb = product == "rgb"
        rgb = [3 * len(r.frames) * prod(r.size) for r in self._requests]
        sizes = [*rgb, *(Planes.nbytes(len(r.frames), r.box) for r in self._requests)]
        self._buffer = np.empty(max(sizes), np.uint8)

    def __call__(self, task: int, /) -> UInt8Array | None:
        """Return uint8 [T, H, W, 3], or None for planes."""
        return self.decode(self._requests[task])

    def run(self, tasks: Sequence[int]) -> None:
        """Fetch some clips, then decode them one by one, like a loader's thread."""
        scratches = zip(tasks, self._scratches, strict=False)
        for clip in [self._fetch(self._requests[task], scratch) for task, scratch in scratches]:
            self._decode(clip)

    def decode(self, request: ClipRequest) -> UInt8Array | None:
        """Return uint8 [T, H, W, 3], or None for planes."""
        return self._decode(self._fetch(request, self._scratches[0]))

    def _fetch(self, request: ClipRequest, scratch: PacketBuffer) -> EncodedClip:
        shard, row, key = self._places[request.sample]
        if self._read is None:
            return fetch(shard, row, request, key=key, scratch=scratch)[0]
        return read_clip(request, shard.info(row), shard.table(row), self._read[request.sample], scratch=scratch)

    def _decode(self, clip: EncodedClip) -> UInt8Array | None:
        out = self._output(clip.request)
        (error,) = self._decoder.decode([clip], [out])
        if error is not None:
            raise error
        return out.data.transpose(1, 2, 3, 0) if isinstance(out, Rgb) else None

    def _output(self, request: ClipRequest) -> DecoderOutput:
        count = len(request.frames)
        if self._rgb:
            shape = (3, count, *request.size)
            return Rgb(self._buffer[: prod(shape)].reshape(shape))
        return Planes.packed(self._buffer[: Planes.nbytes(count, request.box)], count, request.box)


def fastvid(corpus: Corpus, workers: int, *, product: str = "rgb", source: str = "disk") -> Contender:
    """Return fastvid as a contender, with one thread per worker."""
    settings = {"product": product, "source": source}
    return Contender("fastvid", settings, partial(FastvidRunner, corpus, **settings), workers, chunk=FETCH_CLIPS)
