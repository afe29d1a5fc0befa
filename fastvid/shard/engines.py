"""Where sources are encoded: processes on this machine.

An engine takes tasks and gives one outcome for each, in any order. A worker that dies or is stuck costs its own task
one transient rejection, and is replaced.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any, Final, Protocol

import fastvid
from fastvid.errors import FormatError, WorkerError
from fastvid.shard.reasons import Reason
from fastvid.shard.wire import HEADER_BYTES, Outcome, Settings, Task, pack, piece_size, unpack

_READ: Final = 1 << 20
# Until a worker has sent the first sign of life it is importing its libraries.
_START_SECONDS: Final = 120.0
_TAIL: Final = 300
# Workers that die before they have done any work, one after another: then it is the machine, not the sources.
_MOST_STILLBORN: Final = 5


class Engine(Protocol):
    """Runs tasks somewhere."""

    def run(self, tasks: Iterable[Task]) -> Iterator[Outcome]:
        """Encodes the tasks' sources; takes a task only when there is a worker for it.

        Raises:
            WorkerError: Workers cannot be started.
        """
        ...

    def close(self) -> None:
        """Stops all workers at once, whatever they are doing."""
        ...


class LocalEngine:
    """Encodes in processes on this machine, one source at a time in each.

    Args:
        settings: What all tasks have in common.
        workers: Processes; by default one for each core that this process may use.
    """

    def __init__(self, settings: Settings, workers: int | None = None) -> None:
        self.settings = settings
        self.workers = workers or len(os.sched_getaffinity(0))
        self._pool: list[_Worker] = []
        self._stillborn = 0

    def __enter__(self) -> LocalEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, tasks: Iterable[Task]) -> Iterator[Outcome]:
        """See `Engine.run`."""
        waiting = iter(tasks)
        with selectors.DefaultSelector() as selector:
            for worker in self._pool:
                selector.register(worker.output, selectors.EVENT_READ, worker)
            while True:
                self._assign(waiting, selector)
                busy = [worker for worker in self._pool if worker.task is not None]
                if not busy:
                    return
                pause = max(0.0, min(worker.deadline for worker in busy) - time.monotonic())
                for key, _ in selector.select(pause):
                    outcome = self._hear(key.data, selector)
                    if outcome is not None:
                        yield outcome
                for worker in [worker for worker in self._pool if worker.overdue]:
                    outcome = self._lost(worker, selector, stuck=True)
                    if outcome is not None:
                        yield outcome

    def close(self) -> None:
        """See `Engine.close`."""
        for worker in self._pool:
            worker.end()
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
                selector.register(worker.output, selectors.EVENT_READ, worker)
            worker.give(task)

    def _hear(self, worker: _Worker, selector: selectors.BaseSelector) -> Outcome | None:
        try:
            outcome = worker.hear()
        except (FormatError, EOFError):
            return self._lost(worker, selector, stuck=False)
        if outcome is not None:
            self._stillborn = 0
        return outcome

    def _lost(self, worker: _Worker, selector: selectors.BaseSelector, *, stuck: bool) -> Outcome | None:
        selector.unregister(worker.output)
        self._pool.remove(worker)
        status, said = worker.end()
        task = worker.task
        if worker.phase == "start":
            self._stillborn += 1
            if self._stillborn >= _MOST_STILLBORN:
                raise WorkerError(f"{_MOST_STILLBORN} workers died before they began: {said or _how(status)}")
        if task is None:
            return None
        spent = time.monotonic() - worker.since
        if stuck:
            message = f"phase {worker.phase} did not end within its {worker.allowed:.0f} s"
            return Outcome(task.index, reason=Reason.TIMEOUT, message=message, transient=True, seconds=spent)
        message = f"the worker {_how(status)} in phase {worker.phase}{f': {said}' if said else ''}"
        return Outcome(task.index, reason=Reason.CRASHED, message=message, transient=True, seconds=spent)


class _Worker:
    """One worker process and what it is doing."""

    def __init__(self, settings: Settings) -> None:
        # A file, not a pipe: nobody has to read it while the worker lives.
        self._stderr: IO[bytes] = tempfile.TemporaryFile(prefix="fastvid-worker-")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", "fastvid.shard.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env=os.environ | {"PYTHONPATH": _search_path()},
            # A group of its own: killing the group takes the worker's ffmpeg too, and Ctrl-C reaches only the job.
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self.output = self._process.stdin, self._process.stdout
        os.set_blocking(self.output.fileno(), False)
        self._buffer = bytearray()
        self.task: Task | None = None
        self.phase, self.allowed, self.since = "start", _START_SECONDS, time.monotonic()
        self._send(settings.to_json())

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
        self._send(task.to_json())

    def hear(self) -> Outcome | None:
        """Takes in what has arrived; the outcome when it is complete.

        Raises:
            EOFError: The worker has closed its output.
            FormatError: It does not speak the protocol.
        """
        data = os.read(self.output.fileno(), _READ)
        if not data:
            raise EOFError
        self._buffer += data
        while len(self._buffer) >= HEADER_BYTES:
            size = piece_size(memoryview(self._buffer)[:HEADER_BYTES])
            if len(self._buffer) < size:
                return None
            header, blobs = unpack(bytes(self._buffer[:size]))
            del self._buffer[:size]
            if "phase" in header:
                self.phase, self.allowed, self.since = str(header["phase"]), float(header["seconds"]), time.monotonic()
                continue
            outcome = Outcome.from_parts(header, blobs)
            if self.task is None or outcome.index != self.task.index:
                raise FormatError("a worker answers what it was not asked")
            self.task, self.phase = None, "idle"
            return outcome
        return None

    def end(self) -> tuple[int, str]:
        """Kills the worker and its children; gives its exit status and the end of what it printed as errors."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        status = self._process.wait()
        with contextlib.suppress(BrokenPipeError):
            self._input.close()
        self.output.close()
        size = os.fstat(self._stderr.fileno()).st_size
        text = os.pread(self._stderr.fileno(), _TAIL, max(0, size - _TAIL)).decode("utf-8", "replace")
        self._stderr.close()
        return status, " ".join(text.split())

    def _send(self, message: dict[str, Any]) -> None:
        # A worker that died takes no message; its closed output tells.
        with contextlib.suppress(BrokenPipeError):
            self._input.write(pack(message))
            self._input.flush()


def _search_path() -> str:
    """Where a fresh interpreter finds this very fastvid."""
    ours = str(Path(fastvid.__file__).parents[1])
    theirs = os.environ.get("PYTHONPATH")
    return ours if not theirs else os.pathsep.join([ours, theirs])


def _how(status: int) -> str:
    if status >= 0:
        return f"exited with {status}"
    try:
        return f"died of {signal.Signals(-status).name}"
    except ValueError:
        return f"died of signal {-status}"
