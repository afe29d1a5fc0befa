"""Start processes that have already imported torch, which saves seconds over a fresh interpreter.

Python's fork server imports the modules of training once per test session and forks each process. There a module runs
as with ``python -W error -m``, in its own environment and folder.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
import warnings
from multiprocessing.process import BaseProcess
from pathlib import Path

ROOT = Path(__file__).parents[1]
_SERVER = multiprocessing.get_context("forkserver")
# Otherwise torch imports _dynamo with the first optimizer, which takes two seconds.
_SERVER.set_forkserver_preload(
    ["torch", "torch._dynamo", "torch.distributed", "torch.nn.parallel", "fastvid.train.run.launch"]
)


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


def _run(module: str, words: list[str], variables: dict[str, str], folder: str) -> None:
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(folder)
    # An interpreter reads this one variable when it starts.
    sys.path[:0] = filter(None, variables.get("PYTHONPATH", "").split(os.pathsep))
    sys.argv = [module, *words]
    warnings.simplefilter("error")
    runpy.run_module(module, run_name="__main__", alter_sys=True)
