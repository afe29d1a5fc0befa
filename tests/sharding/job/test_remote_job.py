"""Jobs with sources or datasets in an object store or on a web server."""

import json
import os
import re
import shutil
import signal
import threading
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler

import pytest

pytest.importorskip("obstore", reason="obstore is not installed: the extra object-stores brings it")

from fastvid.cli.main import main
from fastvid.errors import JobError, StorageError, UsageError
from fastvid.format.dataset import Dataset
from fastvid.media.ffmpeg import Limits
from fastvid.media.reasons import Reason
from fastvid.sharding.job import lock
from fastvid.sharding.job.job import run_job
from fastvid.sharding.job.lock import lock_folder
from fastvid.sharding.job.plan import JobPart
from fastvid.sharding.sources.sources import find_sources
from fastvid.sharding.verify.verify import verify_dataset
from fastvid.sharding.work.tasks import SourceTask
from fastvid.storage import LocalStorage, RemoteOptions, open_storage
from tests import forks
from tests.load.tools import until
from tests.sharding.shardtools import SMALL, command, copy_files, encode_source, ledger, make, settings, tars
from tests.storage.local_server import LocalServer
from tests.storage.lossy import LossyProxy

OPTIONS = ["--short-side", "64", "--samples-per-shard", "2", "--workers", "1"]
ARGUMENTS = {"profile": SMALL, "samples_per_shard": 2, "workers": 1}


