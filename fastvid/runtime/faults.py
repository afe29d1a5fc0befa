"""Named fault points at which a test can kill the process.

``FASTVID_FAULT=rename:3`` kills this process with SIGKILL when it reaches the point "rename" for the third time;
without a number, the first time. If the variable is unset, a point costs one environment lookup.
"""

from __future__ import annotations

import os
import signal
from collections import Counter

VARIABLE = "FASTVID_FAULT"

_reached: Counter[str] = Counter()


def reach(point: str) -> None:
    """Kill the process if the environment names this point."""
    wanted = os.environ.get(VARIABLE)
    if not wanted:
        return
    name, _, number = wanted.partition(":")
    if name != point:
        return
    _reached[point] += 1
    if _reached[point] == int(number or 1):
        os.kill(os.getpid(), signal.SIGKILL)
