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
from unittest.mock import Mock

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
    out, host = tmp_path / "out", socket.gethostname()
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
        job_is = (found.kind, found.command, found.state, found.shards, found.sources)
        assert job_is == ("job", "shard", "running", 16, 31)
        (process,) = found.parts
        assert (process.part, process.state, process.host, process.pid) == (None, "running", host, job.pid)
        assert job.poll() is None, "the job was running when its status was read"
    finally:
        job.send_signal(signal.SIGKILL)
        job.wait()
    found = read_status(str(out)).job
    assert (found.state, found.parts[0].state, found.seconds_left) == ("interrupted", "stale", None)
    assert main(["status", str(out)]) == 0
    said = capsys.readouterr().out
    assert "job: fastvid shard, interrupted" in said
    assert f"stale    {host} process {job.pid}" in said
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
    assert start(folder, out, fault="encode:3:EIO").wait() > 0
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


def record(part, of, **changes):
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return {
        "command": "shard", "part": f"{part}/{of}", "host": f"node{part}", "namespace": "elsewhere", "pid": 7,
        "shards": 10, "all_shards": 10 * of, "state": "running", "time": now, "started": "2026-01-01T00:00:00Z",
        "shards_done": 2, "sources": 1000, "sources_done": 250, "rejected": 1, "reasons": {"not-video": 1},
        "bytes": 5, "sources_per_second": 2.0,
    } | changes  # fmt: skip


def test_thousand_parts_cost_one_request_each(tmp_path, monkeypatch, capsys):
    # In this namespace, a process that has ended is known at once.
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    odd = {3: {"time": "2026-01-01T00:00:00Z"}, 4: {"state": "finished"}, 6: {"sources_per_second": 0.5},
           5: {"namespace": namespace(), "pid": ended.pid}}  # fmt: skip
    folder = tmp_path / "ledger-parts"
    (folder / "progress").mkdir(parents=True)
    (folder / "job.json").write_text(json.dumps({"sources": {"number": 1_000_000}}))
    parts = [folder / f"progress/part-{part}-of-1000.json" for part in range(1000)]
    for part, path in enumerate(parts):
        path.write_text(json.dumps(record(part, 1000, **odd.get(part, {}))))
    for shard in range(2000):
        (folder / f"data-{shard:06d}.parquet").touch()
    store = LocalStorage(tmp_path)
    asked = {name: Mock(wraps=getattr(store, name)) for name in ("list", "read", "exists")}
    for name, counted in asked.items():
        monkeypatch.setattr(store, name, counted)
    monkeypatch.setattr(status_module, "open_storage", lambda folder: store)
    job = read_status(str(tmp_path)).job
    assert {name: counted.call_count for name, counted in asked.items()} == {"list": 1, "read": 1001, "exists": 1}
    assert Counter(part.state for part in job.parts) == {"running": 997, "finished": 1, "stale": 2}
    assert [part.part for part in job.parts[:7]] == [f"{n}/1000" for n in range(7)]
    assert [job.parts[n].state for n in (3, 4, 5)] == ["stale", "finished", "stale"]
    assert (job.shards, job.shards_done, job.sources_done, job.rejected) == (10_000, 2000, 250_000, 1000)
    assert job.sources_per_second == 996 * 2 + 0.5
    # The slowest part, not the mean, determines the time left.
    assert job.seconds_left == 750 / 0.5
    said = printed(capsys, tmp_path)
    assert "997 running, 2 stale" in said
    assert said.index("node3 process 7") < said.index("node0 process 7"), "stale parts are listed first"
    assert "and 980 more: use --all" in said
    assert printed(capsys, tmp_path, "--missing") == "3,5\n"
    for part in (10, 11, 12, 999):
        parts[part].unlink()
    assert printed(capsys, tmp_path, "--missing") == "3,5,10-12,999\n"


def printed(capsys, folder, *options):
    assert main(["status", str(folder), *options]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    "hostile",
    [
        "{", "[]", "[" * 100_000, '"\\ud800"', "{}",
        *(json.dumps(record(1, 2) | change) for change in (
            {"pid": "seven"}, {"part": "x/y"}, {"part": "0/" + "9" * 5000}, {"time": "yesterday"}, {"time": None},
            {"reasons": ["many"]}, {"sources_done": "all"}, {"started": 7}, {"state": None}, {"state": "sleeping"},
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
