"""Names the rank whose end made a collective operation fail: gloo and NCCL name at most an address.

Every rank knows the host and the process of the others. A rank that fails by itself leaves the reason in the job's
store, where the others find it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from fastvid.errors import FastvidError, WorkerError
from fastvid.runtime.liveness import is_dead, namespace

_KEY: Final = "fastvid/ended"
_PATIENCE_S: Final = 3.0  # sockets of a process close before it has ended
_PAUSE_S: Final = 0.05
_LONGEST: Final = 500  # characters of a reason

# Errors of collectives: gloo raises a plain RuntimeError, also inside backward().
_COLLECTIVE: Final = re.compile(r"gloo|nccl|c10d|connection (?:closed|reset)|process group", re.IGNORECASE)


def own_record() -> bytes:
    """Return where this process runs, for the other ranks."""
    return json.dumps({"host": socket.gethostname(), "space": namespace(), "pid": os.getpid()}).encode()


class Peers:
    """The other ranks of a job."""

    def __init__(self, rank: int, records: Sequence[bytes], store: Store) -> None:
        self._rank, self._store = rank, store
        self._places: list[dict[str, Any]] = [json.loads(record) for record in records]

    def explain(self, error: Exception) -> Exception:
        """Return what ended this rank: a WorkerError that names other ranks if they ended, or else the error itself.

        The others are told: an error of this rank's own, or which ranks it lost.
        """
        if isinstance(error, FastvidError) or not _is_collective(error):
            self._tell({"reason": f"{type(error).__name__}: {error}"[:_LONGEST]})
            return error
        deadline = time.monotonic() + _PATIENCE_S
        while not (lost := self._lost()) and time.monotonic() < deadline:
            time.sleep(_PAUSE_S)
        self._tell({"lost": lost})
        # Rank 0 may serve the store.
        while self._rank == 0 and self._untold(lost) and time.monotonic() < deadline:
            time.sleep(_PAUSE_S)
        if lost:
            return WorkerError(
                f"rank {self._rank} cannot continue: " + "; ".join(lost.values()),
                hint=f"see what rank {min(lost)} printed, then repeat the command: it resumes from the last checkpoint",
            )
        return WorkerError(
            f"rank {self._rank} cannot continue: another rank does not answer: {str(error).splitlines()[0]}",
            hint="check the other ranks' output and the network, then repeat the command",
        )

    def _lost(self) -> dict[int, str]:
        """Return what is known about each other rank that has ended by itself, or is stopped."""
        found: dict[int, str] = {}
        for rank, place in enumerate(self._places):
            if rank == self._rank:
                continue
            who = f"rank {rank}, process {place['pid']} on {place['host']},"
            # In this order: a rank tells why it ends before it does.
            ended = _end_of(place)
            told = self._told(rank)
            if "lost" in told:  # it ended because others did, which it may know better
                found = {int(other): text for other, text in told["lost"].items() if int(other) != self._rank} | found
            elif "reason" in told:
                found[rank] = f"{who} failed with {told['reason']}"
            elif ended:
                found[rank] = f"{who} {ended}"
        return found

    def _untold(self, lost: Mapping[int, str]) -> bool:
        """Return whether a rank that is not lost has not said yet what ended it."""
        others = set(range(len(self._places))) - {self._rank, *lost}
        return any(not self._told(rank) for rank in others)

    def _tell(self, what: dict[str, Any]) -> None:
        with contextlib.suppress(RuntimeError):
            self._store.set(f"{_KEY}/{self._rank}", json.dumps(what))

    def _told(self, rank: int) -> dict[str, Any]:
        with contextlib.suppress(RuntimeError):  # the store is gone with rank 0, or with torchrun's agent
            if self._store.check([f"{_KEY}/{rank}"]):
                told: dict[str, Any] = json.loads(self._store.get(f"{_KEY}/{rank}"))
                return told
        return {}


# Letters of proc(5), /proc/PID/stat.
_STATES: Final = {"Z": "has died", "X": "has died", "T": "is stopped", "t": "is stopped"}


def _end_of(place: Mapping[str, Any]) -> str:
    """Return how a process ended, or that it is stopped; empty if it runs or nothing is known about it."""
    if is_dead(place["space"], place["pid"]):
        return "has died"
    return _STATES.get(_state(place["pid"]), "") if place["space"] == namespace() else ""


def _state(pid: int) -> str:
    try:
        # The name, in brackets, may contain anything.
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def _is_collective(error: Exception) -> bool:
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and _COLLECTIVE.search(str(error)) is not None
