"""Which part of a job this process is: its rank, and the cores it may use."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

from fastvid.errors import UsageError

_CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class World:
    """One of `size` processes that share every global batch.

    Attributes:
        rank: 0 <= rank < size.
        size: Processes of the job.
    """

    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise UsageError(f"rank {self.rank} is outside a world of {self.size}")

    @classmethod
    def resolve(cls, rank: int | None, world_size: int | None) -> World:
        """The arguments if given, else torch's process group, else torchrun's environment, else one process alone.

        Raises:
            UsageError: Only one of the arguments is given, or the environment is inconsistent.
        """
        if (rank is None) != (world_size is None):
            raise UsageError(f"rank={rank} and world_size={world_size} must be given together")
        if rank is not None and world_size is not None:
            return cls(rank, world_size)
        import torch.distributed as dist

        if dist.is_available() and dist.is_initialized():
            return cls(dist.get_rank(), dist.get_world_size())
        found = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
        if found == (None, None):
            return cls()
        try:
            return cls(int(found[0] or ""), int(found[1] or ""))
        except ValueError:
            raise UsageError(f"environment has RANK={found[0]!r} and WORLD_SIZE={found[1]!r}") from None


def available_cores() -> int:
    """Cores for this rank, at least 1: those the process may run on, within its container's quota, shared by the ranks
    of the node as torchrun announces them (LOCAL_WORLD_SIZE)."""
    cores = float(len(os.sched_getaffinity(0)))
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    share = min(cores, _quota()) / (int(local) if local.isdigit() and int(local) else 1)
    return max(1, math.floor(share))


def _quota() -> float:
    """CPU quota in cores, the smallest from this process's control group (version 2) to the root; inf without one."""
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
