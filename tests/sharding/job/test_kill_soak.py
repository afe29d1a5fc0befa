"""Jobs and their workers killed at random moments, 20 times each; results in bench/results/shard_kills.json.

Whatever was killed, and however the job goes on, the dataset is that of an undisturbed run: the same bytes in every tar
and packet table, equal tables, every source once. Started by ``make soak``.
"""

from __future__ import annotations

import collections
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import psutil
import pyarrow.parquet as pq
import pytest

from bench.common.harness import RESULTS, machine_facts
from fastvid.format.dataset import Dataset
from tests.sharding.shardtools import REPOSITORY, command, ledger, make, tars

pytestmark = [pytest.mark.soak, pytest.mark.timeout(7200)]

KILLS = 20
SEED = 20
SOURCES = 16
OPTIONS = ["--short-side", "64", "--samples-per-shard", "2"]
RESUMES = ("1 worker", "2 workers", "3 workers", "2 parts and a merge", "3 parts at once and a merge")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Videos of two classes, and two files that are no videos: nine shards."""
    folder = tmp_path_factory.mktemp("raw")
    for number in range(SOURCES):
        label = ("run", "jump")[number % 2]
        make(folder / label / f"v{number}.mp4", "-preset", "ultrafast", frames=5 + number, rate=str(10 + number % 7))
    (folder / "run" / "text.mp4").write_text("no video")
    (folder / "jump" / "cut.mp4").write_bytes((folder / "jump" / "v1.mp4").read_bytes()[:700])
    return folder


@pytest.fixture(scope="module")
def undisturbed(folder, tmp_path_factory):
    """The output of an undisturbed run, and its duration in seconds from its first output."""
    out = tmp_path_factory.mktemp("undisturbed") / "out"
    job = start(folder, out, "--workers", "2")
    while not (out / "ledger-parts" / "job.json").exists():
        assert job.poll() is None
        time.sleep(0.005)
    started = time.monotonic()
    assert job.wait() == 3
    assert len(tars(out)) >= 8
    return out, time.monotonic() - started


@pytest.fixture(scope="module")
def record(undisturbed):
    """The results, written after all tests of this module have passed."""
    record = {"schema": "fastvid-shard-kills/1", "seed": SEED, "sources": SOURCES + 2}
    record |= {"shards": len(tars(undisturbed[0])), "job": [], "worker": []}
    yield record
    if all(len(record[kind]) == KILLS for kind in ("job", "worker")):
        record["job_was_killed_while"] = dict(collections.Counter(kill["state"] for kill in record["job"]))
        record["machine"] = machine_facts()
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "shard_kills.json").write_text(json.dumps(record, indent=1) + "\n")


def start(folder, out, *arguments):
    return subprocess.Popen(
        [sys.executable, "-m", "fastvid", "shard", folder, "--out", out, *OPTIONS, *arguments],
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def resume(how, folder, out):
    """Run the job until the dataset exists."""
    if "part" in how:
        count = int(how[0])
        parts = []
        for part in range(count):
            parts.append(start(folder, out, "--part", f"{part}/{count}", "--workers", "1"))
            if "at once" not in how:
                parts[-1].wait()
        assert all(part.wait() in (0, 3) for part in parts)
        done = command(folder, "--out", out, *OPTIONS)
    else:
        done = command(folder, "--out", out, *OPTIONS, "--workers", how[0])
    assert done.returncode == 3, done.stderr


def state_of(out):
    """Return the progress of a killed job."""
    if (out / "dataset.json").exists():
        return "cleaning up"
    if (out / "ledger.parquet").exists():
        return "committing"
    return "packing" if list(out.rglob("*.tmp")) else "encoding"


def check(out, undisturbed):
    """Compare everything with the undisturbed run."""
    assert tars(out) == tars(undisturbed)
    assert ledger(out) == ledger(undisturbed)
    assert len({row["source_id"] for row in ledger(out)}) == len(ledger(out)) == SOURCES + 2
    assert sorted(path.name for path in out.iterdir()) == sorted(path.name for path in undisturbed.iterdir())
    for path in undisturbed.iterdir():
        if path.suffix in (".idx", ".pkt"):
            assert (out / path.name).read_bytes() == path.read_bytes()
        elif path.suffix == ".parquet" and path.name != "ledger.parquet":
            assert pq.read_table(out / path.name).equals(pq.read_table(path))
    packed = [
        key for shard in tars(out) for key in pq.read_table(out / shard.replace(".tar", ".parquet"))["key"].to_pylist()
    ]
    assert len(packed) == len(set(packed)) == len(Dataset(str(out))) == SOURCES


def test_killed_jobs_resume_to_the_same_dataset(folder, undisturbed, record, tmp_path):
    whole, length = undisturbed
    rng = random.Random(SEED)
    tries = 0
    while len(record["job"]) < KILLS:
        tries += 1
        assert tries < 4 * KILLS, "jobs are done too soon to be killed"
        out = tmp_path / f"killed-{tries}"
        part = rng.random() < 0.3
        job = start(folder, out, *(["--part", "0/2"] if part else []), "--workers", "2")
        # Interpreter startup is the least interesting moment, and on a busy machine the longest.
        while not (out / "ledger-parts" / "job.json").exists() and job.poll() is None:
            time.sleep(0.005)
        after = rng.uniform(0.0, length * (0.5 if part else 1.0))
        time.sleep(after)
        finished = job.poll() is not None
        job.send_signal(signal.SIGKILL)
        job.wait()
        state, shards, how = state_of(out), len(tars(out)), rng.choice(RESUMES)
        resume(how, folder, out)
        check(out, whole)
        if not finished:
            record["job"].append(
                {
                    "killed": "part 0/2" if part else "job",
                    "seconds_after_start": round(after, 2),
                    "state": state,
                    "shards_finished": shards,
                    "resumed_with": how,
                    "same_bytes_and_tables": True,
                }
            )
        shutil.rmtree(out)


def test_jobs_whose_workers_are_killed_make_the_same_dataset(folder, undisturbed, record, tmp_path):
    whole, length = undisturbed
    rng = random.Random(SEED + 1)
    tries = 0
    while len(record["worker"]) < KILLS:
        tries += 1
        assert tries < 4 * KILLS, "workers are gone too soon to be killed"
        out = tmp_path / f"worker-{tries}"
        workers = rng.choice([1, 2, 3])
        job = start(folder, out, "--workers", str(workers))
        after = rng.uniform(0.3, length)
        time.sleep(after)
        killed = False
        try:
            found = [
                child
                for child in psutil.Process(job.pid).children()
                if "fastvid.sharding.engines.worker" in child.cmdline()
            ]
            if found:
                rng.choice(found).kill()
                killed = True
        except psutil.NoSuchProcess:
            pass
        assert job.wait() == 3
        check(out, whole)
        if killed:
            record["worker"].append(
                {"workers": workers, "after_seconds": round(after, 2), "same_bytes_and_tables": True}
            )
        shutil.rmtree(out)
