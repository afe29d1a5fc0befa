"""All footage in one run with each profile. Started by ``make soak``; results in ``bench/results/shard_corpus.json``.

`verdicts.csv` says of every file of ``clean`` and ``odd`` what is right: ``verdict`` for profiles that encode, how its
clock is read, the number of frames after holes are filled, and the verdict of ``copy``, which takes fewer codecs.
FASTVID_SOAK_DIR names a folder in which finished datasets are kept and taken up again.
"""

from __future__ import annotations

import collections
import csv
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench.common.harness import RESULTS, machine_facts, write_json
from fastvid.sharding.encode.profiles import PROFILES
from fastvid.sharding.verify.verify import verify_dataset
from tests.sharding.shardtools import REPOSITORY, ledger

pytestmark = [pytest.mark.soak, pytest.mark.timeout(7200)]

with (Path(__file__).parent / "verdicts.csv").open(encoding="utf-8", newline="") as table:
    RIGHT = {row["file"]: row for row in csv.DictReader(table)}
# Files without a picture, or truncated, damaged or not a video, may be refused by either check.
VERIFIED = 40
OPTIONS = ["--samples-per-shard", "24", *os.environ.get("FASTVID_SOAK_OPTIONS", "").split()]


@pytest.fixture(scope="module")
def known(footage):
    """Rows of the manifest by file."""
    with (footage / "manifest.csv").open(encoding="utf-8", newline="") as file:
        return {f"{row['folder']}/{row['file']}": row for row in csv.DictReader(file)}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Folder of the datasets."""
    named = os.environ.get("FASTVID_SOAK_DIR")
    return Path(named) if named else tmp_path_factory.mktemp("corpus")


@pytest.fixture(scope="module")
def record():
    """The results, written after all profiles have finished."""
    record = {"schema": "fastvid-shard-corpus/1", "machine": machine_facts(), "profiles": {}}
    yield record
    if len(record["profiles"]) == len(PROFILES):
        write_json(RESULTS / "shard_corpus.json", record)


@pytest.mark.parametrize("profile", PROFILES)
def test_every_file_has_one_true_row(profile, footage, known, place, record):
    out = place / profile
    folders = [footage / name for name in ("clean", "odd", "bad")]
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "fastvid", "shard", *folders, "--out", out, "--profile", profile, *OPTIONS],
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 3, done.stderr
    listed = ledger(out)
    rows = {row["source_id"]: row for row in listed}
    assert len(rows) == len(listed)
    assert set(rows) == set(known)
    wrong = [problem for name, row in rows.items() if (problem := judge(name, row, known[name], profile))]
    assert not wrong
    report = verify_dataset(str(out), sample=VERIFIED, workers=1)
    assert report.ok, report.problems
    table = collections.Counter((name.split("/")[0], row["reason"] or "packed") for name, row in rows.items())
    record["profiles"][profile] = {
        "files": len(rows),
        "packed": sum(row["status"] == "packed" for row in listed),
        "false_rejections": 0,
        "reasons": {f"{folder}: {reason}": count for (folder, reason), count in sorted(table.items())},
        "frames": sum(row["num_frames"] or 0 for row in listed),
        "bytes_in": sum(row["bytes_in"] for row in listed if row["status"] == "packed"),
        "bytes_out": sum(row["bytes_out"] or 0 for row in listed),
        "verified_samples": report.samples,
        "wall_seconds": round(time.monotonic() - began, 1),
    }
    if "FASTVID_SOAK_DIR" not in os.environ:
        shutil.rmtree(out)


def judge(name: str, row: dict, manifest: dict, profile: str) -> str | None:
    """Return what is wrong with a ledger row; None if it is correct."""
    verdict = row["reason"] or "packed"
    if name.startswith("bad/"):
        return None if row["status"] == "rejected" and row["message"] else f"{name} is packed"
    right = RIGHT[name]["copy" if profile == "copy" else "verdict"]
    if verdict != right:
        return f"{name} is {verdict} ({row['message']}), right is {right}"
    if verdict != "packed":
        return None
    timing, frames = RIGHT[name]["timing"], int(manifest["frames"])
    if profile != "copy" and timing == "gaps":
        frames = int(RIGHT[name]["filled"])
    slack = 1 if profile != "copy" and timing == "variable" else 0
    if abs(row["num_frames"] - frames) > slack:
        return f"{name} has {row['num_frames']} frames, right are {frames}"
    return None
