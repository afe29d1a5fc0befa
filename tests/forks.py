"""Start processes that have already imported torch and fastvid, which saves seconds over a fresh interpreter.

A server imports the modules of training and of jobs once per test session, and forks what is asked for by the session
or by a process that it forked. There a module runs as with ``python -W error -m``, in its own environment and folder,
and can be killed like any other. The worker processes of jobs and loaders are forked as well, see `fork_workers`.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import importlib
import json
import multiprocessing
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, Final

from bench.common.ports import reserved_port
from fastvid.load.workers import processes
from fastvid.sharding.engines import local

ROOT = Path(__file__).parents[1]
# Otherwise torch imports _dynamo with the first optimizer, which takes two seconds.
_READY: Final = (
    "torch._dynamo", "torch.distributed", "torch.nn.parallel", "fastvid.train.run.launch",
    "fastvid.sharding.engines.worker", "fastvid.load.workers.worker_process", "tests.runtime.preload",
)  # fmt: skip
_ADDRESS: Final = "FASTVID_TESTS_FORKS"  # the environment variable with the path of the server's socket
_PYTHON: Final = sys.executable
STARTERS: Final = (local, processes)
"""The modules that start workers."""


class Process:
    """A process that the server has forked, with what is used of `subprocess.Popen`.

    `words`: what follows ``python``: ``-m`` and a module, or ``-c`` and code, with arguments. `descriptors`: the open
    files that it gets, by their numbers there. `job`: whether it is the first of a new session.
    """

    def __init__(
        self,
        words: Sequence[str],
        folder: str,
        variables: Mapping[str, str],
        descriptors: Mapping[int, int],
        *,
        job: bool,
    ) -> None:
        self.args, self.returncode = [_PYTHON, *words], None
        order = json.dumps([list(words), folder, dict(variables), list(descriptors), job]).encode()
        self._line = socket.socket(socket.AF_UNIX)
        self._line.connect(serve())
        socket.send_fds(self._line, [len(order).to_bytes(8)], list(descriptors.values()))
        self._line.sendall(order)
        self.pid = self._told()

    def __del__(self) -> None:
        self._line.close()

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end and return the exit code, or the negative number of the signal that killed it."""
        if self.returncode is None:
            self._line.settimeout(timeout)
            try:
                self.returncode = self._told()
            except (TimeoutError, BlockingIOError) as error:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0) from error
            self._line.close()
        return self.returncode

    def _told(self) -> int:
        """Return the next number that is told of it: its id when it begins, then its exit code."""
        told = self._line.recv(8, socket.MSG_WAITALL)
        if len(told) < 8:
            raise ConnectionError("the server of forks has ended, or cannot start this process")
        return int.from_bytes(told, signed=True)

    def poll(self) -> int | None:
        """Return the exit code, or None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send it a signal."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it."""
        self.send_signal(signal.SIGKILL)


def start(module: str, *arguments: object, folder: Path = ROOT, **environment: str) -> Process:
    """Start a module, or "-c" and code, with arguments, in a folder, with additional environment variables.

    Its output goes where this process' output goes.
    """
    with open(os.devnull, "rb") as nothing:
        return _started(module, arguments, folder, environment, {0: nothing.fileno(), 1: 1, 2: 2})


def _started(
    module: str,
    arguments: Sequence[object],
    folder: Path,
    environment: Mapping[str, str],
    descriptors: Mapping[int, int],
) -> Process:
    words = [*(() if module == "-c" else ("-m",)), module, *map(str, arguments)]
    return Process(["-W", "error", *words], str(folder), os.environ | environment, descriptors, job=False)


def wait(process: Process, seconds: float = 250.0) -> int:
    """Wait for a process and return its exit code, or the negative number of the signal that killed it.

    Raises:
        TimeoutError: If it does not exit in time; it is killed.
    """
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        raise TimeoutError(f"a process did not exit within {seconds:g} s") from None


