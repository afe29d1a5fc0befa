"""Encode in local processes. If one crashes or hangs, only its task gets a transient outcome."""

from __future__ import annotations

import selectors
import time
from collections.abc import Iterable, Iterator
from typing import Any, Final

from fastvid.errors import FormatError, UsageError, WorkerError
from fastvid.media.reasons import Reason
from fastvid.runtime.children import how_it_ended
from fastvid.runtime.cores import available_cores
from fastvid.sharding.engines.child import Child
from fastvid.sharding.work.messages import Outcome, Settings, Task

# Time for a worker to import its libraries, before its first message.
_START_SECONDS: Final = 120.0
# Consecutive startup deaths tolerated: beyond that the machine is at fault, not the sources.
_MAX_STARTUP_DEATHS: Final = 5
# Time for a worker that has closed its output to exit by itself; killing it at once would hide its exit status.
_EXIT_SECONDS: Final = 2.0


class LocalEngine:
    """Encodes in processes on this machine, one source at a time in each.

    Args:
        settings: Settings that all tasks share.
        workers: Number of processes; by default one per core that this process may use.
        address: Must be None.
    """

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

    def __enter__(self) -> LocalEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, tasks: Iterable[Task]) -> Iterator[Outcome]:
        """See `fastvid.sharding.engines.engine.Engine`."""
        waiting = iter(tasks)
        outcomes: list[Outcome] = []
        with selectors.DefaultSelector() as selector:
            for worker in self._pool:
                selector.register(worker.child.output, selectors.EVENT_READ, worker)
            while True:
                # Assign before yielding, so that workers are busy while the job stores the outcomes.
                self._assign(waiting, selector)
                yield from outcomes
                outcomes.clear()
                busy = [worker for worker in self._pool if worker.task is not None]
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

    def _assign(self, waiting: Iterator[Task], selector: selectors.BaseSelector) -> None:
        idle = [worker for worker in self._pool if worker.task is None]
        while idle or len(self._pool) < self.workers:
            task = next(waiting, None)
            if task is None:
                return
            if idle:
                worker = idle.pop()
            else:
                worker = _WorkerProcess(self.settings)
                self._pool.append(worker)
                selector.register(worker.child.output, selectors.EVENT_READ, worker)
            worker.assign(task)

    def _poll(self, selector: selectors.BaseSelector, pause: float, outcomes: list[Outcome]) -> None:
        """Wait for messages or a deadline, and append the finished outcomes."""
        for key, _ in selector.select(pause):
            outcome = self._receive(key.data, selector)
            if outcome is not None:
                outcomes.append(outcome)
        for worker in [worker for worker in self._pool if worker.overdue]:
            outcome = self._remove(worker, selector, stuck=True)
            if outcome is not None:
                outcomes.append(outcome)

    def _receive(self, worker: _WorkerProcess, selector: selectors.BaseSelector) -> Outcome | None:
        try:
            outcome = worker.receive()
        except (FormatError, EOFError):
            return self._remove(worker, selector, stuck=False)
        if outcome is not None:
            self._startup_deaths = 0
        return outcome

    def _remove(self, worker: _WorkerProcess, selector: selectors.BaseSelector, *, stuck: bool) -> Outcome | None:
        """Remove a worker that has died or is stuck; return the outcome of its task, if it had one."""
        selector.unregister(worker.child.output)
        self._pool.remove(worker)
        if not stuck:
            worker.child.wait(_EXIT_SECONDS)
        status, error = worker.child.kill()
        task, how = worker.task, how_it_ended(status)
        if worker.phase == "start":
            self._startup_deaths += 1
            if self._startup_deaths >= _MAX_STARTUP_DEATHS:
                raise WorkerError(f"{_MAX_STARTUP_DEATHS} workers in a row died on startup: {error or how}")
        if task is None:
            return None
        spent = time.monotonic() - worker.since
        if stuck:
            message = f"phase {worker.phase} exceeded its limit of {worker.allowed:.0f} s"
            return Outcome(task.index, reason=Reason.TIMEOUT, message=message, transient=True, seconds=spent)
        message = f"the worker {how} in phase {worker.phase}{f': {error}' if error else ''}"
        return Outcome(task.index, reason=Reason.CRASHED, message=message, transient=True, seconds=spent)


class _WorkerProcess:
    """One worker process, its task and its phase."""

    def __init__(self, settings: Settings) -> None:
        self.child = Child("fastvid.sharding.engines.worker")
        self.task: Task | None = None
        self.phase, self.allowed, self.since = "start", _START_SECONDS, time.monotonic()
        self.child.send(settings.to_json())

    @property
    def deadline(self) -> float:
        """The end of the phase's time limit, on the monotonic clock."""
        return self.since + self.allowed

    @property
    def overdue(self) -> bool:
        """Whether it has a task and is past its deadline."""
        return self.task is not None and time.monotonic() > self.deadline

    def assign(self, task: Task) -> None:
        """Send a task to the worker, which must be idle."""
        self.task, self.since = task, time.monotonic()
        if self.phase != "start":
            self.phase, self.allowed = "wait", _START_SECONDS
        self.child.send(task.to_json())

    def receive(self) -> Outcome | None:
        """Process the messages that have arrived; return the outcome if it is complete.

        Raises:
            EOFError: If the worker has closed its output.
            FormatError: If it violates the protocol.
        """
        outcome: Outcome | None = None
        header: dict[str, Any]
        for header, blobs in self.child.receive():
            if outcome is not None:
                raise FormatError("the worker sent data after its outcome")
            if "phase" in header:
                self.phase, self.allowed, self.since = str(header["phase"]), float(header["seconds"]), time.monotonic()
                continue
            outcome = Outcome.from_parts(header, blobs)
            if self.task is None or outcome.index != self.task.index:
                raise FormatError("the worker replied to a task it was not given")
        if outcome is not None:
            self.task, self.phase = None, "idle"
        return outcome
