"""Time contenders in turn: rounds of the same tasks, wall and CPU time of each, and ratios per round.

Taking turns spreads the machine's other load evenly over all contenders. CPU time is recorded as well as wall time,
because it hardly changes when the machine is shared.
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

from fastvid.runtime.children import safe_path


class TaskRunner(Protocol):
    """Runs task number n; each worker creates its own."""

    def __call__(self, task: int, /) -> object: ...


@dataclass(frozen=True, eq=False)
class Contender:
    """One of the implementations that are compared."""

    name: str
    settings: Mapping[str, Any]
    open_runner: Callable[[], TaskRunner]
    workers: int
    processes: bool = False
    chunk: int = 1

    @property
    def label(self) -> str:
        """Name and settings on one line."""
        kind = "processes" if self.processes else "threads"
        return ", ".join([self.name, f"{self.workers} {kind}", *(f"{k}={v}" for k, v in self.settings.items())])


@dataclass
class RoundTimes:
    """Measurements of one contender, one per round."""

    rates: list[float] = field(default_factory=list)  # tasks per second of wall time
    cpu_ms: list[float] = field(default_factory=list)  # CPU milliseconds per task, all workers together

    def summary(self) -> dict[str, float]:
        """Return the median and range."""
        return {
            "rate": statistics.median(self.rates),
            "rate_min": min(self.rates),
            "rate_max": max(self.rates),
            "cpu_ms": statistics.median(self.cpu_ms),
            "cpu_ms_min": min(self.cpu_ms),
            "cpu_ms_max": max(self.cpu_ms),
        }

    def cost(self, by: str) -> float:
        """Return the median milliseconds of a task, by "wall" or "cpu" time."""
        return statistics.median(self.cpu_ms if by == "cpu" else [1e3 / rate for rate in self.rates])


class ThreadWorkers:
    """Threads that take tasks in turn; task runners, and so open decoders, are kept between rounds."""

    def __init__(self, contender: Contender) -> None:
        self._chunk = contender.chunk
        self._runners = [contender.open_runner() for _ in range(contender.workers)]

    def round(self, tasks: int) -> tuple[float, float]:
        """Run tasks 0 to tasks - 1 and return wall and CPU seconds."""
        counter = itertools.count(step=self._chunk)
        errors: list[BaseException] = []

        def work(runner: Any) -> None:
            try:
                while (task := next(counter)) < tasks:
                    if self._chunk > 1:
                        runner.run(range(task, min(task + self._chunk, tasks)))
                    else:
                        runner(task)
            except BaseException as error:  # noqa: BLE001 - raised again below
                errors.append(error)

        threads = [threading.Thread(target=work, args=(runner,)) for runner in self._runners]
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
        """Release the task runners."""
        self._runners.clear()


class ProcessWorkers:
    """Processes that take tasks one after another from a shared counter."""

    def __init__(self, contender: Contender) -> None:
        context = get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        with safe_path():
            self._counter = context.Value("q", 0)  # starts a process, too: the resource tracker
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
        # Bytes: what decodes a corpus is not unpickled here.
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
    """Time contenders in turn: a warm-up round, then `rounds`, each starting with another contender."""
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
    """Return by what factor ours is faster: median and range over rounds, by wall and by CPU time."""
    pairs = [a / b for a, b in zip(ours.rates, theirs.rates, strict=True)]
    by_cpu = [b / a for a, b in zip(ours.cpu_ms, theirs.cpu_ms, strict=True)]
    return {
        "wall": statistics.median(pairs),
        "wall_min": min(pairs),
        "wall_max": max(pairs),
        "cpu": statistics.median(by_cpu),
        "cpu_min": min(by_cpu),
        "cpu_max": max(by_cpu),
    }
