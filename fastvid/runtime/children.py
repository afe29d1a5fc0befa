"""Describes how a child process ended."""

from __future__ import annotations

import signal


def how_it_ended(status: int) -> str:
    """Describe an exit status, for example ``exited with 1`` or ``was killed by SIGKILL``.

    Args:
        status: As in `subprocess.Popen.returncode`: a negative number is a signal.
    """
    if status >= 0:
        return f"exited with {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:  # real-time signals have no names
        return f"was killed by signal {-status}"
