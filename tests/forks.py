"""Start processes that have already imported torch and fastvid, which saves seconds over a fresh interpreter.

Python's fork server imports the modules of training and of jobs once per test session and forks each process. There a
module runs as with ``python -W error -m``, in its own environment and folder, and can be killed like any other.
"""

import multiprocessing
import os
import runpy
import shutil
import subprocess
import sys
import tempfile
import warnings
from multiprocessing.process import BaseProcess
from pathlib import Path

from bench.common.ports import reserved_port

ROOT = Path(__file__).parents[1]
_SERVER = multiprocessing.get_context("forkserver")
# Otherwise torch imports _dynamo with the first optimizer, which takes two seconds.
_TRAINING = ["torch", "torch._dynamo", "torch.distributed", "torch.nn.parallel", "fastvid.train.run.launch"]
_SERVER.set_forkserver_preload([*_TRAINING, "tests.runtime.preload"])


def start(module: str, *arguments: object, folder: Path = ROOT, **environment: str) -> BaseProcess:
    """Start a module with arguments, in a folder, with additional environment variables.

    Its output goes where this process' output went when the fork server was started.
    """
    words, variables = [str(argument) for argument in arguments], os.environ | environment
    process = _SERVER.Process(target=_run, args=(module, words, dict(variables), str(folder)), daemon=True)
    process.start()
    return process


def wait(process: BaseProcess, seconds: float = 250.0) -> int:
    """Wait for a process and return its exit code, or the negative number of the signal that killed it.

    Raises:
        TimeoutError: If it does not exit in time; it is killed.
    """
    process.join(seconds)
    if process.exitcode is None:
        process.kill()
        raise TimeoutError(f"a process did not exit within {seconds:g} s")
    return process.exitcode


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
        words = (module, self.args[1:], dict(os.environ | environment), str(folder), str(self._kept))
        self._process = _SERVER.Process(target=_run, args=words, daemon=True)
        self._process.start()
        self.pid: int = self._process.pid or 0

    @property
    def returncode(self) -> int | None:
        """The exit code, a negative number for a signal, or None."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """Return the exit code, or None while it runs."""
        return self.returncode

    def wait(self, timeout: float = 250.0) -> int:
        """Wait for its end and return the exit code."""
        code = wait(self._process, timeout)
        if self._said is None:
            self._said = (self._kept / "stdout").read_text(), (self._kept / "stderr").read_text()
            shutil.rmtree(self._kept)
        return code

    def communicate(self, timeout: float = 250.0) -> tuple[str, str]:
        """Wait for its end and return its standard output and its standard error."""
        self.wait(timeout)
        assert self._said is not None
        return self._said

    def send_signal(self, number: int) -> None:
        """Send it a signal."""
        os.kill(self.pid, number)


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


def _run(module: str, words: list[str], variables: dict[str, str], folder: str, kept: str = "") -> None:
    if kept:
        for number, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(Path(kept, name), os.O_CREAT | os.O_WRONLY), number)
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(folder)
    tempfile.tempdir = None  # TMPDIR is read again
    # An interpreter reads this one variable when it starts.
    sys.path[:0] = filter(None, variables.get("PYTHONPATH", "").split(os.pathsep))
    sys.argv = [module, *words]
    warnings.simplefilter("error")
    if module == "-c":
        sys.argv = ["-c", *words[1:]]
        exec(compile(words[0], "-c", "exec"), {"__name__": "__main__"})
    else:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
