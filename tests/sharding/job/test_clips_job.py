"""A job of many clips of few files: killed, divided into parts or in parallel, it makes the same dataset."""

from __future__ import annotations

import pytest

from tests.sharding.shardtools import command, ledger, make, tars
from tests.skips import soak_but

X264 = ("-pix_fmt", "yuv420p", "-preset", "ultrafast", "-g", "10", "-sc_threshold", "0")
CLIPS = 9


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Three files with nine clips each, and a clip that lies outside its file."""
    folder = tmp_path_factory.mktemp("raw")
    rows = ["path,start,end,label"]
    for name in "abc":
        make(folder / f"{name}.mp4", *X264, frames=100)
        rows += [f"{name}.mp4,{number * 0.4:.1f},{number * 0.4 + 0.3:.1f},{name}" for number in range(CLIPS)]
    (folder / "clips.csv").write_text("\n".join([*rows, "a.mp4,90,91,a"]) + "\n")
    return folder


def job(folder, out, *options, **how):
    arguments = ("--short-side", "64", "--samples-per-shard", "7", "--annotations", f"csv:{folder / 'clips.csv'}")
    return command(folder, "--out", out, *arguments, *options, **how)


@pytest.fixture(scope="module")
def undisturbed(folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("undisturbed") / "out"
    done = job(folder, out, "--workers", "1")
    assert done.returncode == 3, done.stderr
    assert len(tars(out)) == 4
    return out


@pytest.mark.parametrize("fault", soak_but(["encode:1", "encode:5", "encode:20", "ledger:2"], "encode:5", "ledger:2"))
def test_job_killed_within_a_file_resumes_to_the_same_bytes(fault, folder, undisturbed, tmp_path):
    out = tmp_path / "out"
    assert job(folder, out, "--workers", "1", fault=fault).returncode == -9
    assert job(folder, out, "--workers", "1").returncode == 3
    assert tars(out) == tars(undisturbed)
    assert ledger(out) == ledger(undisturbed)


def test_parts_and_parallel_workers_make_the_same_bytes(folder, undisturbed, tmp_path):
    for part in ("1/2", "0/2"):
        assert job(folder, tmp_path / "parts", "--workers", "1", "--part", part).returncode in (0, 3)
    for out, workers in (("parts", "1"), ("parallel", "3")):
        assert job(folder, tmp_path / out, "--workers", workers).returncode == 3
        assert tars(tmp_path / out) == tars(undisturbed)
        assert ledger(tmp_path / out) == ledger(undisturbed)
