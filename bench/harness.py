"""What all benchmarks share: facts of the machine, workers, rounds taken in turn, medians with their spread, JSON.

Contenders take turns within each round, so that what else the machine does hits them alike; a ratio is the median of
the rounds' ratios. CPU time is recorded beside wall time: it hardly changes when the machine is shared.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import os
import platform
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, Protocol

RESULTS: Final = Path(__file__).parent / "results"

_PACKAGES: Final = ("av", "decord", "numpy", "nvidia-dali-cuda120", "nvidia-dali-cuda130", "torch", "torchcodec")


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def machine_facts() -> dict[str, Any]:
    """What a number depends on, as far as it can be read."""
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    commit = subprocess.run(
        ["git", "-C", str(RESULTS.parent), "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    )
    return {
        "cpu": _first("/proc/cpuinfo", "model name"),
        "cores": cores(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "packages": versions,
        "commit": commit.stdout.strip() or None,
        "load_average": round(os.getloadavg()[0], 2),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _first(file: str, field_name: str) -> str | None:
    try:
        lines = Path(file).read_text().splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(field_name)), None)


class Job(Protocol):
    """One worker's way to do task number n; made in the worker itself."""

    def __call__(self, task: int, /) -> object: ...


@dataclass(frozen=True, eq=False)
class Contender:
    """Somebody's way to do the tasks.

    Attributes:
        name: Who.
        settings: How, for the record.
        open_job: Makes a worker's job; picklable, called in each worker.
        workers: How many.
        processes: Whether workers are processes instead of threads.
    """

    name: str
    settings: Mapping[str, Any]
    open_job: Callable[[], Job]
    workers: int
    processes: bool = False

    @property
    def label(self) -> str:
        """Name and settings in one line."""
        kind = "processes" if self.processes else "threads"
        return ", ".join([self.name, f"{self.workers} {kind}", *(f"{k}={v}" for k, v in self.settings.items())])


@dataclass
class Timing:
    """Rounds of one contender.

    Attributes:
        rates: Tasks a second of each round, by the wall clock.
        cpu_ms: CPU milliseconds a task of each round, all workers together.
    """

    rates: list[float] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)

    def summary(self) -> dict[str, float]:
        """Median and spread."""
        return {
            "rate": statistics.median(self.rates),
            "rate_min": min(self.rates),
            "rate_max": max(self.rates),
            "cpu_ms": statistics.median(self.cpu_ms),
            "cpu_ms_min": min(self.cpu_ms),
        }


class ThreadWorkers:
    """Threads that take task after task. Jobs, and so decoders, are kept between rounds."""

    def __init__(self, contender: Contender) -> None:
        self._jobs = [contender.open_job() for _ in range(contender.workers)]

    def round(self, tasks: int) -> tuple[float, float]:
        """Does tasks 0..tasks-1; returns wall and CPU seconds."""
        counter = itertools.count()
        errors: list[BaseException] = []

        def work(job: Job) -> None:
            try:
                while (task := next(counter)) < tasks:
                    job(task)
            except BaseException as error:  # noqa: BLE001 - raised again below
                errors.append(error)

        threads = [threading.Thread(target=work, args=(job,)) for job in self._jobs]
        cpu, wall = time.process_time(), time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        spent = time.perf_counter() - wall, time.process_time() - cpu
        if errors:
            raise errors[0]
        return spent

    def close(self) -> None:
        """Lets the jobs go."""
        self._jobs.clear()


class ProcessWorkers:
    """Processes that take task after task from a shared counter."""

    def __init__(self, contender: Contender) -> None:
        context = get_context("spawn")
        self._counter = context.Value("q", 0)
        self._pipes: list[Connection] = []
        self._processes = []
        for _ in range(contender.workers):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, self._counter, contender.open_job), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)
        for pipe in self._pipes:
            pipe.recv()

    def round(self, tasks: int) -> tuple[float, float]:
        """Does tasks 0..tasks-1; returns wall and CPU seconds."""
        self._counter.value = 0
        wall = time.perf_counter()
        for pipe in self._pipes:
            pipe.send(tasks)
        cpu = [pipe.recv() for pipe in self._pipes]
        return time.perf_counter() - wall, sum(cpu)

    def close(self) -> None:
        """Ends the processes."""
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join()


def _serve(pipe: Connection, counter: Any, open_job: Callable[[], Job]) -> None:
    job = open_job()
    pipe.send("ready")
    while (tasks := pipe.recv()) is not None:
        cpu = time.process_time()
        while True:
            with counter.get_lock():
                task = counter.value
                counter.value = task + 1
            if task >= tasks:
                break
            job(task)
        pipe.send(time.process_time() - cpu)


def measure(contenders: Sequence[Contender], tasks: int, rounds: int) -> list[Timing]:
    """Times contenders in turn: one round each to warm up, then `rounds`, each begun by another contender."""
    workers = [ProcessWorkers(c) if c.processes else ThreadWorkers(c) for c in contenders]
    timings = [Timing() for _ in contenders]
    try:
        for number in range(-1, rounds):
            for step in range(len(contenders)):
                who = (step + number) % len(contenders)
                wall, cpu = workers[who].round(tasks)
                if number >= 0:
                    timings[who].rates.append(tasks / wall)
                    timings[who].cpu_ms.append(1e3 * cpu / tasks)
    finally:
        for group in workers:
            group.close()
    return timings


def ratio(ours: Timing, theirs: Timing) -> dict[str, float]:
    """How many times as fast ours is, round by round, and by CPU time."""
    pairs = [a / b for a, b in zip(ours.rates, theirs.rates, strict=True)]
    by_cpu = [b / a for a, b in zip(ours.cpu_ms, theirs.cpu_ms, strict=True)]
    return {
        "wall": statistics.median(pairs),
        "wall_min": min(pairs),
        "wall_max": max(pairs),
        "cpu": statistics.median(by_cpu),
    }


def write_json(path: Path, record: Mapping[str, Any]) -> None:
    """Writes a result with sorted keys and a newline at the end."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
