"""How a child process ended is said by the name of its signal, or by its exit status."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from fastvid.runtime.children import how_it_ended


@pytest.mark.parametrize(
    ("last", "said"),
    [
        ("sys.exit(3)", "exited with 3"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "was killed by SIGKILL"),
        ("os.kill(os.getpid(), signal.SIGRTMIN + 1)", f"was killed by signal {signal.SIGRTMIN + 1}"),
    ],
)
def test_the_end_of_a_process_is_said(last, said):
    done = subprocess.run([sys.executable, "-c", f"import os, signal, sys; {last}"], check=False)
    assert how_it_ended(done.returncode) == said
