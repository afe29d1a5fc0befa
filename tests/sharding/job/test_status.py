"""`fastvid status`: a job that runs, was killed, is divided into parts or is finished."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from typing import ClassVar

import pytest

from fastvid.cli.main import main
from fastvid.runtime.processes import namespace
from fastvid.sharding.job import status as status_module
from fastvid.sharding.job.job import run_job
from fastvid.sharding.job.status import read_status
from fastvid.storage import LocalStorage
from tests import forks
from tests.sharding.shardtools import make

OPTIONS = ["--short-side", "64", "--samples-per-shard", "2", "--workers", "1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Thirty videos and one file that is no video: sixteen shards."""
    folder = tmp_path_factory.mktemp("raw")
    video = make(folder / "run" / "v00.mp4", "-preset", "ultrafast", frames=40)
    for number in range(1, 30):
        shutil.copy(video, folder / "run" / f"v{number:02d}.mp4")
    (folder / "run" / "text.mp4").write_text("no video")
    return folder


def start(folder, out, *arguments, fault=""):
    return forks.start_fastvid("shard", folder, "--out", out, *OPTIONS, *arguments, fault=fault)


def test_status_of_a_job_that_runs_is_killed_and_resumed(folder, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["status", str(out)]) == 1
    assert "no dataset and no unfinished job" in capsys.readouterr().err
    # A process records its progress after two seconds and then every twenty: the work of a killed one is in the first.
    assert start(folder, out, fault="ledger:3").wait(timeout=240) == -signal.SIGKILL
    # This one comes no further than its second shard, so that it runs while its status is read.
    job = start(folder, out, fault="ledger:2:WAIT")
    try:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            found = read_status(str(out)).job
            # The last record may still be that of the killed process.
            mine = found is not None and [part.pid for part in found.parts] == [job.pid]
            if mine and found.shards_done and found.sources_done:
                break
            time.sleep(0.2)
        assert (found.kind, found.command, found.state, found.shards, found.sources) == (
            "job",
            "shard",
            "running",
            16,
            31,
        )
        (process,) = found.parts
        assert (process.part, process.state, process.host) == (None, "running", socket.gethostname())
        assert process.pid == job.pid
        assert job.poll() is None, "the job was running when its status was read"
    finally:
        job.send_signal(signal.SIGKILL)
        job.wait()
    found = read_status(str(out)).job
    assert (found.state, found.parts[0].state, found.seconds_left) == ("interrupted", "stale", None)
    assert main(["status", str(out)]) == 0
    said = capsys.readouterr().out
    assert "job: fastvid shard, interrupted" in said
    assert f"stale    {socket.gethostname()} process {job.pid}" in said
    assert start(folder, out).wait(timeout=240) == 3
    done = read_status(str(out))
    assert done.job is None
    assert (done.dataset.generation, done.dataset.samples, done.dataset.shards) == (1, 30, 16)
    assert done.dataset.bytes == sum(path.stat().st_size for path in out.glob("*.tar"))
    assert not (out / "ledger-parts").exists()


