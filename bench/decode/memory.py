"""What a decoder's open videos take: the growth of a process that decodes every clip of a corpus once."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

from fastvid.runtime.processes import safe_path
from fastvid.tune.measure import Contender, TaskRunner


def megabytes_kept(contender: Contender, tasks: int) -> float:
    """Return by how many MB a worker grows from its first clip to its last; one that keeps nothing hardly grows."""
    context = get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_grow, args=(theirs, contender.open_runner, tasks))
    with safe_path():
        process.start()
    theirs.close()
    grown = float(ours.recv_bytes())
    process.join()
    return grown


def _grow(pipe: Connection, opened: Callable[[], TaskRunner], tasks: int) -> None:
    runner = opened()
    runner(0)
    before = _resident()
    for task in range(tasks):
        runner(task)
    gc.collect()
    pipe.send_bytes(repr((_resident() - before) / 1e6).encode())


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
