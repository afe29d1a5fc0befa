"""CPU time of a process with all that it started."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


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
    family = {pid}
    grown = True
    while grown:
        more = {child for child, parent in parents.items() if parent in family} - family
        family |= more
        grown = bool(more)
    return sum(spent.get(member, 0) for member in family) / os.sysconf("SC_CLK_TCK")
