"""The engine that processes sources in processes on this machine.

An engine takes tasks and yields one outcome for each, in any order, even if workers die. Consecutive tasks of one file
should go to one worker, which then fetches and probes it once (`fastvid.sharding.work.tasks`). The engine decides
nothing else: the job decides what is encoded, what is retried, where samples are written and what goes into the ledger,
so every engine produces the same bytes. A new engine is a class with `run` and `close`, and a line in ENGINES.

A worker is a child process (`Child`) that runs a module of fastvid in a new interpreter. Messages
(`fastvid.runtime.processes`) go through its standard input and output; its standard error goes to a file. When the job
dies, its children and their children die as well. If a child crashes or hangs, only the task that it worked on gets a
transient outcome, which means that the job retries it.
"""

from __future__ import annotations

import contextlib
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from multiprocessing.connection import wait
from pathlib import Path
from typing import IO, Any, Final

import fastvid
from fastvid.errors import FormatError, UsageError, WorkerError
from fastvid.media.reasons import Reason
from fastvid.runtime.processes import SAFE_PATH, Inbox, available_cores, how_it_ended, pack
from fastvid.sharding.encode.profiles import Settings
from fastvid.sharding.work.tasks import Outcome, SourceTask, group_by_file

ENGINES: Final = {
    "local": "fastvid.sharding.engines.local:LocalEngine",
    "ray": "fastvid.sharding.job.ray_engine:RayEngine",
}
"""Import strings of the engines by name, so that an engine's dependencies are imported only when it is used."""

_READ_BYTES: Final = 1 << 20
_STDERR_TAIL_BYTES: Final = 4096
_SUMMARY_CHARS: Final = 300
_FRAME: Final = re.compile(r'File "(?:.*/)?([^"/]+)", line (\d+)')


