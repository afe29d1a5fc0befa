"""Named places where a test can have the process killed.

``FASTVID_FAULT=rename:3`` kills this process with SIGKILL when it reaches the point "rename" for the third time;
without a number, the first time. Unset, a point costs one look into the environment.
"""

from __future__ import annotations

import os
import signal
from collections import Counter

VARIABLE = "FASTVID_FAULT"

_reached: Counter[str] = Counter()


def reach(point: str) -> None:
    """Dies here if the environment says so."""
    wanted = os.environ.get(VARIABLE)
    if not wanted:
        return
    name, _, number = wanted.partition(":")
    if name != point:
        return
    _reached[point] += 1
    if _reached[point] == int(number or 1):
        os.kill(os.getpid(), signal.SIGKILL)
