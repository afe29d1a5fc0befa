"""Nodes and heads of a Ray cluster killed at random times during a job. Run by ``make soak``, results recorded."""

import importlib.metadata
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench.common.harness import RESULTS, machine_facts, write_json
from tests.sharding.raytools import ENVIRONMENT, Cluster
from tests.sharding.shardtools import REPOSITORY, command, ledger, make, tars

pytestmark = [pytest.mark.soak, pytest.mark.timeout(4 * 3600)]

SEED = 9
KILLS = 20
OPTIONS = ["--samples-per-shard", "4"]


class Job:
    """``fastvid shard --engine ray`` in a separate process."""

    def __init__(self, raw: Path, out: Path, cluster: Cluster) -> None:
        self.started = time.monotonic()
        engine = ["--engine", "ray", "--ray-address", cluster.address]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "fastvid", "shard", raw, "--out", out, *OPTIONS, *engine],
            env=os.environ | ENVIRONMENT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    def end(self) -> tuple[int, str, float]:
        """Return exit status, log, and the seconds since the start."""
        _, said = self.process.communicate(timeout=600)
        return self.process.returncode, said, time.monotonic() - self.started


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    """Sources, the tars that a job on this machine makes from them, and its ledger."""
    folder = tmp_path_factory.mktemp("soak")
    for number in range(8):
        make(folder / "raw" / f"class{number % 3}" / f"{number}.mp4", size="320x240", frames=50 + 10 * number)
    (folder / "raw" / "class0" / "bad.mp4").write_bytes(b"no video")
    assert command(folder / "raw", "--out", folder / "local", *OPTIONS).returncode == 3
    return folder / "raw", tars(folder / "local"), ledger(folder / "local")


def record(kind, rows, length):
    path = RESULTS / "shard_ray_kills.json"
    results = json.loads(path.read_text()) if path.exists() else {"schema": "fastvid-shard-ray-kills/1"}
    results[kind] = {
        "machine": machine_facts() | {"ray": importlib.metadata.version("ray")},
        "seed": SEED,
        "seconds_of_a_job_without_kills": round(length, 1),
        "kills": rows,
    }
    write_json(path, results)


@pytest.mark.parametrize("kind", ["node", "head"])
def test_kills_change_no_byte(kind, local, tmp_path):
    """A job survives its nodes; when a head dies it stops with an error, and resumes on the next cluster."""
    raw, wanted, rows_wanted = local
    rng, rows = random.Random(f"{SEED}/{kind}"), []
    cluster = Cluster(nodes=3)
    try:
        status, said, length = Job(raw, tmp_path / "whole", cluster).end()
        assert (status, tars(tmp_path / "whole")) == (3, wanted), said
        for number in range(KILLS):
            out, moment = tmp_path / f"{number}", rng.uniform(0.0, length)
            job = Job(raw, out, cluster)
            time.sleep(moment)
            running = job.process.poll() is None
            row = {"moment": round(moment, 2), "job_ran": running}
            if kind == "node":
                cluster.kill_node()
                cluster.add()
                status, said, seconds = job.end()
            else:
                cluster.kill_head()
                stopped, said, seconds = job.end()
                # The job exits with an error message, unless the kill came after its last task.
                assert stopped == 3 or (stopped == 1 and "Ray cluster" in said), said
                row["job_exit_code"] = stopped
                cluster.__exit__()
                cluster = Cluster(nodes=3)
                status, said, _ = Job(raw, out, cluster).end()
            equal = status == 3 and tars(out) == wanted and ledger(out) == rows_wanted
            rows.append(row | {"seconds": round(seconds, 1), "equal": equal})
            record(kind, rows, length)
            assert equal, said
    finally:
        cluster.__exit__()


def test_job_starts_and_stops_a_local_cluster(local, tmp_path):
    raw, wanted, rows_wanted = local
    out, home = tmp_path / "out", tmp_path / "home"
    home.mkdir()
    variables = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    done = subprocess.run(
        [sys.executable, "-m", "fastvid", "shard", raw, "--out", out, *OPTIONS, "--engine", "ray"],
        env=variables | {"PYTHONPATH": str(REPOSITORY), "HOME": str(home)},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert (done.returncode, tars(out)) == (3, wanted), done.stderr
    assert ledger(out) == rows_wanted
    # If Ray left a token in the user's home, every cluster started later would require it.
    assert not list(home.rglob("*token*"))
