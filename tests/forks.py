"""Processes that have imported torch when they begin: seconds less for each than for a fresh interpreter.

Python's own fork server imports once a test session what training imports, and forks each process. There a module runs
as ``python -W error -m`` runs it, in an environment and a folder of its own.
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
# torch imports _dynamo with the first optimizer, for two seconds.
_SERVER.set_forkserver_preload(
    ["torch", "torch._dynamo", "torch.distributed", "torch.nn.parallel", "fastvid.train.run.launch"]
)


def start(module: str, *arguments: object, folder: Path = ROOT, **environment: str) -> BaseProcess:
    """Starts a module with arguments, in a folder, with variables beside this process' own.

    What it prints goes where this process' own output went when the server was started.
    """
    words, variables = [str(argument) for argument in arguments], os.environ | environment
    process = _SERVER.Process(target=_run, args=(module, words, dict(variables), str(folder)), daemon=True)
    process.start()
    return process


def wait(process: BaseProcess, seconds: float = 250.0) -> int:
    """The exit code of a process; a signal's number is negative.

    Raises:
        TimeoutError: It does not end; it is killed.
    """
    process.join(seconds)
    if process.exitcode is None:
        process.kill()
        raise TimeoutError(f"a process did not end within {seconds:g} s")
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
