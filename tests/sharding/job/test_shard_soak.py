"""Long runs of the sharding job: all footage, and kills at random moments. Started by ``make soak``."""

from __future__ import annotations

import collections
import csv
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest

from fastvid.media.ffmpeg import find_ffmpeg
from tests.sharding.shardtools import REPOSITORY, command, ledger, tars

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]

KILLS = 10


@pytest.fixture(scope="module")
def everything(footage, tmp_path_factory):
    """All footage in one run: the output folder and the finished process."""
    out = tmp_path_factory.mktemp("everything") / "out"
    folders = [footage / name for name in ("clean", "odd", "bad")]
    done = subprocess.run(
        [sys.executable, "-m", "fastvid", "shard", *folders, "--out", out, "--samples-per-shard", "24"],
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
    )
    return out, done


def test_every_file_has_one_true_row(everything, footage):
    out, done = everything
    assert done.returncode == 3, done.stderr
    rows = {row["source_id"]: row for row in ledger(out)}
    with (footage / "manifest.csv").open(encoding="utf-8") as file:
        known = {f"{row['folder']}/{row['file']}": row for row in csv.DictReader(file)}
    assert set(rows) == set(known)
    packed = {name for name, row in rows.items() if row["status"] == "packed"}
    # The only valid file that may be refused is one that this build of ffmpeg cannot decode.
    refused = {name for name in known if not name.startswith("bad/")} - packed
    assert all("vvc" in name and rows[name]["reason"] == "no-decoder" for name in refused)
    assert not {name for name in packed if name.startswith("bad/")}
    print(find_ffmpeg())
    print(done.stdout)
    table = collections.Counter((name.split("/")[0], row["reason"] or "packed") for name, row in rows.items())
    for (folder, verdict), count in sorted(table.items()):
        print(f"{folder:6} {verdict:18} {count}")


def test_job_killed_at_random_moments_resumes_to_the_same_bytes(footage, tmp_path):
    raw = tmp_path / "raw"
    raw.mkdir()
    small = sorted((footage / "odd").iterdir(), key=lambda path: (path.stat().st_size, path.name))[:30]
    for path in [*small, *sorted((footage / "bad").iterdir())[::6]]:
        shutil.copy(path, raw)
    options = ["--samples-per-shard", "4"]
    started = time.monotonic()
    assert command(raw, "--out", tmp_path / "whole", *options, "--workers", 2).returncode == 3
    length = time.monotonic() - started
    wanted = tars(tmp_path / "whole")
    assert len(wanted) >= 8
    rng = random.Random(20)
    for number in range(KILLS):
        out = tmp_path / f"killed-{number}"
        job = subprocess.Popen(
            [sys.executable, "-m", "fastvid", "shard", raw, "--out", out, *options, "--workers", "2"],
            env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        time.sleep(rng.uniform(0.3, length))
        job.send_signal(signal.SIGKILL)
        job.wait()
        done = command(raw, "--out", out, *options, "--workers", rng.choice([1, 2, 3]))
        assert done.returncode == 3, done.stderr
        assert tars(out) == wanted
        assert ledger(out) == ledger(tmp_path / "whole")
        shutil.rmtree(out)
