"""What others have written and damaged is read, or is an error of fastvid, in bounded time and memory.

A few hundred inputs always run, and 10,000 for each reader in ``make soak``.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter

import pytest

from tests import forks
from tests.fuzz.readers import READERS

pytest.importorskip("obstore", reason="obstore is not installed: the extra object-stores brings it")

TRIES, SOAK = 40, 10_000
BLOCK = 1000
HANG_SECONDS = 60.0
"""Seconds without progress after which a try hangs: a busy machine may stop for a while."""


def tried(name, folder, first, count):
    """Try inputs in another process; return the outcomes, and the failures as text."""
    folder.mkdir(exist_ok=True)
    process = forks.Command("tests.fuzz.readers", name, folder, first, count)
    at, since = "", time.monotonic()
    while process.poll() is None:
        time.sleep(0.05)
        now = (folder / "at").read_text() if (folder / "at").exists() else ""
        at, since = (at, since) if now == at else (now, time.monotonic())
        if time.monotonic() > since + HANG_SECONDS:
            os.kill(process.pid, 9)
            return Counter(hang=1), [f"{name} {at} hangs"]
    _, said = process.communicate()
    if process.returncode:
        return Counter(ended=1), [f"{name} {at} ended the process: {said[-2000:]}"]
    record = json.loads((folder / "outcomes.json").read_text())
    return Counter(record["outcomes"]), record["failures"]


@pytest.mark.parametrize("count", [TRIES, pytest.param(SOAK, marks=[pytest.mark.soak, pytest.mark.timeout(12 * 3600)])])
@pytest.mark.parametrize("name", READERS)
def test_damaged_inputs_are_read_or_refused(name, count, tmp_path):
    outcomes, failures = Counter(), []
    for first in range(0, count, BLOCK):
        found, wrong = tried(name, tmp_path / "tries", first, min(BLOCK, count - first))
        outcomes += found
        failures += wrong
    assert not failures, "\n".join(failures[:20])
    assert outcomes["refused"] + outcomes["same"] + outcomes["other"] == count
    assert name == "recipes" or outcomes["refused"] > count / 10
