"""A disk that is full or does not deliver is no verdict on sources: a job stops, and resumes to the same bytes."""

import ctypes
import os
import resource
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest

from fastvid.errors import JobError, SourceError, StorageError
from fastvid.format.tar import read_members
from fastvid.media.reasons import Reason
from fastvid.sharding.encode import audio
from fastvid.sharding.encode.flow import Streams
from fastvid.sharding.engines import local
from fastvid.sharding.job.index import index_tars
from fastvid.sharding.job.job import run_job
from fastvid.sharding.job.run import MOST_IN_A_ROW, OutageDetector
from fastvid.sharding.sources.sources import Source
from fastvid.sharding.work import encode as work
from fastvid.sharding.work.tasks import Outcome, SourceTask
from fastvid.storage import LocalStorage
from tests.sharding.shardtools import SMALL, command, encode_source, ledger, make, settings, tars
from tests.storage.faulty import FaultyServer

OPTIONS = {"profile": SMALL, "samples_per_shard": 2, "workers": 1}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("raw") / "disk"
    for number in range(4):
        make(folder / ("run", "jump")[number % 2] / f"v{number}.mp4", "-preset", "ultrafast", frames=4 + number)
    return folder


@pytest.fixture(scope="module")
def undisturbed(made, tmp_path_factory):
    out = tmp_path_factory.mktemp("undisturbed") / "out"
    assert not run_job(str(made), out, **OPTIONS).rejected
    assert len(tars(out)) == 2
    return out


def is_whole(out, undisturbed):
    assert tars(out) == tars(undisturbed)
    assert ledger(out) == ledger(undisturbed)


def strike(monkeypatch, action):
    """Call `action` after the first outcome of a job."""

    class Engine(local.LocalEngine):
        def run(self, tasks):
            for outcome in super().run(tasks):
                if action:
                    action.pop()()
                yield outcome

    monkeypatch.setattr(local, "LocalEngine", Engine)