class Child:
    """The job's end of the connection: starts a child process and exchanges messages with it."""

    def __init__(self, module: str, environment: Mapping[str, str] | None = None) -> None:
        # Let the child import this copy of fastvid.
        path = os.pathsep.join(filter(None, (str(Path(fastvid.__file__).parents[1]), os.environ.get("PYTHONPATH"))))
        # A file, not a pipe, so that nothing has to read it while the child runs.
        self._stderr: IO[bytes] = tempfile.TemporaryFile(prefix="fastvid-child-")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env=os.environ | SAFE_PATH | {"PYTHONPATH": path} | dict(environment or {}),
            # A separate process group: killing it also kills what the child has started, and Ctrl-C reaches only the
            # job.
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self.output = self._process.stdin, self._process.stdout
        self._inbox = Inbox()

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message. If the child has died, do nothing: `receive` raises EOFError."""
        with contextlib.suppress(BrokenPipeError):
            self._input.write(pack(message))
            self._input.flush()

    def receive(self) -> Iterator[tuple[dict[str, Any], memoryview]]:
        """Read once, blocking if `output` is empty, and yield the complete messages."""
        data = os.read(self.output.fileno(), _READ_BYTES)
        if not data:
            raise EOFError
        yield from self._inbox.add(data)

    def wait(self, seconds: float) -> None:
        """Wait at most this long for the child to exit by itself."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)

    def stop(self) -> None:
        """Kill the child and its children, so that `receive` raises EOFError in the thread that waits in it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def kill(self) -> tuple[int, str]:
        """Kill the child and its children; return its exit status and a summary of its standard error."""
        self.stop()
        status = self._process.wait()
        with contextlib.suppress(BrokenPipeError):
            self._input.close()
        self.output.close()
        size = os.fstat(self._stderr.fileno()).st_size
        tail = os.pread(self._stderr.fileno(), _STDERR_TAIL_BYTES, max(0, size - _STDERR_TAIL_BYTES))
        self._stderr.close()
        return status, _summarize_stderr(tail.decode("utf-8", "replace"))


class Parent:
    """The child's end of the connection.

    It moves the pipes off the standard descriptors, out of reach of stray prints. When the input closes, because the
    job has finished or died, the child's process group is killed at once.
    """

    def __init__(self) -> None:
        source, self._sink = os.dup(0), os.fdopen(os.dup(1), "wb")
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(null, 1)
        os.close(null)
        self.messages: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        threading.Thread(target=_read_messages, args=(source, self.messages), daemon=True).start()

    def send(self, piece: bytes) -> None:
        """Send a message made by `fastvid.runtime.processes.pack` or `Outcome.to_bytes`."""
        self._sink.write(piece)
        self._sink.flush()


def _summarize_stderr(text: str) -> str:
    """Summarise the end of a standard error: of a traceback, the error and where it was raised."""
    frames, (*_, last) = _FRAME.findall(text), ("", *text.rstrip().splitlines())
    if frames and not last.startswith(" "):
        return f"{last[:_SUMMARY_CHARS]} ({':'.join(frames[-1])})"
    return " ".join(text.split())[-_SUMMARY_CHARS:]


def _read_messages(source: int, messages: queue.SimpleQueue[dict[str, Any]]) -> None:
    inbox = Inbox()
    try:
        while data := os.read(source, _READ_BYTES):
            for header, _ in inbox.add(data):
                messages.put(header)
    finally:
        # The job is gone, and no result is needed any more: kill this process and its children.
        os.killpg(0, signal.SIGKILL)


# Time for a worker to import its libraries, before its first message.
_START_SECONDS: Final = 120.0
# Consecutive startup deaths tolerated: beyond that the machine is at fault, not the sources.
_MAX_STARTUP_DEATHS: Final = 5
# Time for a worker that has closed its output to exit by itself; killing it at once would hide its exit status.
_EXIT_SECONDS: Final = 2.0


class LocalEngine:
    """Encodes in processes on this machine, one file at a time in each.

    Tasks of one file go to one call of `fastvid.sharding.work.encode.encode_clips`, which may crash, hang or return
    garbage. The outcomes are the same as with one call for each task.
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
        self._unfinished: list[list[SourceTask]] = []

    def run(self, tasks: Iterable[SourceTask]) -> Iterator[Outcome]:
        """Encode the tasks' sources, taking a task only when a worker is free. May be called again.

        If a task's process died, its outcome is transient.
        """
        waiting, outcomes = group_by_file(tasks), list[Outcome]()
        while True:
            # Assign before yielding, so that workers are busy while the job stores the outcomes.
            self._assign(waiting)
            yield from outcomes
            outcomes.clear()
            busy = [worker for worker in self._pool if worker.tasks]
            if not busy:
                return
            try:
                self._poll(max(0.0, min(worker.left for worker in busy)), outcomes)
            except WorkerError:
                # Flush finished outcomes so that a resumed job does not repeat them.
                yield from outcomes
                raise

    def close(self) -> None:
        """Stop all workers at once, even those with a task in flight."""
        for worker in self._pool:
            worker.kill()
        self._pool = []

    def _assign(self, waiting: Iterator[list[SourceTask]]) -> None:
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
            worker.assign(tasks)

    def _poll(self, pause: float, outcomes: list[Outcome]) -> None:
        """Wait for messages or a deadline, and append the finished outcomes."""
        ready = wait([worker.output.fileno() for worker in self._pool], pause)
        for worker in [worker for worker in self._pool if worker.output.fileno() in ready]:
            try:
                for outcome in worker.outcomes():
                    outcomes.append(outcome)
                    self._startup_deaths = 0
            except (FormatError, EOFError):
                outcomes += self._remove(worker, stuck=False)
        for worker in [worker for worker in self._pool if worker.tasks and worker.left < 0]:
            outcomes += self._remove(worker, stuck=True)

    def _remove(self, worker: _WorkerProcess, *, stuck: bool) -> list[Outcome]:
        """Remove a worker that has died or is stuck; return the outcomes of the tasks that it worked on."""
        self._pool.remove(worker)
        if not stuck:
            worker.wait(_EXIT_SECONDS)
        status, error = worker.kill()
        how = how_it_ended(status)
        if worker.phase == "start":
            self._startup_deaths += 1
            if self._startup_deaths >= _MAX_STARTUP_DEATHS:
                raise WorkerError(f"{_MAX_STARTUP_DEATHS} workers in a row died on startup: {error or how}")
        spent = time.monotonic() - worker.since
        reason, message = Reason.CRASHED, f"the worker {how} in phase {worker.phase}{f': {error}' if error else ''}"
        if stuck:
            reason, message = Reason.TIMEOUT, f"phase {worker.phase} exceeded its limit of {worker.allowed:.0f} s"
        # Only the tasks in progress can have caused this; the others of the file go to another worker.
        blamed = [index for index in worker.tasks if index in worker.current]
        if worker.phase == "start":
            blamed = blamed[:1]
        rest = [task for index, task in worker.tasks.items() if index not in blamed]
        if rest:
            self._unfinished.append(rest)
        return [Outcome(index, reason=reason, message=message, transient=True, seconds=spent) for index in blamed]


class _WorkerProcess(Child):
    """One worker process: its unfinished tasks by index, the indices of those in progress, and its current phase."""

    def __init__(self, settings: Settings) -> None:
        super().__init__("fastvid.sharding.engines.worker")
        self.tasks: dict[int, SourceTask] = {}
        self.current: frozenset[int] = frozenset()
        self.phase, self.allowed, self.since = "start", _START_SECONDS, time.monotonic()
        self.send(asdict(settings))

    @property
    def left(self) -> float:
        """Seconds until the end of the phase's time limit."""
        return self.since + self.allowed - time.monotonic()

    def assign(self, tasks: Sequence[SourceTask]) -> None:
        """Send tasks of one file to the worker, which must be idle."""
        self.tasks, self.since = {task.index: task for task in tasks}, time.monotonic()
        self.current = frozenset(self.tasks)
        if self.phase != "start":
            self.phase, self.allowed = "wait", _START_SECONDS
        self.send({"tasks": [asdict(task) for task in tasks]})

    def outcomes(self) -> Iterator[Outcome]:
        """Process the messages that have arrived; yield the outcomes that are complete."""
        for header, blobs in self.receive():
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
