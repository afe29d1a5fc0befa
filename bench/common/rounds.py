"""Rounds of contenders in turn, the spread and the ratios of what they took, and what a process takes.

Neighbours in time differ from round to round, so that other load of the machine is spread evenly; a ratio is the median
of the rounds' ratios.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

from fastvid.errors import JobError
from fastvid.runtime.processes import safe_path

Name = TypeVar("Name")
Found = TypeVar("Found")


def in_turn(
    names: Sequence[Name], rounds: int, work: Callable[[Name, int], Found], *, warm_up: int = 0
) -> dict[Name, list[Found]]:
    """Call `work` with each name and the number of the round, in rounds that each start with another name.

    Returns the results of each name by round, without those of the rounds that warm up, which have negative numbers.
    """
    found: dict[Name, list[Found]] = {name: [] for name in names}
    for number in range(-warm_up, rounds):
        for step in range(len(names)):
            name = names[(step + number) % len(names)]
            result = work(name, number)
            if number >= 0:
                found[name].append(result)
    return found


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Return ours as a multiple of theirs, by round."""
    return [mine / other for mine, other in zip(ours, theirs, strict=True)]


def spread(values: Sequence[float], low: str = "min", high: str = "max") -> dict[str, float]:
    """Return the median, the least and the greatest of numbers."""
    return {"median": statistics.median(values), low: min(values), high: max(values)}


def ranged(name: str, values: Sequence[float]) -> dict[str, float]:
    """Return the median of numbers under a name, with their range as the report draws it."""
    return {name: statistics.median(values), f"{name}_min": min(values), f"{name}_max": max(values)}


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Return the CPU seconds of a function and of the child processes that end in it, and its wall seconds."""
    cpu, wall = _cpu(), time.perf_counter()
    work()
    return _cpu() - cpu, time.perf_counter() - wall


def _cpu() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def apart(work: Callable[..., Any], *inputs: Any) -> Any:
    """Run a function in a new process and return what it returns, which must be JSON; JobError if it fails."""
    context = get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(theirs, work, inputs))
    with safe_path():
        process.start()
    theirs.close()
    try:
        # Bytes: what decodes videos is not unpickled here.
        good, answer = json.loads(ours.recv_bytes())
    except EOFError:
        good, answer = False, f"the process of {work.__name__} died"
    process.join(20)
    if process.is_alive():
        process.kill()
        process.join()
    if not good:
        raise JobError(answer)
    return answer


def _answer(pipe: Connection, work: Callable[..., Any], inputs: tuple[Any, ...]) -> None:
    try:
        answer = [True, work(*inputs)]
    except Exception as error:  # noqa: BLE001 - reported to the parent
        answer = [False, f"{type(error).__name__}: {error}"]
    pipe.send_bytes(json.dumps(answer).encode())
    pipe.close()
    os._exit(0)  # do not wait for rivals' worker processes


def resident() -> int:
    """Return the resident memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def children(pid: int) -> list[int]:
    """Return the process ids of a process' children; empty if it has exited."""
    try:
        words = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [int(word) for word in words]


def cpu_of_family(pid: int | None) -> float:
    """Return the CPU seconds of a process, its living descendants, and the children they have waited for."""
    assert pid is not None
    parents: dict[int, int] = {}
    spent: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            own = int(stat.parent.name)
            parents[own] = int(fields[1])
            # utime, stime, cutime, cstime: fields 14 to 17 of proc(5).
            spent[own] = sum(map(int, fields[11:15]))
    family, grown = {pid}, True
    while grown:
        more = {child for child, parent in parents.items() if parent in family} - family
        family |= more
        grown = bool(more)
    return sum(spent.get(member, 0) for member in family) / os.sysconf("SC_CLK_TCK")
