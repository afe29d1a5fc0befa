"""Encode in local processes. If one crashes or hangs, only the task that it worked on gets a transient outcome."""

from __future__ import annotations

import selectors
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

from fastvid.errors import FormatError, UsageError, WorkerError
from fastvid.media.reasons import Reason
from fastvid.runtime.children import how_it_ended
from fastvid.runtime.cores import available_cores
from fastvid.sharding.engines.child import Child
from fastvid.sharding.work.group import group_by_file
from fastvid.sharding.work.messages import Outcome, Settings, SourceTask

# Time for a worker to import its libraries, before its first message.
_START_SECONDS: Final = 120.0
# Consecutive startup deaths tolerated: beyond that the machine is at fault, not the sources.
_MAX_STARTUP_DEATHS: Final = 5
# Time for a worker that has closed its output to exit by itself; killing it at once would hide its exit status.
_EXIT_SECONDS: Final = 2.0


class LocalEngine:
    """Encodes in processes on this machine, one file at a time in each."""

    def __init__(self, settings: Settings, workers: int | None = None, address: str | None = None) -> None:
        if address is not None:
            raise UsageError(
                f"the local engine has no address, but {address!r} was given",
                hint="use --ray-address with --engine ray",
            )
        self.settings = settings
        self.workers = workers or available_cores()
        self._pool: list[_WorkerProcess] = []
        self._startup_deaths = 0
        self._unfinished: list[list[SourceTask]] = []

    def __enter__(self) -> LocalEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, tasks: Iterable[SourceTask]) -> Iterator[Outcome]:
        """See `fastvid.sharding.engines.engine.Engine`."""
        waiting = group_by_file(tasks)
        outcomes: list[Outcome] = []
        with selectors.DefaultSelector() as selector:
            for worker in self._pool:
                selector.register(worker.child.output, selectors.EVENT_READ, worker)
            while True:
                # Assign before yielding, so that workers are busy while the job stores the outcomes.
                self._assign(waiting, selector)
                yield from outcomes
                outcomes.clear()
                busy = [worker for worker in self._pool if worker.tasks]
                if not busy:
                    return
                pause = max(0.0, min(worker.deadline for worker in busy) - time.monotonic())
                try:
                    self._poll(selector, pause, outcomes)
                except WorkerError:
                    # Flush finished outcomes so that a resumed job does not repeat them.
                    yield from outcomes
                    raise

    def close(self) -> None:
        """See `fastvid.sharding.engines.engine.Engine`."""
        for worker in self._pool:
            worker.child.kill()
        self._pool = []

    def _assign(self, waiting: Iterator[list[SourceTask]], selector: selectors.BaseSelector) -> None:
        idle = [worker for worker in self._pool if not worker.tasks]
        while idle or len(self._pool) < self.workers:
            tasks = self._unfinished.pop() if self._unfinished else next(waiting, None)
            if tasks is None:
                return
            if idle:
                worker = idle.pop()
            else:
                worker = _WorkerProcess(self.settings)
                self._pool.append(worker)
                selector.register(worker.child.output, selectors.EVENT_READ, worker)
            worker.assign(tasks)

    def _poll(self, selector: selectors.BaseSelector, pause: float, outcomes: list[Outcome]) -> None:
        """Wait for messages or a deadline, and append the finished outcomes."""
        for key, _ in selector.select(pause):
            worker: _WorkerProcess = key.data
            try:
                for outcome in worker.receive():
                    outcomes.append(outcome)
                    self._startup_deaths = 0
            except (FormatError, EOFError):
                outcomes += self._remove(worker, selector, stuck=False)
        for worker in [worker for worker in self._pool if worker.overdue]:
            outcomes += self._remove(worker, selector, stuck=True)

    def _remove(self, worker: _WorkerProcess, selector: selectors.BaseSelector, *, stuck: bool) -> list[Outcome]:
        """Remove a worker that has died or is stuck; return the outcomes of the tasks that it worked on."""
        selector.unregister(worker.child.output)
        self._pool.remove(worker)
        if not stuck:
            worker.child.wait(_EXIT_SECONDS)
        status, error = worker.child.kill()
        how = how_it_ended(status)
        if worker.phase == "start":
            self._startup_deaths += 1
            if self._startup_deaths >= _MAX_STARTUP_DEATHS:
                raise WorkerError(f"{_MAX_STARTUP_DEATHS} workers in a row died on startup: {error or how}")
        spent = time.monotonic() - worker.since
        reason, message = Reason.CRASHED, f"the worker {how} in phase {worker.phase}{f': {error}' if error else ''}"
        if stuck:
            reason, message = Reason.TIMEOUT, f"phase {worker.phase} exceeded its limit of {worker.allowed:.0f} s"
        # Other clips of the file are not to blame, and go to another worker.
        blamed = [index for index in worker.tasks if index in worker.current]
        if worker.phase == "start":
            blamed = blamed[:1]
        rest = [task for index, task in worker.tasks.items() if index not in blamed]
        if rest:
            self._unfinished.append(rest)
        return [Outcome(index, reason=reason, message=message, transient=True, seconds=spent) for index in blamed]


class _WorkerProcess:
    """One worker process, its unfinished tasks by index, those that it works on, and its phase."""

    def __init__(self, settings: Settings) -> None:
        self.child = Child("fastvid.sharding.engines.worker")
        self.tasks: dict[int, SourceTask] = {}
        self.current: frozenset[int] = frozenset()
        self.phase, self.allowed, self.since = "start", _START_SECONDS, time.monotonic()
        self.child.send(settings.to_json())

    @property
    def deadline(self) -> float:
        """The end of the phase's time limit, on the monotonic clock."""
        return self.since + self.allowed

    @property
    def overdue(self) -> bool:
        """Whether it has tasks and is past its deadline."""
        return bool(self.tasks) and time.monotonic() > self.deadline

    def assign(self, tasks: Sequence[SourceTask]) -> None:
        """Send tasks of one file to the worker, which must be idle."""
        self.tasks, self.since = {task.index: task for task in tasks}, time.monotonic()
        self.current = frozenset(self.tasks)
        if self.phase != "start":
            self.phase, self.allowed = "wait", _START_SECONDS
        self.child.send({"tasks": [task.to_json() for task in tasks]})

    def receive(self) -> Iterator[Outcome]:
        """Process the messages that have arrived; yield the outcomes that are complete."""
        header: dict[str, Any]
        for header, blobs in self.child.receive():
            if not self.tasks:
                raise FormatError("the worker sent data after its last outcome")
            if "phase" in header:
                self.phase, self.allowed, self.since = str(header["phase"]), float(header["seconds"]), time.monotonic()
                continue
            if "begins" in header:
                self.current = frozenset(header["begins"])
                continue
            outcome = Outcome.from_parts(header, blobs)
            if self.tasks.pop(outcome.index, None) is None:
                raise FormatError("the worker replied to a task it was not given")
            if not self.tasks:
                self.phase = "idle"
            yield outcome
