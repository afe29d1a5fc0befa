"""Contenders that take turns: rounds of the same tasks, wall and CPU time of each, and ratios round by round.

What else the machine does then hits all alike. CPU time is recorded beside wall time: it hardly changes when the
machine is shared.
"""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, Protocol


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
        chunk: Tasks that a worker takes at once; with more than one its job has ``run(range)``.
    """

    name: str
    settings: Mapping[str, Any]
    open_job: Callable[[], Job]
    workers: int
    processes: bool = False
    chunk: int = 1

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
        self._chunk = contender.chunk
        self._jobs = [contender.open_job() for _ in range(contender.workers)]

    def round(self, tasks: int) -> tuple[float, float]:
        """Does tasks 0..tasks-1; returns wall and CPU seconds."""
        counter = itertools.count(step=self._chunk)
        errors: list[BaseException] = []

        def work(job: Any) -> None:
            try:
                while (task := next(counter)) < tasks:
                    if self._chunk > 1:
                        job.run(range(task, min(task + self._chunk, tasks)))
                    else:
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
            pipe.recv_bytes()

    def round(self, tasks: int) -> tuple[float, float]:
        """Does tasks 0..tasks-1; returns wall and CPU seconds."""
        self._counter.value = 0
        wall = time.perf_counter()
        for pipe in self._pipes:
            pipe.send(tasks)
        # Bytes: what decodes a corpus is not unpickled here.
        cpu = [float(pipe.recv_bytes()) for pipe in self._pipes]
        return time.perf_counter() - wall, sum(cpu)

    def close(self) -> None:
        """Ends the processes."""
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join()


def _serve(pipe: Connection, counter: Any, open_job: Callable[[], Job]) -> None:
    job = open_job()
    pipe.send_bytes(b"ready")
    while (tasks := pipe.recv()) is not None:
        cpu = time.process_time()
        while True:
            with counter.get_lock():
                task = counter.value
                counter.value = task + 1
            if task >= tasks:
                break
            job(task)
        pipe.send_bytes(repr(time.process_time() - cpu).encode())


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
