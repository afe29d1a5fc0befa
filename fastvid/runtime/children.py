"""Child processes: how they ended, in words."""

from __future__ import annotations

import signal


def how_it_ended(status: int) -> str:
    """Return an exit status in words, such as ``exited with 1`` or ``was killed by SIGKILL``.

    Args:
        status: As `subprocess.Popen.returncode` has it: negative for the number of a signal.
    """
    if status >= 0:
        return f"exited with {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:  # the real-time signals have no names
        return f"was killed by signal {-status}"