def test_status_of_parts_adds_up(folder, tmp_path, capsys):
    out = tmp_path / "out"
    # Another division came first: its shards are counted once.
    options = {"samples_per_shard": 2, "workers": 1}
    run_job(str(folder), str(out), part="0/8", **options)
    for part in ("0/2", "1/2"):
        run_job(str(folder), str(out), part=part, **options)
    assert main(["status", str(out), "--json", "--watch", "1"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert set(record) == {"folder", "time", "dataset", "job"}
    job = record["job"]
    assert set(job) == {
        "kind", "command", "state", "shards", "shards_done", "sources", "sources_done", "packed", "rejected", "reasons",
        "bytes", "sources_per_second", "seconds_left", "parts",
    }  # fmt: skip
    assert (job["state"], job["shards"], job["shards_done"]) == ("uncommitted", 16, 16)
    assert (job["sources"], job["sources_done"], job["packed"]) == (31, 31, 30)
    assert (job["rejected"], job["reasons"]) == (1, {"not-video": 1})
    assert job["bytes"] == sum(path.stat().st_size for path in out.glob("*.tar"))
    assert [(part["part"], part["state"], part["shards_done"]) for part in job["parts"]] == [
        ("0/2", "finished", 8),
        ("1/2", "finished", 8),
    ]
    assert set(job["parts"][0]) == {
        "part", "command", "state", "host", "pid", "started", "last_sign", "shards", "shards_done", "sources",
        "sources_done", "rejected", "reasons", "bytes", "sources_per_second",
    }  # fmt: skip
    run_job(str(folder), str(out), **options)
    assert read_status(str(out)).job is None


def test_failed_process_is_named(folder, tmp_path):
    out = tmp_path / "out"
    limited = start(folder, out, fault="encode:3:EIO")
    assert limited.wait() > 0
    job = read_status(str(out)).job
    assert (job.state, [part.state for part in job.parts]) == ("interrupted", ["failed"])
    assert job.sources_done == 2


def test_status_of_a_job_in_an_object_store(folder, s3):
    url = f"s3://{s3.bucket()}/set"
    options = {"samples_per_shard": 2, "workers": 1}
    run_job(str(folder), url, part="1/16", **options)
    status = read_status(url)
    assert status.dataset is None
    assert (status.job.state, status.job.shards, status.job.shards_done) == ("interrupted", 16, 1)
    assert [(part.part, part.state, part.pid) for part in status.job.parts] == [("1/16", "finished", os.getpid())]


class Counting(LocalStorage):
    """A folder that counts requests."""

    counts: ClassVar[Counter[str]] = Counter()

    def list(self, prefix=""):
        self.counts["list"] += 1
        return super().list(prefix)

    def exists(self, name):
        self.counts["exists"] += 1
        return super().exists(name)

    def read(self, name):
        self.counts["read"] += 1
        return super().read(name)


def record(part, of, **changes):
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return {
        "command": "shard", "part": f"{part}/{of}", "host": f"node{part}", "namespace": "elsewhere", "pid": 7,
        "shards": 10, "all_shards": 10 * of, "state": "running", "time": now, "started": "2026-01-01T00:00:00Z",
        "shards_done": 2, "sources": 1000, "sources_done": 250, "rejected": 1, "reasons": {"not-video": 1},
        "bytes": 5, "sources_per_second": 2.0,
    } | changes  # fmt: skip


def test_thousand_parts_cost_one_request_each(tmp_path, monkeypatch, capsys):
    store = Counting(tmp_path)
    lines = {"job.json": json.dumps({"sources": {"number": 1_000_000}})}
    for part in range(1000):
        changes = {"time": "2026-01-01T00:00:00Z"} if part == 3 else {"state": "finished"} if part == 4 else {}
        if part == 5:
            # In this namespace, a process that has ended is known at once.
            ended = subprocess.Popen([sys.executable, "-c", ""])
            ended.wait()
            changes = {"namespace": namespace(), "pid": ended.pid}
        if part == 6:
            changes = {"sources_per_second": 0.5}
        lines[f"progress/part-{part}-of-1000.json"] = json.dumps(record(part, 1000, **changes))
    lines |= {f"data-{shard:06d}.parquet": "" for shard in range(2000)}
    (tmp_path / "ledger-parts" / "progress").mkdir(parents=True)
    for name, text in lines.items():
        (tmp_path / "ledger-parts" / name).write_text(text)
    monkeypatch.setattr(status_module, "open_storage", lambda folder: store)
    monkeypatch.setattr(Counting, "counts", Counter())
    job = read_status(str(tmp_path)).job
    assert Counting.counts == {"list": 1, "read": 1001, "exists": 1}
    assert Counter(part.state for part in job.parts) == {"running": 997, "finished": 1, "stale": 2}
    assert [part.part for part in job.parts[:7]] == [f"{n}/1000" for n in range(7)]
    assert [job.parts[n].state for n in (3, 4, 5)] == ["stale", "finished", "stale"]
    assert (job.shards, job.shards_done, job.sources_done, job.rejected) == (10_000, 2000, 250_000, 1000)
    assert job.sources_per_second == 996 * 2 + 0.5
    # The slowest part, not the mean, determines the time left.
    assert job.seconds_left == 750 / 0.5
    assert main(["status", str(tmp_path), "--missing"]) == 0
    assert capsys.readouterr().out == "3,5\n"
    for part in (10, 11, 12, 999):
        (tmp_path / f"ledger-parts/progress/part-{part}-of-1000.json").unlink()
    assert main(["status", str(tmp_path), "--missing"]) == 0
    assert capsys.readouterr().out == "3,5,10-12,999\n"
    for part in (10, 11, 12, 999):
        name = f"ledger-parts/progress/part-{part}-of-1000.json"
        (tmp_path / name).write_text(json.dumps(record(part, 1000)))
    assert main(["status", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "997 running, 2 stale" in said
    assert said.index("node3 process 7") < said.index("node0 process 7"), "stale parts are listed first"
    assert "and 980 more: use --all" in said


@pytest.mark.parametrize(
    "hostile",
    [
        "{", "[]", "[" * 100_000, '"\\ud800"', "{}",
        *(json.dumps(record(1, 2) | change) for change in (
            {"pid": "seven"}, {"part": "x/y"}, {"part": "0/" + "9" * 5000}, {"time": "yesterday"}, {"time": None},
            {"reasons": ["many"]}, {"sources_done": "all"}, {"started": 7}, {"state": None},
        )),
    ],
)  # fmt: skip
def test_a_record_that_a_stranger_wrote_is_named_and_left_out(hostile, tmp_path, caplog, capsys):
    (tmp_path / "ledger-parts" / "progress").mkdir(parents=True)
    for name, text in {
        "job.json": json.dumps({"sources": {"number": 2}}),
        "progress/part-0-of-2.json": json.dumps(record(0, 2)),
        "progress/part-1-of-2.json": hostile,
    }.items():
        (tmp_path / "ledger-parts" / name).write_text(text)
    with caplog.at_level("WARNING"):
        assert [part.part for part in read_status(str(tmp_path)).job.parts] == ["0/2"]
    assert "part-1-of-2.json is no record of a job" in caplog.text
    assert main(["status", str(tmp_path)]) == 0
    (tmp_path / "ledger-parts" / "job.json").write_text(hostile)
    assert main(["status", str(tmp_path)]) in (0, 1)
    assert "Traceback" not in capsys.readouterr().err