class Command:
    """A process whose output is kept, with the methods of `subprocess.Popen` that tests need.

    Args:
        module: The module that it runs, or "-c" for code.
        *arguments: Its arguments; the first one is the code.
        folder: Its working directory.
        **environment: Additional environment variables.
    """

    def __init__(self, module: str, *arguments: object, folder: Path = ROOT, **environment: str) -> None:
        self.args = [module, *map(str, arguments)]
        self._kept = Path(tempfile.mkdtemp(prefix="fastvid-output-"))
        self._said: tuple[str, str] | None = None
        with (
            open(os.devnull, "rb") as nothing,
            open(self._kept / "1", "wb") as out,
            open(self._kept / "2", "wb") as err,
        ):
            descriptors = {number: file.fileno() for number, file in enumerate((nothing, out, err))}
            self._process = _started(module, arguments, folder, environment, descriptors)
        self.pid, self.poll, self.send_signal = self._process.pid, self._process.poll, self._process.send_signal

    @property
    def returncode(self) -> int | None:
        """The exit code, a negative number for a signal, or None."""
        return self.poll()

    def wait(self, timeout: float = 250.0) -> int:
        """Wait for its end and return the exit code."""
        code = wait(self._process, timeout)
        if self._said is None:
            self._said = (self._kept / "1").read_text(), (self._kept / "2").read_text()
            shutil.rmtree(self._kept)
        return code

    def communicate(self, timeout: float = 250.0) -> tuple[str, str]:
        """Wait for its end and return its standard output and its standard error."""
        self.wait(timeout)
        assert self._said is not None
        return self._said


