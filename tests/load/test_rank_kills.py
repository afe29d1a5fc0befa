"""Random ranks killed at random moments, 30 runs; results in bench/results/load_kills.json.

After any number of kills, and with any world size after them, the final weights have seen exactly the samples of an
undisturbed run, in the same order. Started by ``make soak``.
"""

import json
import os
import subprocess
import sys

import pytest

from bench.common.harness import RESULTS, machine_facts, write_json
from tests.datasets import REPOSITORY, make_clip, pack

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]

RUNS = 30
SEED = 5
SAMPLES = 363  # 45 batches of 8, and 3 samples that are dropped


def test_killed_and_resized_run_has_the_lineage_of_an_undisturbed_one(tmp_path):
    sizes = ("96x64", "64x80", "80x48")
    clips = [make_clip(tmp_path / f"{n}.mp4", frames=9 + 4 * n, size=size) for n, size in enumerate(sizes)]
    samples = [(f"clip{n:03d}", clips[n % 3], n % 2) for n in range(SAMPLES)]
    pack(tmp_path / "set", [samples[:200], samples[200:]])
    command = [sys.executable, "-W", "error", "-m", "tests.load.rank_kills", str(tmp_path), str(RUNS), str(SEED)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "FASTVID_LOG": "WARNING"}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE, timeout=3400, check=True)
    record = json.loads(done.stdout)
    runs = record["runs"]
    assert len(runs) == RUNS
    assert record["rows"] == SAMPLES // 8 * 8 * 2
    for run in runs:
        assert run["steps_between_checkpoints"] >= 20
        assert run["same_ids"]
        assert run["same_clips"]
        assert run["same_lineage"]
        assert run["weights_differ_by"] < 1e-9
        assert all(kill["ranks"] for kill in run["killed"])
    # Some runs resumed in the middle of an epoch, and the control proves that the comparison can fail.
    assert any(kill["went_on_from_step"] % 45 for run in runs for kill in run["killed"])
    assert record["control_differs"]
    write_json(
        RESULTS / "load_kills.json", {"schema": "fastvid-soak-load-kills/1", "machine": machine_facts(), **record}
    )