def test_source_with_a_passing_read_error_is_packed(made, undisturbed, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("FASTVID_FAULT", "source:2:EIO")
    with caplog.at_level("INFO"):
        run_job(str(made), tmp_path / "out", **OPTIONS)
    assert "retrying each of 1 sources alone" in caplog.text
    is_whole(tmp_path / "out", undisturbed)


@pytest.mark.parametrize("code", ["EIO", "ESTALE", "ENOENT", "EACCES", "ETIMEDOUT", "EINVAL"])
def test_sources_with_lasting_read_errors_stop_the_job_at_its_end(code, made, undisturbed, tmp_path, monkeypatch):
    out = tmp_path / "out"
    monkeypatch.setenv("FASTVID_FAULT", f"source:/2:{code}")  # two of four, then also the first of them alone
    with pytest.raises(StorageError, match=r"source.* cannot be read, the first") as caught:
        run_job(str(made), out, **OPTIONS)
    assert "run the job again to resume it; nothing is lost" in caught.value.hint
    assert not (out / "ledger.parquet").exists()
    monkeypatch.delenv("FASTVID_FAULT")
    run_job(str(made), out, **OPTIONS)
    is_whole(out, undisturbed)


def test_many_read_errors_in_a_row_stop_the_job_early(made, tmp_path, monkeypatch):
    monkeypatch.setattr("fastvid.sharding.job.run.MOST_IN_A_ROW", 3)
    monkeypatch.setenv("FASTVID_FAULT", "source:/1:EIO")
    with pytest.raises(StorageError, match="3 sources in a row failed: cannot read the file: Input/output error"):
        run_job(str(made), tmp_path / "out", **OPTIONS)


def test_unreadable_sources_are_rejected_only_on_request(made, tmp_path, monkeypatch):
    monkeypatch.setenv("FASTVID_FAULT", "source:/1:EIO")
    with pytest.raises(JobError, match="4 unreadable"):
        run_job(str(made), tmp_path / "out", reject_unreadable=True, **OPTIONS)


def test_unreadable_file_with_many_clips_is_one_failure(tmp_path):
    (tmp_path / "other.mp4").touch()
    detector = OutageDetector()

    def fail(name, file):
        unreadable = Outcome(0, reason=Reason.UNREADABLE, transient=True)
        detector.add_outcome(Source(name, str(tmp_path / f"{file}.mp4")), unreadable)

    for file in ("a", "b"):
        for number in range(MOST_IN_A_ROW):
            fail(f"{file}{number}", file)
    for number in range(MOST_IN_A_ROW - 3):
        fail(f"c{number}", f"c{number}")
    with pytest.raises(StorageError, match=f"{MOST_IN_A_ROW} sources in a row failed"):
        fail("d", "d")


@pytest.mark.parametrize("how", ["renamed folder", "vanished root", "unmounted root"])
def test_sources_that_go_away_stop_the_job_and_lose_nothing(how, made, undisturbed, tmp_path, monkeypatch):
    away, out = made.with_name("away"), tmp_path / "out"
    whole = {"renamed folder": (made / "run", away), "vanished root": (made, away), "unmounted root": (made, away)}[how]

    def vanish():
        os.rename(*whole)
        if how == "unmounted root":
            made.mkdir()

    with monkeypatch.context() as patched:
        strike(patched, [vanish])
        try:
            with pytest.raises(StorageError, match=r"folder of the sources is gone: |cannot be read, the first"):
                run_job(str(made), out, **OPTIONS)
        finally:
            if how == "unmounted root":
                made.rmdir()
            os.rename(*reversed(whole))
    assert not (out / "ledger.parquet").exists()
    run_job(str(made), out, **OPTIONS)
    is_whole(out, undisturbed)


def without(*capabilities):
    for one in capabilities:
        ctypes.CDLL(None).prctl(24, one, 0, 0, 0)  # PR_CAPBSET_DROP


def without_override():
    without(1, 2)  # root may read everything, unless it drops CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH


def test_files_and_folders_without_permission_are_not_lost(made, undisturbed, tmp_path):
    arguments = (made, "--out", tmp_path / "out", "--short-side", 64, "--samples-per-shard", 2, "--workers", 1)
    video = made / "run" / "v0.mp4"
    for place, said in ((made / "run", "sources cannot be listed: Permission denied"), (video, "cannot read the file")):
        mode = place.stat().st_mode
        place.chmod(0)
        try:
            stopped = command(*arguments, preexec_fn=without_override)
        finally:
            place.chmod(mode)
        assert stopped.returncode == 1, stopped.stderr
        assert said in stopped.stderr
        assert str(place) in stopped.stderr
    assert "--reject-unreadable" in stopped.stderr
    assert command(*arguments).returncode == 0
    is_whole(tmp_path / "out", undisturbed)


@pytest.mark.parametrize(
    ("closed", "words"),
    [
        ("", "inspect DATA"),
        ("", "shard RAW --out DATA/new"),
        ("", "index HERE --out NEW"),  # tars of an export
        ("ledger-parts", "gc DATA --yes"),
        ("generations", "verify DATA --name walking"),
        ("removals", "verify DATA --name walking"),
    ],
)
def test_a_folder_that_may_not_be_read_is_an_error_that_names_it(closed, words, made, undisturbed, tmp_path):
    data = shutil.copytree(undisturbed, tmp_path / "data")
    shutil.copy(data / "data-000000.tar", tmp_path / "a.tar")
    (tmp_path / "export.json").touch()
    place = data / closed
    place.mkdir(exist_ok=True)
    place.chmod(0)
    paths = {"DATA": data, "RAW": made, "HERE": tmp_path, "NEW": tmp_path / "new"}
    for name, path in paths.items():
        words = words.replace(name, str(path))
    line = [sys.executable, "-m", "fastvid", *words.split()]
    try:
        done = subprocess.run(line, preexec_fn=without_override, capture_output=True, text=True, check=False)
    finally:
        place.chmod(0o755)
    is_stopped(done, "Permission denied", str(place))


def test_the_limits_of_a_users_shell_are_kept_and_reject_no_source(made, undisturbed, tmp_path):
    def limit():
        without(24)  # CAP_SYS_RESOURCE: root may raise its limits
        for kind, value in ((resource.RLIMIT_CPU, 100), (resource.RLIMIT_FSIZE, 1 << 20)):
            resource.setrlimit(kind, (value, value))

    words = (made, "--out", tmp_path / "out", "--short-side", 64, "--samples-per-shard", 2, "--workers", 1)
    done = command(*words, preexec_fn=limit)
    assert done.returncode == 0, done.stderr
    is_whole(tmp_path / "out", undisturbed)


def test_dangling_link_is_a_missing_source(tmp_path):
    make(tmp_path / "raw" / "a.mp4", frames=3)
    (tmp_path / "raw" / "b.mp4").symlink_to("nowhere.mp4")
    report = run_job(str(tmp_path / "raw"), tmp_path / "out", **OPTIONS)
    assert report.rejected == {Reason.MISSING: 1}
    assert "a link to nowhere.mp4, which does not exist" in report.ledger["message"].to_pylist()


def encode(path, sound="drop"):
    return encode_source(SourceTask(0, "a", str(path), "a"), settings(SMALL, streams=Streams(audio=sound)))


def failing(probe, reason):
    """Read like a disk whose error FFmpeg reports as damage, but not from a copy of the file."""

    def fail(source, *arguments):
        if not source.private:
            raise SourceError("reading failed after 3 packets: Input/output error", reason=reason)
        return probe(source, *arguments)

    return fail


@pytest.mark.parametrize("reason", [Reason.DAMAGED, Reason.TRUNCATED, Reason.NO_FRAMES, Reason.BROKEN_CONTAINER])
def test_damage_that_only_the_disk_shows_is_no_damage(reason, made, monkeypatch):
    path = made / "run" / "v0.mp4"
    expected = encode(path)
    monkeypatch.setattr(work, "probe", failing(work.probe, reason))
    outcome = encode(path)
    assert outcome.reason is None
    assert replace(outcome, seconds=0.0).to_bytes() == replace(expected, seconds=0.0).to_bytes()


def test_sound_is_not_dropped_because_of_the_disk(tmp_path, monkeypatch):
    sound = ("-f", "lavfi", "-i", "sine=duration=1")
    path = make(tmp_path / "a.mp4", *sound, "-pix_fmt", "yuv420p", size="64x64", rate="10", frames=10)
    expected = encode(path, "aac")
    monkeypatch.setattr(audio, "probe_audio", failing(audio.probe_audio, Reason.DAMAGED))
    outcome = encode(path, "aac")
    assert "audio" in outcome.samples[0].streams
    assert outcome.samples == expected.samples


def test_read_errors_of_indexed_tars_stop_the_job_and_lose_nothing(undisturbed, tmp_path, monkeypatch):
    folder = tmp_path / "tars"
    folder.mkdir()
    for path in undisturbed.glob("*.tar"):
        (folder / path.name).write_bytes(path.read_bytes())
        assert list(read_members(memoryview(path.read_bytes())))
    monkeypatch.setenv("FASTVID_FAULT", "source:/1:EIO")
    with pytest.raises(StorageError, match="4 sources cannot be read, the first: cannot read the file: Input/output"):
        index_tars([str(folder)], str(tmp_path / "out"), workers=1)
    monkeypatch.delenv("FASTVID_FAULT")
    report = index_tars([str(folder)], str(tmp_path / "out"), workers=1)
    assert (report.packed, report.rejected) == (4, {})
    monkeypatch.setenv("FASTVID_FAULT", "source:2:EIO")
    report = index_tars([str(folder)], str(tmp_path / "passing"), workers=1)
    assert (report.packed, report.rejected) == (4, {})


WORDS = ["--short-side", "128", "--samples-per-shard", "2", "--workers", "1"]


def mount(*arguments: object) -> None:
    subprocess.run(["mount", *map(str, arguments)], check=True, capture_output=True)


@pytest.fixture
def disk(tmp_path):
    place = tmp_path / "disk"
    place.mkdir()
    try:
        mount("-t", "tmpfs", "-o", "size=64k", "tmpfs", place)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"a disk can be mounted only by root with all rights: {error}")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


