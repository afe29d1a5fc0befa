"""Full or unwritable disks: a clear error, no rejected source, and a job that can be resumed."""

import ctypes
import os
import subprocess

import pytest

from fastvid.media.reasons import Reason
from fastvid.sharding.work.tasks import SourceTask
from tests.sharding.shardtools import command, encode_source, ledger, make, settings, tars
from tests.storage.faulty import FaultyServer

OPTIONS = ["--short-side", "128", "--samples-per-shard", "2", "--workers", "1"]


def mount(*arguments: object) -> None:
    subprocess.run(["mount", *map(str, arguments)], check=True, capture_output=True)


@pytest.fixture
def disk(tmp_path):
    """A small separate disk: a function that sets its size in kB, or makes it read-only with 0."""
    folder = tmp_path / "disk"
    folder.mkdir()
    try:
        mount("-t", "tmpfs", "-o", "size=64k", "tmpfs", folder)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"a disk can be mounted only by root with all rights: {error}")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def resize(folder, kilobytes: int) -> None:
    mount("-o", f"remount,{f'rw,size={kilobytes}k' if kilobytes else 'ro'}", folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Six short videos: three shards."""
    folder = tmp_path_factory.mktemp("raw")
    for number in range(6):
        make(folder / f"v{number}.mp4", "-preset", "ultrafast", frames=10 + number, size="192x128")
    return folder


@pytest.fixture(scope="module")
def undisturbed(folder, tmp_path_factory):
    """The output of an undisturbed job."""
    out = tmp_path_factory.mktemp("undisturbed") / "out"
    assert command(folder, "--out", out, *OPTIONS).returncode == 0
    assert len(tars(out)) == 3
    return out


def is_stopped(done, *said):
    assert done.returncode == 1, done.stderr
    assert all(text in done.stderr for text in said), done.stderr
    assert "Traceback" not in done.stderr


def test_full_output_stops_the_job_and_it_resumes_with_free_space(folder, undisturbed, disk):
    out = disk / "out"
    is_stopped(command(folder, "--out", out, *OPTIONS), "No space left on device", str(out))
    assert not (out / "ledger.parquet").exists()
    resize(disk, 100_000)
    done = command(folder, "--out", out, *OPTIONS)
    assert done.returncode == 0, done.stderr
    assert "resuming the unfinished job" in done.stderr
    assert tars(out) == tars(undisturbed)
    assert ledger(out) == ledger(undisturbed)
    assert not list(out.rglob("*.tmp"))


def test_full_temporary_disk_rejects_no_source(folder, undisturbed, disk, tmp_path):
    out, temporary = tmp_path / "out", disk / "tmp"
    resize(disk, 4)
    temporary.mkdir()
    stopped = command(folder, "--out", out, *OPTIONS, TMPDIR=str(temporary))
    is_stopped(stopped, f"disk for temporary files, {temporary}, is full", "run the job again to resume it")
    assert not (out / "ledger.parquet").exists()
    assert command(folder, "--out", out, *OPTIONS).returncode == 0
    assert tars(out) == tars(undisturbed)
    assert ledger(out) == ledger(undisturbed)


def test_full_scratch_folder_is_named_in_the_error(folder, undisturbed, disk, tmp_path):
    out = tmp_path / "out"
    stopped = command(folder, "--out", out, *OPTIONS, "--scratch", disk)
    is_stopped(stopped, "No space left on device", str(disk))
    resize(disk, 100_000)
    assert command(folder, "--out", out, *OPTIONS, "--scratch", disk).returncode == 0
    assert tars(out) == tars(undisturbed)
    assert os.listdir(disk) == []


def test_job_stops_when_the_output_becomes_unwritable(folder, undisturbed, disk):
    out = disk / "out"
    resize(disk, 100_000)
    assert command(folder, "--out", out, *OPTIONS, fault="encode:3").returncode == -9
    resize(disk, 0)
    is_stopped(command(folder, "--out", out, *OPTIONS), "Read-only file system", str(out))
    resize(disk, 100_000)
    assert command(folder, "--out", out, *OPTIONS).returncode == 0
    assert tars(out) == tars(undisturbed)


def test_output_without_permission_is_named_in_the_error(folder, tmp_path):
    def without_override():
        # Root may write everywhere, unless it drops the capability (PR_CAPBSET_DROP, CAP_DAC_OVERRIDE).
        ctypes.CDLL(None).prctl(24, 1, 0, 0, 0)

    locked = tmp_path / "locked"
    locked.mkdir(mode=0o555)
    stopped = command(folder, "--out", locked / "out", *OPTIONS, preexec_fn=without_override)
    is_stopped(stopped, "Permission denied", str(locked))


def test_full_disk_during_download_rejects_no_source(folder, disk, monkeypatch):
    pytest.importorskip("obstore", reason="obstore is not installed: the extra object-stores brings it")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    resize(disk, 4)
    monkeypatch.setattr("tempfile.tempdir", str(disk))
    with FaultyServer() as server:
        server.files["v.mp4"] = (folder / "v5.mp4").read_bytes()
        task = SourceTask(0, "v", f"{server.url}/v.mp4", "v")
        outcome = encode_source(task, settings())
    assert (outcome.reason, outcome.transient) == (Reason.NO_SPACE, True)
    assert str(disk) in outcome.message
