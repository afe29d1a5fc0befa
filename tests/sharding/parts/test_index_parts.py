"""Indexing tars divided into parts, killed or resumed makes the same dataset as a single run, and repeats nothing."""

from __future__ import annotations

import hashlib
import io
import os
import tarfile

import pytest

import fastvid
from fastvid.cli.main import main
from fastvid.errors import JobError, UsageError
from fastvid.sharding.job import run
from fastvid.sharding.job.index import index_tars
from fastvid.sharding.verify.verify import verify_dataset
from tests import forks
from tests.sharding.shardtools import ledger, make


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Four tars of two videos each, one of which is broken, and a tar that is cut."""
    folder = tmp_path_factory.mktemp("source")
    videos = [
        make(folder / f"{n}.mp4", "-preset", "ultrafast", frames=4 + n, size="64x48").read_bytes() for n in (0, 1)
    ]
    (folder / "tars").mkdir()
    for number in range(4):
        with tarfile.open(folder / "tars" / f"{number:05d}.tar", "w") as tar:
            for place, video in enumerate(videos):
                add(tar, f"{number}-{place}.mp4", b"no video" if (number, place) == (2, 1) else video)
                add(tar, f"{number}-{place}.cls", str(place).encode())
    cut = (folder / "tars" / "00000.tar").read_bytes()
    (folder / "tars" / "00004.tar").write_bytes(cut[: len(cut) // 2])
    return folder / "tars"


def add(tar, name, data):
    info = tarfile.TarInfo(name)
    info.size = len(data)
    tar.addfile(info, io.BytesIO(data))


@pytest.fixture(scope="module")
def undisturbed(source, tmp_path_factory):
    out = tmp_path_factory.mktemp("undisturbed") / "out"
    report = index_tars([str(source)], str(out), workers=1)
    assert (report.packed, sum(report.rejected.values())) == (7, 2)
    return out


def start(source, out, *arguments, fault=""):
    return forks.start_fastvid("index", source, "--out", out, "--workers", "1", *arguments, fault=fault)


def digests(folder):
    """SHA-256 of every file except the ledger, which has times."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "ledger.parquet"]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def same(out, undisturbed):
    assert digests(out) == digests(undisturbed)
    assert ledger(out) == ledger(undisturbed)
    assert sorted(os.listdir(out)) == sorted(os.listdir(undisturbed))


def test_parallel_parts_one_of_them_killed_equal_one_run(source, undisturbed, tmp_path):
    out = tmp_path / "out"
    parts = [start(source, out, "--part", f"{n}/3", fault="ledger:2" if n == 0 else "") for n in range(3)]
    said = [part.communicate(timeout=240) for part in parts]
    assert [part.returncode for part in parts] == [-9, 3, 3], said
    assert said[1][0].startswith("part 1/3; run the command without --part to write the dataset\n")
    assert not (out / "dataset.json").exists()
    whole = start(source, out)
    printed, warned = whole.communicate(timeout=240)
    assert whole.returncode == 3, warned
    assert "7 packed" in printed
    same(out, undisturbed)
    assert verify_dataset(str(out), workers=1).problems == []
    assert fastvid.open(out).labels.tolist() == [0, 1, 0, 1, 0, 0, 1]


def test_resumed_index_does_not_repeat_finished_tars(source, undisturbed, tmp_path, monkeypatch):
    out = tmp_path / "out"
    killed = start(source, out, fault="ledger:3")
    killed.communicate(timeout=240)
    assert killed.returncode == -9
    tried = []
    real = run.open_engine

    def counting(*arguments, **options):
        engine = real(*arguments, **options)
        run = engine.run

        def record(tasks):
            def each():
                for task in tasks:
                    tried.append(task.source_id)
                    yield task

            return run(each())

        engine.run = record
        return engine

    monkeypatch.setattr(run, "open_engine", counting)
    index_tars([str(source)], str(out), workers=1)
    assert set(tried) <= {"3-0", "3-1"}, "videos of the first three tars were indexed before the kill"
    same(out, undisturbed)
    with pytest.raises(UsageError, match="a dataset exists already"):
        index_tars([str(source)], str(out), part="0/2")


def test_job_killed_after_its_commit_cleans_up_when_run_again(source, tmp_path, capsys):
    folder = tmp_path / "tars"
    folder.mkdir()
    for path in source.glob("0000[01].tar"):
        (folder / path.name).write_bytes(path.read_bytes())
    killed = forks.fastvid("index", folder, "--workers", "1", fault="committed")
    assert killed.returncode == -9
    assert (folder / "ledger-parts" / "job.json").exists()
    assert main(["index", str(folder), "--workers", "1"]) == 0
    assert "4 packed" in capsys.readouterr().out
    assert not (folder / "ledger-parts").exists()
    assert main(["index", str(folder), "--workers", "1"]) == 0
    assert "rebuilt the sidecars of 2 shards" in capsys.readouterr().out


def test_unfinished_index_refuses_changed_tars(source, tmp_path):
    folder = tmp_path / "tars"
    folder.mkdir()
    for path in source.glob("0000[01].tar"):
        (folder / path.name).write_bytes(path.read_bytes())
    index_tars([str(folder)], workers=1, part="0/2")
    tar = folder / "00001.tar"
    tar.write_bytes((source / "00003.tar").read_bytes())
    with pytest.raises(JobError, match="unfinished job here has"):
        index_tars([str(folder)], workers=1)
