"""The reason and the time of a change to a dataset, which every generation records besides the change itself."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Final

from fastvid.errors import UsageError

_LONGEST: Final = 1000  # characters of a reason
_EPOCH: Final = "SOURCE_DATE_EPOCH"

_reason: ContextVar[str] = ContextVar("reason", default="")


@contextlib.contextmanager
def because(reason: str) -> Iterator[None]:
    """Record why datasets are changed in a ``with`` block, as the option ``--reason`` of commands does.

    `reason`: text that `fastvid log` shows, at most 1000 characters.
    """
    if len(reason) > _LONGEST:
        raise UsageError(f"the reason has {len(reason)} characters", hint=f"write at most {_LONGEST}")
    token = _reason.set(reason)
    try:
        yield
    finally:
        _reason.reset(token)


def current_reason() -> str:
    """Return the reason of the innermost `because` block, empty outside of one."""
    return _reason.get()


def now() -> str:
    """Return the current time in UTC, in seconds, such as ``2026-11-23T01:30:00Z``.

    If SOURCE_DATE_EPOCH is set, return that time, so that the same job writes the same bytes
    (https://reproducible-builds.org/specs/source-date-epoch).
    """
    text = os.environ.get(_EPOCH)
    try:
        seconds = time.time() if text is None else int(text)
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    except (ValueError, OverflowError, OSError) as error:
        raise UsageError(f"{_EPOCH} is {text!r}, not a time", hint="set seconds since 1970, or unset it") from error