@pytest.fixture(autouse=True)
def loopback(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Five videos of two classes with odd names, and one file that is no video: three shards."""
    folder = tmp_path_factory.mktemp("raw")
    for number, name in enumerate(("run/a b.mp4", "run/c+d%20.mp4", "run/é.mp4", "jump/e#1?.mp4", "jump/f.mp4")):
        make(folder / name, "-preset", "ultrafast", frames=4 + number, rate=str(10 + number))
    (folder / "run" / "text.mp4").write_text("no video")
    (folder / "notes.txt").write_text("for people")
    return folder


@pytest.fixture(scope="module")
def undisturbed(folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("undisturbed") / "out"
    assert command(folder, "--out", out, *OPTIONS).returncode == 3
    assert len(tars(out)) == 3
    return out


@pytest.fixture
def bucket(s3, tmp_path, monkeypatch):
    """A new bucket; temporary files are in a separate folder."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr("tempfile.tempdir", None)
    return s3.bucket()


def same(url, undisturbed, folder):
    copy_files(open_storage(url), LocalStorage(folder))
    assert tars(folder) == tars(undisturbed)
    assert ledger(folder) == ledger(undisturbed)
    assert sorted(LocalStorage(folder).list()) == sorted(LocalStorage(undisturbed).list())
    for path in [*undisturbed.glob("*.idx"), *undisturbed.glob("*.pkt")]:
        assert (folder / path.name).read_bytes() == path.read_bytes()
    assert Dataset(url).annotations.equals(Dataset(str(undisturbed)).annotations)


def upload(folder, url):
    copy_files(LocalStorage(folder), open_storage(url))


def test_job_output_is_equal_on_object_store_and_disk(s3, bucket, folder, undisturbed, tmp_path):
    url = f"s3://{bucket}/sets/one"
    done = command(folder, "--out", url, *OPTIONS)
    assert done.returncode == 3, done.stderr
    assert f"{url}: 3 shards" in done.stdout
    # Shards are indexed without reading them back, and the commit record is written last.
    requests = s3.requests(bucket)
    assert len([path for method, path, _ in requests if method == "PUT" and path.endswith(".tar")]) == 3
    assert not [path for method, path, _ in requests if method == "GET" and path.endswith(".tar")]
    written = [path for method, path, _ in requests if method == "PUT" and "progress" not in path]
    assert written[-1] == "sets/one/dataset.json"
    same(url, undisturbed, tmp_path / "copy")
    assert s3.uploads(bucket) == 0
    assert os.listdir(tmp_path / "tmp") == []
    again = command(folder, "--out", url, *OPTIONS)
    assert (again.returncode, again.stdout) == (3, done.stdout)


def test_a_job_that_is_asked_to_end_gives_up_its_lease(bucket, folder, tmp_path):
    url = f"s3://{bucket}/set"
    first = forks.start_fastvid("shard", folder, "--out", url, *OPTIONS, "--scratch", tmp_path / "scratch")
    until(lambda: open_storage(url).list(lock.PROGRESS))  # it has the lease, and all of its work before it
    first.send_signal(signal.SIGTERM)
    assert first.wait() == 128 + signal.SIGTERM
    assert first.communicate()[1].endswith("fastvid shard: interrupted\n")
    left = [json.loads(open_storage(url).read(name)) for name in open_storage(url).list(lock.PROGRESS)]
    assert [record["state"] for record in left] == ["failed"] * len(left)
    assert command(folder, "--out", url, *OPTIONS).returncode == 3


@pytest.mark.parametrize("fault", ["upload:6", "ledger:2", "committed"])
def test_killed_job_resumes_on_another_machine(fault, bucket, folder, undisturbed, tmp_path):
    url = f"s3://{bucket}/set"
    first = command(folder, "--out", url, *OPTIONS, "--scratch", tmp_path / "one", fault=fault)
    assert first.returncode == -9, first.stderr
    assert fault != "upload:6" or len(open_storage(url).list("ledger-parts/data-")) == 1
    second = command(folder, "--out", url, *OPTIONS, "--workers", "2", "--scratch", tmp_path / "two")
    assert second.returncode == 3, second.stderr
    same(url, undisturbed, tmp_path / "copy")


def test_killed_job_resumes_from_its_scratch_folder(bucket, folder, undisturbed, tmp_path):
    url = f"s3://{bucket}/set"
    arguments = (folder, "--out", url, *OPTIONS)
    assert command(*arguments, fault="encode:2").returncode == -9
    (staged,) = [path for path in (tmp_path / "tmp").rglob("0*") if path.is_file()]
    before = staged.stat().st_mtime_ns
    assert command(*arguments, fault="tar:1").returncode == -9
    assert staged.stat().st_mtime_ns == before
    assert command(*arguments).returncode == 3
    same(url, undisturbed, tmp_path / "copy")
    assert os.listdir(tmp_path / "tmp") == []


def test_parts_run_in_parallel_on_an_object_store(bucket, folder, undisturbed, tmp_path):
    url, parts = f"s3://{bucket}/set", []
    for part in range(2):
        (tmp_path / f"tmp{part}").mkdir()
        words = ["shard", folder, "--out", url, *OPTIONS, "--part", f"{part}/2"]
        parts.append(forks.start_fastvid(*words, TMPDIR=str(tmp_path / f"tmp{part}")))
    said = [part.communicate()[1] for part in parts]
    assert sorted(part.returncode for part in parts) in ([0, 3], [3, 3]), said
    assert not open_storage(url).exists("dataset.json")
    assert command(folder, "--out", url, *OPTIONS).returncode == 3
    same(url, undisturbed, tmp_path / "copy")


def test_a_live_bucket_does_not_stop_a_job_and_add_takes_what_is_new_or_changed(bucket, folder, capsys, caplog):
    raw, url = f"s3://{bucket}/raw", f"s3://{bucket}/set"
    upload(folder / "run", raw)
    store = open_storage(raw)
    store.delete("text.mp4")
    options = [raw, "--out", url, *OPTIONS]
    assert main(["shard", *options, "--part", "0/2"]) == 0
    store.write("late.mp4", (folder / "jump/f.mp4").read_bytes())
    assert main(["shard", *options, "--part", "1/2"]) == 0
    store.write("a b.mp4", (folder / "jump/e#1?.mp4").read_bytes())
    assert main(["shard", *options]) == 0
    assert "since the job began: 1 new (late.mp4), 1 changed (a b.mp4); it keeps its list" in caplog.text
    assert len(Dataset(url)) == 3
    before = Dataset(url).keys.to_pylist()
    assert main(["shard", *options]) == 2
    assert "since then 1 new (late.mp4), 1 changed (a b.mp4) [file=s3://" in capsys.readouterr().err

    assert main(["add", url, raw, "--workers", "1"]) == 0
    assert "2 already known\n       1 changed since: a b.mp4\n       2 packed" in capsys.readouterr().out
    now = Dataset(url)
    assert len(now) == 4
    assert dict(zip(now.column("source_id").to_pylist(), now.column("num_frames").to_pylist(), strict=True)) == {
        "a b.mp4": 7, "c+d%20.mp4": 5, "é.mp4": 6, "late.mp4": 8,
    }  # fmt: skip
    assert set(before) - set(now.keys.to_pylist()) == {"a_b"}, "another file has another key"
    assert main(["add", url, raw, "--workers", "1"]) == 0
    assert "4 already known\ngeneration 2" in capsys.readouterr().out


def test_leases_exclude_a_second_job_and_end_with_their_owner(bucket, monkeypatch):
    monkeypatch.setattr(lock, "BEAT_SECONDS", 0.1)
    monkeypatch.setattr(lock, "LEASE_SECONDS", 2.0)
    store = open_storage(f"s3://{bucket}/set", options=RemoteOptions(cache=""))
    with lock_folder(store, JobPart(0, 2)) as lease, lock_folder(store, JobPart(1, 2)):
        for part in (JobPart(0, 2), None):
            with (
                pytest.raises(JobError, match=r"another job is running here, on .* as process"),
                lock_folder(store, part),
            ):
                pass
        lease.check()
    with lock_folder(store), pytest.raises(JobError, match="another job"), lock_folder(store, JobPart(0, 2)):
        pass
    assert store.list() == []
    # Another machine that lost its connection: its lease no longer changes.
    name, other = "ledger-parts/progress/job.json", '{"state": "running", "host": "elsewhere", "pid": 1, "beat": %d}\n'
    store.write(name, (other % 7).encode())
    with lock_folder(store) as lease:
        store.write(name, (other % 8).encode())
        threading.Event().wait(1.0)
        with pytest.raises(JobError, match="another job has taken over"):
            lease.check()
    assert store.list() == [name]
    store.close()


@pytest.mark.parametrize("status", [403, 500])
def test_a_store_that_refuses_writes_stops_the_job_and_loses_nothing(
    status, bucket, folder, undisturbed, tmp_path, monkeypatch, refusing
):
    url, impatient = f"s3://{bucket}/set", partial(open_storage, options=RemoteOptions(patience_seconds=2))
    with monkeypatch.context() as patch:
        patch.setattr("fastvid.sharding.job.job.open_storage", impatient)
        with (
            refusing(lambda method, path: status if method == "PUT" and "data-000001.tar" in path else None),
            pytest.raises(StorageError, match=rf"{status}.*data-000001\.tar") as caught,
        ):
            run_job(str(folder), url, **ARGUMENTS)
    assert status != 403 or "set AWS_ACCESS_KEY_ID" in str(caught.value)
    assert not open_storage(url).exists("dataset.json")
    assert command(folder, "--out", url, *OPTIONS).returncode == 3
    same(url, undisturbed, tmp_path / "copy")


@pytest.fixture
def refusing(s3):
    """A context in which a function says by method and path which requests a store answers with which status."""

    @contextmanager
    def context(refuse):
        with LossyProxy(s3.endpoint) as proxy, pytest.MonkeyPatch.context() as patch:
            patch.setenv("AWS_ENDPOINT_URL", proxy.url)
            proxy.refuse = refuse
            yield

    return context


def test_object_store_sources_equal_those_of_a_folder(bucket, folder, undisturbed, tmp_path):
    upload(folder, f"s3://{bucket}/raw/videos")
    open_storage(f"s3://{bucket}/raw").write("videos2/g.mp4", b"of another folder")
    # From store to store.
    url = f"s3://{bucket}/set"
    done = command(f"s3://{bucket}/raw/videos", "--out", url, *OPTIONS)
    assert done.returncode == 3, done.stderr
    copy_files(open_storage(url), LocalStorage(tmp_path))
    assert tars(tmp_path) == tars(undisturbed)
    place, rows = {"path", "source_tag"}, ledger(tmp_path)
    without = [[{k: row[k] for k in row.keys() - place} for row in one] for one in (ledger(undisturbed), rows)]
    assert without[0] == without[1]
    assert all(len(row["source_tag"]) == 32 for row in rows)
    assert {row["path"] for row in rows} == {f"s3://{bucket}/raw/videos/{row['source_id']}" for row in rows}
    assert "1 ignored: .txt file" in done.stdout


def outcome_of(path, size=0, tag=None, **limits):
    task = SourceTask(0, "x", path, "x", size=size, tag=tag)
    return encode_source(task, settings(SMALL, limits=Limits(**limits)))


def test_every_object_store_failure_has_a_reason(bucket, folder):
    upload(folder, f"s3://{bucket}/raw")
    store = open_storage(f"s3://{bucket}/raw")
    (source,) = find_sources([f"s3://{bucket}/raw/jump/f.mp4"]).sources
    assert (source.id, source.label) == ("f.mp4", None)
    for absent in (f"s3://{bucket}/raw/none", f"s3://{bucket}/ra"):
        with pytest.raises(UsageError, match="source does not exist"):
            find_sources([absent])
    whole = outcome_of(source.path, tag=source.tag)
    assert (whole.reason, whole.bytes_in) == (None, source.size)
    assert outcome_of(source.path, source_bytes=100).reason is Reason.TOO_LARGE
    store.write("jump/f.mp4", store.read("run/é.mp4"))
    assert outcome_of(source.path, tag=source.tag).reason is Reason.CHANGED
    store.delete("jump/f.mp4")
    assert outcome_of(source.path, tag=source.tag).reason is Reason.MISSING
    store.write("empty.mp4", b"")
    assert outcome_of(f"s3://{bucket}/raw/empty.mp4").reason is Reason.EMPTY
    assert outcome_of(f"s3://{bucket}-none/raw/x.mp4").reason in (Reason.MISSING, Reason.UNREACHABLE)
    store.close()


def test_expired_credentials_stop_the_job_and_reject_no_source(bucket, folder, undisturbed, tmp_path, refusing):
    upload(folder, f"s3://{bucket}/raw")
    out, seen = tmp_path / "out", []

    def refuse(method, path):
        if method == "GET" and ".mp4" in path:
            seen.append(path)
            return 403 if len(seen) > 2 else None
        return None

    with refusing(refuse):
        stopped = command(f"s3://{bucket}/raw", "--out", out, *OPTIONS)
    assert stopped.returncode == 1
    assert "access denied" in stopped.stderr
    assert "run the job again to resume it" in stopped.stderr
    assert not (out / "ledger.parquet").exists()
    assert command(f"s3://{bucket}/raw", "--out", out, *OPTIONS).returncode == 3
    assert tars(out) == tars(undisturbed)


def test_single_unreadable_file_is_rejected_when_others_are_readable(bucket, folder, tmp_path, refusing):
    upload(folder, f"s3://{bucket}/raw")
    with refusing(lambda method, path: 403 if method == "GET" and path.endswith("jump/f.mp4") else None):
        done = command(f"s3://{bucket}/raw", "--out", tmp_path / "out", *OPTIONS)
    assert done.returncode == 3, done.stderr
    rows = {row["source_id"]: row for row in ledger(tmp_path / "out")}
    assert (rows["jump/f.mp4"]["reason"], "`fastvid add --retry-rejected`" in done.stdout) == ("unreachable", True)
    assert sum(row["status"] == "packed" for row in rows.values()) == 4


def test_sources_of_the_web_are_named_by_a_table(web, folder, undisturbed, tmp_path):
    shutil.copytree(folder, web.folder / "raw")
    table = tmp_path / "clips.csv"
    urls = ["run/a%20b.mp4?sig=secret", "jump/e%231%3F.mp4", "jump/gone.mp4", "run/text.mp4"]
    lines = "".join(f"{web.url}/raw/{url},{url.split('/')[0]}\n" for url in urls)
    table.write_text(f"path,label\n{lines}")
    done = command("--annotations", f"csv:{table}", "--out", tmp_path / "out", *OPTIONS)
    assert done.returncode == 3, done.stderr
    host = web.url.partition("//")[2]
    rows = {row["source_id"].removeprefix(f"{host}/raw/"): row for row in ledger(tmp_path / "out")}
    assert {name: row["reason"] for name, row in rows.items()} == {
        "run/a b.mp4": None, "jump/e#1?.mp4": None, "jump/gone.mp4": "missing", "run/text.mp4": "not-video",
    }  # fmt: skip
    assert rows["run/a b.mp4"]["bytes_in"] == (folder / "run" / "a b.mp4").stat().st_size
    assert "secret" not in str(rows)
    assert Dataset(str(tmp_path / "out")).classes == ("jump", "run")
    # A space in a name breaks the log's columns; the test needs only the range requests.
    assert re.search(r"^GET /raw/jump/e#1\?\.mp4 206 ", web.log.read_text(), re.MULTILINE)
    assert verify_dataset(str(tmp_path / "out"), workers=1).ok


def test_a_single_file_of_the_web_is_a_source_also_of_a_server_without_ranges(web, folder, tmp_path):
    (web.folder / "one").mkdir()
    shutil.copy(folder / "jump" / "f.mp4", web.folder / "one" / "f.mp4")
    report = run_job(f"{web.url}/one/f.mp4", str(tmp_path / "out"), **ARGUMENTS)
    assert (report.packed, report.ledger["source_id"].to_pylist()) == (1, ["f.mp4"])
    with pytest.raises(UsageError, match="source does not exist"):
        run_job(f"{web.url}/one/g.mp4", str(tmp_path / "none"), **ARGUMENTS)
    (web.folder / "one" / "f.mp4").rename(web.folder / "one" / "f#1%41.mp4")
    assert run_job(f"{web.url}/one/f%231%2541.mp4", str(tmp_path / "odd"), **ARGUMENTS).packed == 1
    with LocalServer(partial(SimpleHTTPRequestHandler, directory=str(folder))) as server:
        url = f"{server.endpoint}/jump/f.mp4"
        outcome = outcome_of(url)
        assert (outcome.reason, outcome.bytes_in) == (None, (folder / "jump" / "f.mp4").stat().st_size)
        assert outcome_of(url, source_bytes=100).reason is Reason.TOO_LARGE
        assert outcome_of(url.replace("f.mp4", "g.mp4")).reason is Reason.MISSING


def test_commands_work_on_a_dataset_in_an_object_store(bucket, folder, tmp_path, capsys):
    url = f"s3://{bucket}/set"
    run_job(str(folder), url, **ARGUMENTS)
    table = tmp_path / "labels.csv"
    table.write_text("key,label\njump/f,run\n")
    page = tmp_path / "page.html"
    make(tmp_path / "more" / "fly" / "z.mp4", frames=9)

    def lose_a_table():
        store = open_storage(url)
        store.delete(next(name for name in store.list() if name.endswith(".pkt")))
        store.close()

    for arguments in (
        ["inspect", url],
        ["inspect", url, "--html", str(page)],
        ["verify", url, "--workers", "1"],
        ["add", url, str(tmp_path / "more"), "--workers", "1"],
        ["relabel", url, "--from", str(table)],
        ["remove", url, "--keys", "jump/f"],
        ["compact", url],
        ["gc", url],
        ["gc", url, "--yes"],
        lose_a_table,
        ["index", url],
        ["verify", url, "--workers", "1"],
    ):
        assert not (arguments() if callable(arguments) else main(arguments)), (arguments, capsys.readouterr())
    assert (len(Dataset(url)), Dataset(url).classes) == (5, ("jump", "run", "fly"))
    assert os.listdir(tmp_path / "tmp") == []
    assert page.stat().st_size > 1000
    assert main(["index", f"{url}/data-000000.tar", "--out", str(tmp_path / "x")]) == 2
    assert "indexed on a local disk" in capsys.readouterr().err
    assert main(["shard", str(folder), "--out", "http://127.0.0.1:9/x"]) == 1
    assert "cannot write over HTTP" in capsys.readouterr().err
