"""Named fault points at which a test can kill the process, or let a system call fail.

``FASTVID_FAULT=rename:3`` kills this process with SIGKILL when it reaches the point "rename" for the third time;
without a number, the first time. ``FASTVID_FAULT=source:3:EIO`` raises an OSError with that errno instead, and
``source:/3:EIO`` every third time. ``ledger:2:WAIT`` blocks the thread at the point for ever, while other threads
continue. If the variable is unset, a point costs one environment lookup.
"""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections import Counter

VARIABLE = "FASTVID_FAULT"

_reached: Counter[str] = Counter()


def reach(point: str) -> None:
    """Kill the process, raise an OSError or wait for ever, if the environment names this point."""
    wanted = os.environ.get(VARIABLE)
    if not wanted:
        return
    name, _, rest = wanted.partition(":")
    if name != point:
        return
    number, _, code = rest.partition(":")
    _reached[point] += 1
    every, count = number.startswith("/"), int(number.removeprefix("/") or 1)
    if _reached[point] % count if every else _reached[point] != count:
        return
    if code == "WAIT":
        threading.Event().wait()
    if code:
        failure = int(getattr(errno, code))
        raise OSError(failure, os.strerror(failure))
    os.kill(os.getpid(), signal.SIGKILL)
