"""Counts the CPU cores that this process may use."""

from __future__ import annotations

import math
import os
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")


def available_cores(ranks: int | None = None) -> int:
    """Return the number of cores for this rank, at least 1: CPU affinity, limited by the container's quota."""
    if ranks is None:
        local = os.environ.get("LOCAL_WORLD_SIZE", "")
        ranks = int(local) if local.isdigit() else 1
    return max(1, math.floor(min(len(os.sched_getaffinity(0)), _quota()) / max(1, ranks)))


def _quota() -> float:
    """Return the CPU quota in cores: the smallest from this process's cgroup (v2) up to the root; inf if unlimited."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return math.inf
    own = next((line[3:] for line in lines if line.startswith("0::")), "/")
    cores = math.inf
    for group in (own, *(str(parent) for parent in Path(own).parents)):
        try:
            quota, period = (_CGROUPS / group.lstrip("/") / "cpu.max").read_text().split()
            if quota != "max":
                cores = min(cores, int(quota) / int(period))
        except (OSError, ValueError):
            continue
    return cores