def run(module: str, *arguments: object, folder: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a module to its end, as `subprocess.run` does with ``capture_output`` and ``text``."""
    command = Command(module, *arguments, folder=folder, **environment)
    out, err = command.communicate()
    return subprocess.CompletedProcess(command.args, command.wait(), out, err)


def fastvid(*arguments: object, fault: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command ``fastvid``; `fault` is a point of `fastvid.runtime.faults` that ends it."""
    return run("fastvid", *arguments, FASTVID_FAULT=fault, **environment)


def start_fastvid(*arguments: object, fault: str = "", **environment: str) -> Command:
    """Start the command ``fastvid``."""
    return Command("fastvid", *arguments, FASTVID_FAULT=fault, **environment)


def ranks(
    world: int, module: str, *arguments: object, folder: Path = ROOT, **environment: str
) -> list[subprocess.CompletedProcess[str]]:
    """Run a module to its end as the processes of one world, with the variables that torchrun sets."""
    with reserved_port() as port:
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_WORLD_SIZE": str(world)}
        shared |= {"WORLD_SIZE": str(world)} | environment
        started = [
            Command(module, *arguments, folder=folder, RANK=str(rank), LOCAL_RANK=str(rank), **shared)
            for rank in range(world)
        ]
        said = [command.communicate() for command in started]
    return [
        subprocess.CompletedProcess(command.args, command.wait(), *texts)
        for command, texts in zip(started, said, strict=True)
    ]


def fork_workers() -> None:
    """Let this process, and what it forks, fork the workers of jobs and loaders instead of starting interpreters."""
    for module in STARTERS:
        module.subprocess = SimpleNamespace(**vars(subprocess) | {"Popen": _popen})  # type: ignore[attr-defined]


def _popen(
    command: Sequence[str],
    *,
    stdin: int,
    stdout: int,
    env: Mapping[str, str],
    stderr: IO[bytes] | None = None,
    pass_fds: Sequence[int] = (),
    start_new_session: bool = False,
) -> Any:
    """Like `subprocess.Popen`; another program than this Python is started as ever."""
    if command[0] != _PYTHON:
        options = {"pass_fds": pass_fds, "start_new_session": start_new_session}
        return subprocess.Popen(command, stdin=stdin, stdout=stdout, stderr=stderr, env=env, **options)
    with contextlib.ExitStack() as theirs:
        ends: dict[int, int] = {2: 2 if stderr is None else stderr.fileno()} | {number: number for number in pass_fds}
        kept = {}
        for number, (name, how) in enumerate((("stdin", stdin), ("stdout", stdout))):
            if how == subprocess.DEVNULL:
                ends[number] = os.open(os.devnull, os.O_RDWR)
            else:
                pipe = os.pipe()
                ends[number], kept[name] = pipe[number], os.fdopen(pipe[1 - number], ("wb", "rb")[number])
            theirs.callback(os.close, ends[number])
        process = Process(command[1:], os.getcwd(), env, ends, job=start_new_session)
    vars(process).update(kept)
    return process


def serve() -> str:
    """Start the server, if there is none; return the path of its socket."""
    if _ADDRESS not in os.environ:
        path = os.path.join(tempfile.mkdtemp(prefix="fastvid-forks-"), "socket")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen(64)
            environment = os.environ | {_ADDRESS: path}
            command = [_PYTHON, "-m", "tests.forks", str(listener.fileno())]
            # It also ends if this process is killed: then its standard input ends.
            server = subprocess.Popen(
                command, stdin=subprocess.PIPE, cwd=ROOT, env=environment, pass_fds=(listener.fileno(),)
            )
        atexit.register(server.communicate)
        os.environ[_ADDRESS] = path
    return os.environ[_ADDRESS]


def _serve(listener: socket.socket) -> None:
    """Fork what is asked for until the standard input ends; then kill what is left."""
    lines: dict[int, socket.socket] = {}
    wake, waker = socket.socketpair()
    waker.setblocking(False)
    signal.set_wakeup_fd(waker.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        ready = select.select([listener, wake, 0], [], [])[0]
        if 0 in ready:
            break
        if wake in ready:
            wake.recv(4096)
            for pid in list(lines):
                if (ended := os.waitpid(pid, os.WNOHANG))[0]:
                    with contextlib.suppress(OSError), lines.pop(pid) as line:
                        line.sendall(os.waitstatus_to_exitcode(ended[1]).to_bytes(8, signed=True))
        if listener in ready:
            line, found = listener.accept()[0], list[int]()
            try:
                size, found, *_ = socket.recv_fds(line, 8, 16)
                order = json.loads(line.recv(int.from_bytes(size), socket.MSG_WAITALL))
            except (OSError, ValueError):  # who asked was killed meanwhile
                line.close()
            else:
                if not (pid := os.fork()):
                    for one in (listener, wake, waker, *lines.values()):
                        one.close()
                    _become(line, found, *order)
                lines[pid] = line
            for descriptor in found:
                os.close(descriptor)
    for pid in lines:
        os.kill(pid, signal.SIGKILL)
    os._exit(0)  # not through destructors, which report what `gc.freeze` kept


def _become(
    line: socket.socket, found: list[int], words: list[str], folder: str, variables: dict[str, str], numbers: list[int],
    job: bool,
) -> None:  # fmt: skip
    """Turn this fork of the server into what was asked for; never returns."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if job:
        os.setsid()
    with contextlib.suppress(OSError), line:  # who asked may have been killed meanwhile
        line.sendall(os.getpid().to_bytes(8))
    # First out of the way of the numbers that they are to have.
    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, max(numbers) + 1) for descriptor in found]
    for descriptor in found:
        os.close(descriptor)
    for descriptor, number in zip(moved, numbers, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    process = multiprocessing.get_context("fork").Process(target=_run, args=(words, folder, variables))
    # What a process of `multiprocessing` does from its first to its last line.
    os._exit(process._bootstrap())  # type: ignore[attr-defined]


def _run(words: list[str], folder: str, variables: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(folder)
    tempfile.tempdir = None  # TMPDIR is read again
    # An interpreter reads this one variable when it starts.
    sys.path[:0] = filter(None, variables.get("PYTHONPATH", "").split(os.pathsep))
    if words[0] == "-W":
        warnings.simplefilter(words[1])
        words = words[2:]
    kind, what, *words = words
    sys.argv = ["-c" if kind == "-c" else what, *words]
    if kind == "-c":
        exec(compile(what, "-c", "exec"), {"__name__": "__main__"})
    elif hasattr(ready := sys.modules.get(what), "main"):
        ready.main()
    else:
        runpy.run_module(what, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    for _module in _READY:
        with contextlib.suppress(ImportError):  # where an extra is not installed
            importlib.import_module(_module)
    forks = importlib.import_module("tests.forks")
    forks.fork_workers()
    forks._serve(socket.socket(fileno=int(sys.argv[1])))