def resize(place, kilobytes: int) -> None:
    """Give it another size in kB, or make it read-only by 0."""
    mount("-o", f"remount,{f'rw,size={kilobytes}k' if kilobytes else 'ro'}", place)


@pytest.fixture(scope="module")
def films(tmp_path_factory):
    folder = tmp_path_factory.mktemp("raw")
    for number in range(6):
        make(folder / f"v{number}.mp4", "-preset", "ultrafast", frames=10 + number, size="192x128")
    return folder


@pytest.fixture(scope="module")
def packed(films, tmp_path_factory):
    out = tmp_path_factory.mktemp("packed") / "out"
    assert command(films, "--out", out, *WORDS).returncode == 0
    assert len(tars(out)) == 3
    return out


def is_stopped(done, *said):
    assert done.returncode == 1, done.stderr
    assert all(text in done.stderr for text in said), done.stderr
    assert "Traceback" not in done.stderr


def test_full_output_stops_the_job_and_it_resumes_with_free_space(films, packed, disk):
    out = disk / "out"
    is_stopped(command(films, "--out", out, *WORDS), "No space left on device", str(out))
    assert not (out / "ledger.parquet").exists()
    resize(disk, 100_000)
    done = command(films, "--out", out, *WORDS)
    assert done.returncode == 0, done.stderr
    assert "resuming the unfinished job" in done.stderr
    is_whole(out, packed)
    assert not list(out.rglob("*.tmp"))


