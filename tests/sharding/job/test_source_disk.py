"""A disk that does not deliver sources is no verdict on them: the job stops, and resumes to the same bytes."""

import ctypes
import os
from dataclasses import replace

import pytest

from fastvid.errors import JobError, SourceError, StorageError
from fastvid.format.tar import read_members
from fastvid.media.reasons import Reason
from fastvid.sharding.encode import audio
from fastvid.sharding.encode.flow import Streams
from fastvid.sharding.encode.profiles import PROFILES
from fastvid.sharding.engines import local
from fastvid.sharding.job.index import index_tars
from fastvid.sharding.job.job import run_job
from fastvid.sharding.job.run import MOST_IN_A_ROW, OutageDetector
from fastvid.sharding.sources.sources import Source
from fastvid.sharding.work import encode as work
from fastvid.sharding.work.tasks import Outcome, SourceTask
from tests.sharding.shardtools import command, encode_source, ffmpeg, ledger, make, settings, tars

SMALL = PROFILES["compact"].changed(short_side=64)
OPTIONS = {"profile": SMALL, "samples_per_shard": 2, "workers": 1}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Four videos of two classes."""
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


def test_unreadable_file_with_many_clips_is_one_failure(tmp_path):
    (tmp_path / "other.mp4").touch()
    detector = OutageDetector()
    for file in ("a", "b"):
        for number in range(MOST_IN_A_ROW):
            source = Source(f"{file}{number}", str(tmp_path / f"{file}.mp4"))
            detector.add_outcome(source, Outcome(number, reason=Reason.UNREADABLE, transient=True))
    for number in range(MOST_IN_A_ROW - 3):
        source = Source(f"c{number}", str(tmp_path / f"c{number}.mp4"))
        detector.add_outcome(source, Outcome(number, reason=Reason.UNREADABLE, transient=True))
    with pytest.raises(StorageError, match=f"{MOST_IN_A_ROW} sources in a row failed"):
        detector.add_outcome(Source("d", str(tmp_path / "d.mp4")), Outcome(0, reason=Reason.UNREADABLE, transient=True))


def test_unreadable_sources_are_rejected_only_on_request(made, tmp_path, monkeypatch):
    monkeypatch.setenv("FASTVID_FAULT", "source:/1:EIO")
    with pytest.raises(JobError, match="4 unreadable"):
        run_job(str(made), tmp_path / "out", reject_unreadable=True, **OPTIONS)


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


def without_override():
    # Root may read everything, unless it drops the capabilities (PR_CAPBSET_DROP, CAP_DAC_OVERRIDE and _READ_SEARCH).
    for capability in (1, 2):
        ctypes.CDLL(None).prctl(24, capability, 0, 0, 0)


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


def test_dangling_link_is_a_missing_source(tmp_path):
    make(tmp_path / "raw" / "a.mp4", frames=3)
    (tmp_path / "raw" / "b.mp4").symlink_to("nowhere.mp4")
    report = run_job(str(tmp_path / "raw"), tmp_path / "out", **OPTIONS)
    assert report.rejected == {Reason.MISSING: 1}
    assert "a link to nowhere.mp4, which does not exist" in report.ledger["message"].to_pylist()


def encode(path, streams=None):
    how = settings(SMALL, **({"streams": streams} if streams else {}))
    return encode_source(SourceTask(0, "a", str(path), "a"), how)


@pytest.mark.parametrize("reason", [Reason.DAMAGED, Reason.TRUNCATED, Reason.NO_FRAMES, Reason.BROKEN_CONTAINER])
def test_damage_that_only_the_disk_shows_is_no_damage(reason, made, monkeypatch):
    path, probe = made / "run" / "v0.mp4", work.probe
    expected = encode(path)

    def failing(source, limits):
        # FFmpeg reports an error of the disk like damage.
        if not source.private:
            raise SourceError("reading failed after 3 packets: Input/output error", reason=reason)
        return probe(source, limits)

    monkeypatch.setattr(work, "probe", failing)
    outcome = encode(path)
    assert outcome.reason is None
    assert replace(outcome, seconds=0.0).to_bytes() == replace(expected, seconds=0.0).to_bytes()


def test_sound_is_not_dropped_because_of_the_disk(tmp_path, monkeypatch):
    path, probe_audio = tmp_path / "a.mp4", audio.probe_audio
    sound = ("-f", "lavfi", "-i", "sine=duration=1")
    ffmpeg("-f", "lavfi", "-i", "testsrc2=size=64x64:rate=10:duration=1", *sound, "-pix_fmt", "yuv420p", str(path))
    expected = encode(path, Streams(audio="aac"))

    def failing(source):
        if not source.private:
            raise SourceError("audio cannot be read: Input/output error", reason=Reason.DAMAGED)
        return probe_audio(source)

    monkeypatch.setattr(audio, "probe_audio", failing)
    outcome = encode(path, Streams(audio="aac"))
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
