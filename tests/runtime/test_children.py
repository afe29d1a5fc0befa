"""Descriptions of how a child process ended."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from fastvid.runtime.processes import how_it_ended


@pytest.mark.parametrize(
    ("last", "said"),
    [
        ("sys.exit(3)", "exited with 3"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "was killed by SIGKILL"),
        ("os.kill(os.getpid(), signal.SIGRTMIN + 1)", f"was killed by signal {signal.SIGRTMIN + 1}"),
    ],
)
def test_how_it_ended_describes_exit_codes_and_signals(last, said):
    done = subprocess.run([sys.executable, "-c", f"import os, signal, sys; {last}"], check=False)
    assert how_it_ended(done.returncode) == said