def test_full_temporary_disk_rejects_no_source(films, packed, disk, tmp_path):
    out, temporary = tmp_path / "out", disk / "tmp"
    resize(disk, 4)
    temporary.mkdir()
    stopped = command(films, "--out", out, *WORDS, TMPDIR=str(temporary))
    is_stopped(stopped, f"disk for temporary files, {temporary}, is full", "run the job again to resume it")
    assert not (out / "ledger.parquet").exists()
    assert command(films, "--out", out, *WORDS).returncode == 0
    is_whole(out, packed)


def test_full_scratch_folder_is_named_in_the_error(films, packed, disk, tmp_path):
    out = tmp_path / "out"
    stopped = command(films, "--out", out, *WORDS, "--scratch", disk)
    is_stopped(stopped, "No space left on device", str(disk))
    resize(disk, 100_000)
    assert command(films, "--out", out, *WORDS, "--scratch", disk).returncode == 0
    is_whole(out, packed)
    assert os.listdir(disk) == []


def test_job_stops_when_the_output_becomes_unwritable(films, packed, disk):
    out = disk / "out"
    resize(disk, 100_000)
    assert command(films, "--out", out, *WORDS, fault="encode:3").returncode == -9
    resize(disk, 0)
    is_stopped(command(films, "--out", out, *WORDS), "Read-only file system", str(out))
    resize(disk, 100_000)
    assert command(films, "--out", out, *WORDS).returncode == 0
    assert tars(out) == tars(packed)


def test_a_disk_that_cannot_be_written_is_named_in_the_error(disk):
    resize(disk, 0)
    with pytest.raises(StorageError, match=f"Read-only file system .*{disk}/new"):
        LocalStorage(disk).write("new", b"")


def test_output_without_permission_is_named_in_the_error(films, tmp_path):
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o555)
    stopped = command(films, "--out", locked / "out", *WORDS, preexec_fn=without_override)
    is_stopped(stopped, "Permission denied", str(locked))


def test_full_disk_during_download_rejects_no_source(films, disk, monkeypatch):
    pytest.importorskip("obstore", reason="obstore is not installed: the extra object-stores brings it")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    resize(disk, 4)
    monkeypatch.setattr("tempfile.tempdir", str(disk))
    with FaultyServer() as server:
        server.files["v.mp4"] = (films / "v5.mp4").read_bytes()
        task = SourceTask(0, "v", f"{server.url}/v.mp4", "v")
        outcome = encode_source(task, settings())
    assert (outcome.reason, outcome.transient) == (Reason.NO_SPACE, True)
    assert str(disk) in outcome.message
