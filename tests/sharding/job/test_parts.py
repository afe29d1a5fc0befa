"""A job divided into parts, parallel or killed, makes the same dataset as a single job."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from fastvid.errors import JobError, UsageError
from fastvid.sharding.job.lock import lock_folder
from fastvid.sharding.job.plan import JobPart
from fastvid.storage import LocalStorage
from tests.sharding.shardtools import REPOSITORY, command, ledger, make, tars

OPTIONS = ["--short-side", "64", "--samples-per-shard", "2", "--workers", "1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Nine videos and one file that is no video: five shards."""
    folder = tmp_path_factory.mktemp("raw")
    for number in range(9):
        label = ("run", "jump")[number % 2]
        make(folder / label / f"v{number}.mp4", "-preset", "ultrafast", frames=4 + number, rate=str(10 + number))
    (folder / "run" / "text.mp4").write_text("no video")
    return folder


@pytest.fixture(scope="module")
def undisturbed(folder, tmp_path_factory):
    """The output of a single job."""
    out = tmp_path_factory.mktemp("undisturbed") / "out"
    assert command(folder, "--out", out, *OPTIONS).returncode == 3
    assert len(tars(out)) == 5
    return out


def same(out, undisturbed):
    assert tars(out) == tars(undisturbed)
    assert ledger(out) == ledger(undisturbed)
    assert sorted(os.listdir(out)) == sorted(os.listdir(undisturbed))


def test_killed_part_resumes_as_itself_or_with_another_division(folder, undisturbed, tmp_path):
    out = tmp_path / "out"
    assert command(folder, "--out", out, *OPTIONS, "--part", "0/2", "--workers", "1", fault="encode:3").returncode == -9
    again = command(folder, "--out", out, *OPTIONS, "--part", "0/2")
    assert "resuming the unfinished job" in again.stderr
    for part in range(3):
        assert command(folder, "--out", out, *OPTIONS, "--part", f"{part}/3").returncode in (0, 3)
    assert command(folder, "--out", out, *OPTIONS).returncode == 3
    same(out, undisturbed)


def test_part_without_shards_does_nothing(folder, undisturbed, tmp_path):
    done = command(folder, "--out", tmp_path / "out", *OPTIONS, "--part", "7/8")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("part 7/8; run the command without --part to write the dataset\n")
    assert tars(tmp_path / "out") == {}


def test_tar_lost_after_its_part_finished_is_rebuilt(folder, undisturbed, tmp_path):
    out = tmp_path / "out"
    assert command(folder, "--out", out, *OPTIONS, "--part", "0/2").returncode in (0, 3)
    lost = min(tars(out))
    (out / lost).write_bytes((out / lost).read_bytes()[:-512])
    merged = command(folder, "--out", out, *OPTIONS)
    assert merged.returncode == 3
    assert f"{lost} does not match its part" in merged.stderr
    same(out, undisturbed)


def test_a_part_with_other_arguments_is_refused(folder, tmp_path):
    out = tmp_path / "out"
    assert command(folder, "--out", out, *OPTIONS, "--part", "0/2").returncode in (0, 3)
    other = command(folder, "--out", out, *OPTIONS, "--part", "1/2", "--crf", "40")
    assert other.returncode == 1
    assert "the unfinished job here has profile.crf" in other.stderr


def test_only_parts_may_share_a_folder(tmp_path):
    store = LocalStorage(tmp_path / "out")
    with lock_folder(store, JobPart(0, 2)):
        with (
            lock_folder(store, JobPart(1, 2)),
            pytest.raises(JobError, match="another job"),
            lock_folder(store, JobPart(1, 2)),
        ):
            pass
        with pytest.raises(JobError, match="another job"), lock_folder(store):
            pass
    with lock_folder(store), pytest.raises(JobError, match="another job"), lock_folder(store, JobPart(0, 2)):
        pass
    with lock_folder(store):
        pass
    assert not list((tmp_path / "out").iterdir())


def test_lock_is_released_when_its_process_is_killed(tmp_path):
    code = (
        "import os, sys; from fastvid.sharding.job.lock import lock_folder\n"
        "from fastvid.sharding.job.plan import JobPart\n"
        "from fastvid.storage import LocalStorage\n"
        "with lock_folder(LocalStorage(sys.argv[1]), JobPart(0, 2)): os.kill(os.getpid(), 9)"
    )
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    assert subprocess.run([sys.executable, "-c", code, tmp_path], env=environment, check=False).returncode == -9
    assert list((tmp_path / "ledger-parts").glob(".part-*.lock"))
    with lock_folder(LocalStorage(tmp_path), JobPart(0, 2)):
        pass
    with lock_folder(LocalStorage(tmp_path)):
        pass
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", ["2/2", "1", "-1/2", "1/0", "a/b", "1/2/3", "٣/٤", ""])
def test_invalid_parts_are_refused(text):
    with pytest.raises(UsageError, match="invalid part"):
        JobPart.parse(text)
