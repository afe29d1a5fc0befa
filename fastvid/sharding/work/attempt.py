"""One attempt at a task: what its source does wrong becomes an outcome, never an exception."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import replace

from fastvid.errors import SourceError
from fastvid.media.reasons import MEANING, Reason
from fastvid.sharding.work.messages import Outcome, SourceTask

Report = Callable[[str, float], None]
"""Called when a phase begins, with its name and the seconds it may take."""


def attempt(task: SourceTask, work: Callable[[], Outcome]) -> Outcome:
    """Return what `work` returns, or the reason for which it raised, with the seconds that it took."""
    started = time.monotonic()
    try:
        outcome = work()
    except (SourceError, MemoryError) as error:
        outcome = failure(task, error)
    return replace(outcome, seconds=outcome.seconds + time.monotonic() - started)


def failure(task: SourceTask, error: SourceError | MemoryError) -> Outcome:
    """Return the outcome of a task that failed by an error."""
    if isinstance(error, SourceError):
        return Outcome(task.index, reason=Reason(error.reason), message=error.message, transient=error.transient)
    return Outcome(task.index, reason=Reason.MEMORY, message="the worker ran out of memory")


def refuse_blocked(digest: str, blocked: Collection[str]) -> None:
    """Refuse a source that the dataset's block list names."""
    if digest in blocked:
        raise SourceError(MEANING[Reason.BLOCKED], reason=Reason.BLOCKED)
