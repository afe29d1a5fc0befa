"""Start a run, kill random participants with SIGKILL, and restart commands that exit because of it.

A run is one or more commands. A torchrun command has one participant per rank; when one dies, torchrun stops the others
and restarts all of them. Any other command is one participant and is restarted here.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from fastvid.errors import WorkerError

_log = logging.getLogger(__name__)

TORCHRUN: Final = "torch.distributed.run"
SPAN: Final = (0.5, 0.9)
"""Part of a run in which participants are killed: after all have joined, and with time left to resume."""
_PAUSE_S: Final = 0.1
_PATIENCE_S: Final = 60.0  # for processes to exit after SIGTERM
_LATE_S: Final = 5.0  # for the other commands after the first exits; a client started late would search for it longer


def run(
    commands: Mapping[str, Sequence[str]],
    done: Callable[[], float],
    *,
    kills: int,
    seed: int = 0,
    environment: Mapping[str, str] | None = None,
) -> list[dict[str, Any]]:
    """Run commands until the first of them succeeds.

    Returns one entry per kill: ``done``, the share of the run at that moment, and ``killed``, the participant.
    """
    draws = random.Random(seed)
    places = sorted(draws.uniform(*SPAN) for _ in range(kills))
    found: list[dict[str, Any]] = []
    with _Processes(commands, environment) as jobs:
        while jobs.code(jobs.first) != 0:
            # One kill may make every command exit once.
            jobs.restart(at_most=len(found) * len(commands))
            if len(found) < kills and (share := done()) >= places[len(found)]:
                before = Counter(kill["killed"] for kill in found)
                alive = sorted((before[name], name, pid) for name, pid in jobs.participants().items())
                if alive:
                    # Choose among those killed least often.
                    _, name, pid = draws.choice([one for one in alive if one[0] == alive[0][0]])
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                        found.append({"done": round(share, 3), "killed": name})
                        _log.info("killed %s when %.0f %% was done", name, 100 * share)
            time.sleep(_PAUSE_S)
        jobs.wait(_LATE_S)
    if len(found) < kills:
        raise WorkerError(f"the run ended after {len(found)} of {kills} kills", hint="use more epochs, or fewer kills")
    return found


class _Processes:
    """The running commands."""

    def __init__(self, commands: Mapping[str, Sequence[str]], environment: Mapping[str, str] | None) -> None:
        self._commands, self._environment = commands, environment
        self.first = next(iter(commands))
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._again = 0

    def __enter__(self) -> _Processes:
        for name in self._commands:
            self._start(name)
        return self

    def __exit__(self, *_: object) -> None:
        for name, process in self._running.items():
            if TORCHRUN in self._commands[name]:
                process.terminate()  # torchrun stops its ranks
            else:
                process.kill()
        for process in self._running.values():
            try:
                process.wait(_PATIENCE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _start(self, name: str) -> None:
        self._running[name] = subprocess.Popen(
            self._commands[name], env=self._environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )

    def code(self, name: str) -> int | None:
        """Return a command's exit code, or None while it runs."""
        return self._running[name].poll()

    def restart(self, *, at_most: int) -> None:
        """Restart failed commands."""
        for name, process in list(self._running.items()):
            if process.poll() in (None, 0):
                continue
            self._again += 1
            if self._again > at_most:
                raise WorkerError(f"{name} failed with exit code {process.returncode}", hint="see its messages above")
            _log.info("%s exited with code %d and is restarted", name, process.returncode)
            self._start(name)

    def participants(self) -> dict[str, int]:
        """Return the participants that can be killed now, with their process ids."""
        found = {}
        for name, process in self._running.items():
            if process.poll() is not None:
                continue
            if TORCHRUN in self._commands[name]:
                # Empty while torchrun restarts its ranks.
                found |= {f"{name}, rank {rank}": pid for rank, pid in _ranks(process.pid)}
            else:
                found[name] = process.pid
        return found

    def wait(self, seconds: float) -> None:
        """Wait for all commands, at most `seconds` in total."""
        end = time.monotonic() + seconds
        for process in self._running.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end - time.monotonic()))


def _ranks(agent: int) -> Iterator[tuple[int, int]]:
    """Yield the ranks that a torchrun process has started, with their process ids."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            # After the name in brackets, which may contain spaces: state, parent.
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if parent != agent:
                continue
            variables = dict(item.partition("=")[::2] for item in (entry / "environ").read_text().split("\0"))
        except (OSError, ValueError, IndexError):
            continue  # the process has just exited
        if "RANK" in variables:
            yield int(variables["RANK"]), int(entry.name)
