"""Ranks killed at random moments: what the resumed worlds deliver is one undisturbed epoch, row by row."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from tests.datasets import REPOSITORY

KILLS = 5  # of each plan


def test_killed_worlds_of_other_sizes_deliver_each_row_once():
    command = [sys.executable, "-m", "tests.load.planned.kills", str(KILLS), "11"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "FASTVID_LOG": "WARNING"}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE, timeout=560, check=True)
    for found in json.loads(done.stdout).values():
        assert found["each_once"]
        assert found["kills"] >= KILLS
        assert all(found["same"])
        assert found["control_differs"]
