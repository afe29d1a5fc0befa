"""What others have written and damaged is read, or is an error of fastvid, in bounded time and memory.

A few hundred inputs always run. ``make soak`` runs 10,000 for each reader and writes bench/results/fuzz.json.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter

import pytest

from bench.common.harness import RESULTS, machine_facts, write_json
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


@pytest.mark.parametrize("name", READERS)
def test_damaged_inputs_are_read_or_refused(name, tmp_path):
    outcomes, failures = tried(name, tmp_path / "tries", 0, TRIES)
    assert not failures, "\n".join(failures)
    assert outcomes["refused"] + outcomes["same"] + outcomes["other"] == TRIES
    assert name == "recipes" or outcomes["refused"] > TRIES / 10


@pytest.mark.soak
@pytest.mark.timeout(12 * 3600)
@pytest.mark.parametrize("name", READERS)
def test_10000_damaged_inputs_of_each_reader(name, tmp_path):
    """FASTVID_SOAK_FILES stops earlier. The result keeps what other readers found, each at its commit."""
    most = int(os.environ.get("FASTVID_SOAK_FILES", str(SOAK)))
    total, failures = Counter(), []
    for first in range(0, most, BLOCK):
        outcomes, wrong = tried(name, tmp_path / name, first, min(BLOCK, most - first))
        total += outcomes
        failures += wrong
    path, machine = RESULTS / "fuzz.json", machine_facts()
    record = json.loads(path.read_text()) if path.exists() else {"readers": {}}
    found = {"tries": total.total(), **total, "commit": machine["commit"], "failures": failures}
    readers = {**record["readers"], name: found}
    write_json(path, {"schema": "fastvid-fuzz/2", "readers": readers, "machine": machine})
    assert not failures, "\n".join(failures[:20])
