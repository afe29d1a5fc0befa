"""One attempt at a task: what its source does wrong becomes an outcome, never an exception."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from fastvid.errors import SourceError
from fastvid.media.reasons import Reason
from fastvid.sharding.work.messages import Outcome, Task

Report = Callable[[str, float], None]
"""Called when a phase begins, with its name and the seconds it may take."""


def attempt(task: Task, work: Callable[[], Outcome]) -> Outcome:
    """Return what `work` returns, or the reason for which it raised, with the seconds that it took."""
    started = time.monotonic()
    try:
        outcome = work()
    except SourceError as error:
        outcome = Outcome(task.index, reason=Reason(error.reason), message=error.message, transient=error.transient)
    except MemoryError:
        outcome = Outcome(task.index, reason=Reason.MEMORY, message="the worker ran out of memory")
    return replace(outcome, seconds=time.monotonic() - started)
