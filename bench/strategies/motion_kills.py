"""Starts a run, kills random participants of it with SIGKILL, and starts again what ended by that.

A run is one command or several. A command of torchrun has a participant for each rank; torchrun ends the others when
one dies and starts all of them again. Any other command is one participant, and is started again here.
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
"""The share of a run in which participants are killed: all have joined, and there is time to go on."""
_PAUSE_S: Final = 0.1
_PATIENCE_S: Final = 60.0  # for what is told to end
_LATE_S: Final = 5.0  # for the others once the first command is over; one that has just come would look for it longer


def run(
    commands: Mapping[str, Sequence[str]],
    done: Callable[[], float],
    *,
    kills: int,
    seed: int = 0,
    environment: Mapping[str, str] | None = None,
) -> list[dict[str, Any]]:
    """Runs commands until the first of them ends well.

    Args:
        commands: By name. The first one is what the run is about; the others end with it.
        done: The share of the run that is done, 0 to 1.
        kills: How many participants to kill, one after the other.
        seed: Decides who is killed and when; nobody twice before everybody once.
        environment: Of the processes; None is this process' own.

    Returns:
        One entry a kill: ``done``, the share of the run at that moment, and ``killed``, the participant.

    Raises:
        WorkerError: A command failed more often than kills explain, or the run was over before all kills.
    """
    draws = random.Random(seed)
    places = sorted(draws.uniform(*SPAN) for _ in range(kills))
    found: list[dict[str, Any]] = []
    with _Jobs(commands, environment) as jobs:
        while jobs.code(jobs.first) != 0:
            # One kill may end every command once.
            jobs.restart(at_most=len(found) * len(commands))
            if len(found) < kills and (share := done()) >= places[len(found)]:
                before = Counter(kill["killed"] for kill in found)
                alive = sorted((before[name], name, pid) for name, pid in jobs.participants().items())
                if alive:
                    # Nobody twice before everybody once.
                    _, name, pid = draws.choice([one for one in alive if one[0] == alive[0][0]])
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                        found.append({"done": round(share, 3), "killed": name})
                        _log.info("killed %s when %.0f %% was done", name, 100 * share)
            time.sleep(_PAUSE_S)
        jobs.wait(_LATE_S)
    if len(found) < kills:
        raise WorkerError(f"the run was over after {len(found)} of {kills} kills", hint="make it longer")
    return found


class _Jobs:
    """Commands that run."""

    def __init__(self, commands: Mapping[str, Sequence[str]], environment: Mapping[str, str] | None) -> None:
        self._commands, self._environment = commands, environment
        self.first = next(iter(commands))
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._again = 0

    def __enter__(self) -> _Jobs:
        for name in self._commands:
            self._start(name)
        return self

    def __exit__(self, *_: object) -> None:
        for name, process in self._running.items():
            if TORCHRUN in self._commands[name]:
                process.terminate()  # it takes its ranks along
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
        """A command's exit code, None while it runs."""
        return self._running[name].poll()

    def restart(self, *, at_most: int) -> None:
        """Starts again what has failed."""
        for name, process in list(self._running.items()):
            if process.poll() in (None, 0):
                continue
            self._again += 1
            if self._again > at_most:
                raise WorkerError(f"{name} ended with exit code {process.returncode}", hint="see its messages above")
            _log.info("%s ended with exit code %d and is started again", name, process.returncode)
            self._start(name)

    def participants(self) -> dict[str, int]:
        """Who could be killed now, with their process ids."""
        found = {}
        for name, process in self._running.items():
            if process.poll() is not None:
                continue
            if TORCHRUN in self._commands[name]:
                # None between the end of some ranks and the start of the next ones.
                found |= {f"{name}, rank {rank}": pid for rank, pid in _ranks(process.pid)}
            else:
                found[name] = process.pid
        return found

    def wait(self, seconds: float) -> None:
        """Waits for all commands, but not for ever."""
        end = time.monotonic() + seconds
        for process in self._running.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end - time.monotonic()))


def _ranks(agent: int) -> Iterator[tuple[int, int]]:
    """Ranks that a torchrun has started, with their process ids."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            # After the name in brackets, which may hold spaces: state, parent.
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if parent != agent:
                continue
            variables = dict(item.partition("=")[::2] for item in (entry / "environ").read_text().split("\0"))
        except (OSError, ValueError, IndexError):
            continue  # it has just ended
        if "RANK" in variables:
            yield int(variables["RANK"]), int(entry.name)
