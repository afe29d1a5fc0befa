"""Encodes in processes on this machine. One that dies or is stuck costs its own task one transient outcome."""

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

# Until a worker has sent the first sign of life it is importing its libraries.
_START_SECONDS: Final = 120.0
# Workers that die before they have done any work, one after another: then it is the machine, not the sources.
_MOST_STILLBORN: Final = 5
# How long one that has closed its output may take to end by itself; killed at once, it could not say how it ended.
_LEAVE_SECONDS: Final = 2.0


class LocalEngine:
    """Encodes in processes on this machine, one source at a time in each.

    Args:
        settings: What all tasks have in common.
        workers: Processes; by default one for each core that this process may use.
        address: None; this machine has none.
    """

    def __init__(self, settings: Settings, workers: int | None = None, address: str | None = None) -> None:
        if address is not None:
            raise UsageError(f"the local engine takes no address, not even {address!r}")
        self.settings = settings
        self.workers = workers or available_cores()
        self._pool: list[_Worker] = []
        self._stillborn = 0

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
                # Before the outcomes are given away: while the job writes them down, the workers go on.
                self._assign(waiting, selector)
                yield from outcomes
                outcomes.clear()
                busy = [worker for worker in self._pool if worker.task is not None]
                if not busy:
                    return
                pause = max(0.0, min(worker.deadline for worker in busy) - time.monotonic())
                try:
                    self._look(selector, pause, outcomes)
                except WorkerError:
                    # What others have done is not done again when the job goes on.
                    yield from outcomes
                    raise

    def close(self) -> None:
        """See `fastvid.sharding.engines.engine.Engine`."""
        for worker in self._pool:
            worker.child.end()
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
                worker = _Worker(self.settings)
                self._pool.append(worker)
                selector.register(worker.child.output, selectors.EVENT_READ, worker)
            worker.give(task)

    def _look(self, selector: selectors.BaseSelector, pause: float, outcomes: list[Outcome]) -> None:
        """Takes in what workers have to say, and adds what came out."""
        for key, _ in selector.select(pause):
            outcome = self._hear(key.data, selector)
            if outcome is not None:
                outcomes.append(outcome)
        for worker in [worker for worker in self._pool if worker.overdue]:
            outcome = self._lost(worker, selector, stuck=True)
            if outcome is not None:
                outcomes.append(outcome)

    def _hear(self, worker: _Worker, selector: selectors.BaseSelector) -> Outcome | None:
        try:
            outcome = worker.hear()
        except (FormatError, EOFError):
            return self._lost(worker, selector, stuck=False)
        if outcome is not None:
            self._stillborn = 0
        return outcome

    def _lost(self, worker: _Worker, selector: selectors.BaseSelector, *, stuck: bool) -> Outcome | None:
        selector.unregister(worker.child.output)
        self._pool.remove(worker)
        if not stuck:
            worker.child.leave(_LEAVE_SECONDS)
        status, said = worker.child.end()
        task, how = worker.task, how_it_ended(status)
        if worker.phase == "start":
            self._stillborn += 1
            if self._stillborn >= _MOST_STILLBORN:
                raise WorkerError(f"{_MOST_STILLBORN} workers died before they began: {said or how}")
        if task is None:
            return None
        spent = time.monotonic() - worker.since
        if stuck:
            message = f"phase {worker.phase} did not end within its {worker.allowed:.0f} s"
            return Outcome(task.index, reason=Reason.TIMEOUT, message=message, transient=True, seconds=spent)
        message = f"the worker {how} in phase {worker.phase}{f': {said}' if said else ''}"
        return Outcome(task.index, reason=Reason.CRASHED, message=message, transient=True, seconds=spent)


class _Worker:
    """One worker process and what it is doing."""

    def __init__(self, settings: Settings) -> None:
        self.child = Child("fastvid.sharding.engines.worker")
        self.task: Task | None = None
        self.phase, self.allowed, self.since = "start", _START_SECONDS, time.monotonic()
        self.child.send(settings.to_json())

    @property
    def deadline(self) -> float:
        """When the phase must have ended, on the monotonic clock."""
        return self.since + self.allowed

    @property
    def overdue(self) -> bool:
        """Whether it is at work and past its deadline."""
        return self.task is not None and time.monotonic() > self.deadline

    def give(self, task: Task) -> None:
        """Hands over a task; the worker has none."""
        self.task, self.since = task, time.monotonic()
        if self.phase != "start":
            self.phase, self.allowed = "wait", _START_SECONDS
        self.child.send(task.to_json())

    def hear(self) -> Outcome | None:
        """Takes in what has arrived; the outcome when it is complete.

        Raises:
            EOFError: The worker has closed its output.
            FormatError: It does not speak the protocol.
        """
        outcome: Outcome | None = None
        header: dict[str, Any]
        for header, blobs in self.child.hear():
            if outcome is not None:
                raise FormatError("a worker goes on after its answer")
            if "phase" in header:
                self.phase, self.allowed, self.since = str(header["phase"]), float(header["seconds"]), time.monotonic()
                continue
            outcome = Outcome.from_parts(header, blobs)
            if self.task is None or outcome.index != self.task.index:
                raise FormatError("a worker answers what it was not asked")
        if outcome is not None:
            self.task, self.phase = None, "idle"
        return outcome
