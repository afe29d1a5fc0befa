"""The environment of child processes, and how they ended."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from typing import Final

SAFE_PATH: Final = {"PYTHONSAFEPATH": "1"}
"""Environment of every Python process that fastvid starts, and of those that it starts in turn.

Like ``python -P``: modules are not imported from the current folder, where a downloaded ``av.py`` may lie.
"""


@contextlib.contextmanager
def safe_path() -> Iterator[None]:
    """Give `SAFE_PATH` to children that `multiprocessing` starts inside the block: it has no argument for it."""
    before = {name: os.environ.get(name) for name in SAFE_PATH}
    os.environ.update(SAFE_PATH)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def how_it_ended(status: int) -> str:
    """Describe an exit status, for example ``exited with 1`` or ``was killed by SIGKILL``."""
    if status >= 0:
        return f"exited with {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:  # real-time signals have no names
        return f"was killed by signal {-status}"
