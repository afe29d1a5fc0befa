"""Reading from faulty servers: the right bytes or an error that names the cause, never a hang."""

import logging
import os
import random
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("obstore", reason="obstore is not installed: the extra object-stores brings it")

from bench.common.ports import reserved_port
from fastvid.errors import MissingDependency, StorageError, UnavailableError, UsageError
from fastvid.storage import RemoteOptions, objects, open_storage
from tests.skips import soak_but
from tests.storage.faulty import FaultyServer
from tests.storage.local_server import LocalHandler, LocalServer

DATA = random.Random(1).randbytes(200_000)
# Long enough for a busy machine: a response that is only slow must not be retried as a stall.
QUICK = {"stall_seconds": 20.0, "patience_seconds": 60.0, "cache": ""}


@pytest.fixture(autouse=True)
def loopback(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture
def server():
    """A server with the data as a file."""
    with FaultyServer() as server:
        server.files["a.bin"] = DATA
        yield server


def opened(server, **options):
    return open_storage(server.url, options=RemoteOptions(**QUICK | options))


def read_six(storage, name="a.bin"):
    """Read six ranges in one call and compare them with the data."""
    ranges = [(number * 30_000, memoryview(bytearray(2000))) for number in range(6)]
    storage.read_into(name, ranges)
    assert [bytes(view) for _, view in ranges] == [DATA[offset : offset + 2000] for offset, _ in ranges]


@pytest.mark.parametrize("tags", [True, False])
@pytest.mark.parametrize(
    "fault", [500, 503, 429, 408, "reset", "reset-body", "stall", "stall-body", "short", "short-range", "shifted-range"]
)
def test_transient_fault_costs_one_more_request(server, fault, tags):
    stall = {"stall_seconds": 0.5} if str(fault).startswith("stall") else {}
    server.tags = tags
    storage = opened(server, **stall)
    server.faults.extend([fault, fault, fault])
    state = random.getstate()
    read_six(storage)
    assert len(server.gets()) == 9
    server.faults.append(fault)
    assert storage.read("a.bin") == DATA
    assert random.getstate() == state, "pauses draw from a generator of their own"
    storage.close()


@pytest.mark.parametrize("fault", soak_but([500, "reset", "stall", "short-range"], "stall"))
def test_lasting_fault_raises_within_the_patience(server, fault, caplog):
    # Enough for several attempts on a machine that stops for a second.
    storage = opened(server, stall_seconds=0.2, patience_seconds=6)
    with caplog.at_level(logging.INFO, "fastvid.storage"):
        server.faults.extend([fault] * 1000)
        told = r"(\d+) attempts in \d+ s\) \[file=http://127.0.0.1:\d+/set/a.bin\]"
        with pytest.raises(StorageError, match=told) as caught:
            storage.read_into("a.bin", [(0, memoryview(bytearray(10)))])
        tries = int(re.search(told, str(caught.value))[1])
        # One that stalls on a busy machine may not reach the server.
        assert 3 <= len(server.gets()) <= tries <= 20
        # Each failure is logged once; the first ones, which may be transient, below the default log level.
        # Threads of earlier tests may still log what they ask of their own servers.
        levels = [record.levelno for record in caplog.records if server.url in record.getMessage()]
        assert levels[:3] == [logging.INFO, logging.INFO, logging.WARNING]
        assert len(levels) == tries - 1


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (400, "the server responded 400"),
        (403, "access denied"),
        (401, "access denied"),
        (404, "file does not exist"),
        ("whole", "does not support byte ranges"),
    ],
)
def test_permanent_fault_raises_immediately(server, fault, says):
    storage = opened(server)
    server.faults.append(fault)
    with pytest.raises(StorageError, match=rf"{says}.*a\.bin"):
        storage.read_into("a.bin", [(0, memoryview(bytearray(10)))])
    assert len(server.gets()) == 1


@pytest.mark.parametrize(
    ("status", "code", "keys", "says"),
    [
        (401, "", "a", r"access denied: .* set AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and"),
        (403, "AccessDenied", "a", r"access denied: .* set AWS_ACCESS_KEY_ID.*missing files are denied, too"),
        (403, "InvalidAccessKeyId", "a", "the store does not know the first"),
        (403, "SignatureDoesNotMatch", "a", "the second does not belong to the first"),
        (403, "RequestTimeTooSkewed", "a", "set the clock of this machine"),
        (400, "ExpiredToken", "a", "log in again and set AWS_ACCESS_KEY_ID"),
        (400, "AuthorizationHeaderMalformed", "a", "set AWS_REGION: the bucket is in another region"),
        (400, "", "a", "set AWS_REGION to the bucket's region, and AWS_ACCESS_KEY_ID"),
        (301, "PermanentRedirect", "a", "the bucket is in another region .*set AWS_REGION"),
        (403, "", "", "set AWS_ACCESS_KEY_ID.* or AWS_SKIP_SIGNATURE=true for a public bucket: no credentials were fo"),
    ],
)
def test_a_store_that_wants_other_credentials_is_an_error_that_says_what_to_set(monkeypatch, status, code, keys, says):
    class Handler(LocalHandler):
        def _do(self):
            self.answer(status, f"<Error><Code>{code}</Code></Error>".encode() if code else b"")

        do_GET = do_PUT = _do  # noqa: N815

    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    with LocalServer(Handler) as server:
        # Where the machine is asked for its role, this server answers as well.
        given = {"ENDPOINT_URL": server.endpoint, "METADATA_ENDPOINT": server.endpoint, "REGION": "us-east-1"}
        for name, value in (given | ({"ACCESS_KEY_ID": "a", "SECRET_ACCESS_KEY": "b"} if keys else {})).items():
            monkeypatch.setenv(f"AWS_{name}", value)
        with pytest.raises(UnavailableError) as caught:
            open_storage("s3://bucket/set", options=RemoteOptions(**QUICK)).read("a.bin")
    assert re.search(says, str(caught.value), re.DOTALL)
    assert "s3://bucket/set/a.bin" in str(caught.value)


@pytest.mark.parametrize("keeps_preconditions", [True, False])
def test_replaced_file_is_detected_by_precondition_and_by_response(server, keeps_preconditions):
    storage = opened(server)
    read_six(storage)
    tag = server.tag(DATA)
    server.files["a.bin"] = DATA[::-1]
    if not keeps_preconditions:
        server.faults.extend(["old-tag"] * 6)
    with pytest.raises(StorageError, match=r"replaced while it was being read.*a\.bin"):
        read_six(storage)
    late = server.gets()[6:]
    assert {seen.if_match for seen in late} == {tag}
    # The first rejection ends the call; other requests may still be pending.
    assert {seen.status for seen in late} - {0} == ({412} if keeps_preconditions else {206})
    # The first requests had no tag yet.
    assert {seen.if_match for seen in server.gets()[:6]} == {None}


def test_file_replaced_during_the_first_call_is_not_mixed(server):
    storage = opened(server, concurrency=1)
    send, seen = server.tag, []

    def replace_after_three(data):
        seen.append(data)
        if len(seen) == 3:
            server.files["a.bin"] = DATA[::-1]
        return send(data)

    server.tag = replace_after_three
    with pytest.raises(StorageError, match="replaced"):
        read_six(storage)


def test_retry_does_not_continue_a_body_with_another_version(server):
    storage = opened(server)
    read_six(storage)
    server.faults.append("reset-body")
    send = server.tag
    # Replaced between the truncated response and the retry.
    server.tag = lambda data: (server.files.__setitem__("a.bin", DATA[::-1]), send(data))[1]
    with pytest.raises(StorageError, match="replaced"):
        storage.read_into("a.bin", [(0, memoryview(bytearray(50_000)))])


def test_number_of_ranges_in_flight_is_the_concurrency():
    with FaultyServer(meet=5) as server:
        server.files["a.bin"] = DATA
        storage = open_storage(server.url, options=RemoteOptions(concurrency=5, cache=""))
        views = [memoryview(bytearray(100)) for _ in range(20)]
        # The server responds only when five requests are pending, so lower concurrency would fail.
        storage.read_into("a.bin", [(number * 1000, view) for number, view in enumerate(views)])
        assert [bytes(view) for view in views] == [DATA[n * 1000 : n * 1000 + 100] for n in range(20)]
        assert server.most_at_once == 5
        assert len(server.gets()) == 20


def test_large_ranges_and_files_are_read_in_pieces(server, monkeypatch):
    monkeypatch.setattr(objects, "PIECE_BYTES", 30_000)
    storage = opened(server)
    view = memoryview(bytearray(100_000))
    storage.read_into("a.bin", [(5, view)])
    assert bytes(view) == DATA[5:100_005]
    assert max(seen.body for seen in server.log) == 30_000
    assert storage.read("a.bin") == DATA
    assert bytes(storage.map("a.bin")) == DATA


def test_mapped_file_is_fetched_once_by_concurrent_threads(server):
    server.delay = 0.05
    storage = opened(server)
    with ThreadPoolExecutor(6) as pool:
        maps = list(pool.map(storage.map, ["a.bin"] * 6))
    assert [bytes(data) for data in maps] == [DATA] * 6
    assert [seen.method for seen in server.log] == ["GET"]


def test_the_memory_for_mapped_files_is_bounded(server, monkeypatch):
    monkeypatch.setattr(objects, "MEMORY_BYTES", 450_000)
    for number in range(4):
        server.files[f"{number}"] = DATA
    storage = opened(server)
    for name in "010201":
        assert bytes(storage.map(name)) == DATA
    # Two files fit. When 2 is added, 1 is the least recently used.
    assert "".join(seen.name for seen in server.log) == "0121"


def test_storage_that_never_responded_fails_sooner(server, monkeypatch):
    monkeypatch.setattr("fastvid.storage.requests.FIRST_SECONDS", 0.3)
    storage = opened(server)
    server.faults.extend([500] * 4)
    with pytest.raises(StorageError, match="500"):
        storage.read("a.bin")
    server.faults.clear()
    assert storage.read("a.bin") == DATA
    # After a first response, retries overcome the same number of failures.
    server.faults.extend([500] * 4)
    assert storage.read("a.bin") == DATA


def test_refused_connection_raises():
    with reserved_port() as port:
        storage = open_storage(f"http://127.0.0.1:{port}/x", options=RemoteOptions(patience_seconds=0.3))
        with pytest.raises(StorageError, match=r"Connection refused.*\[file=http://127.0.0.1:\d+/x/a.bin\]"):
            storage.exists("a.bin")


@pytest.mark.parametrize(
    "url", ["http://user:secret@host/x", "s3://bucket/x?token=secret", "https://host/x#secret", "s3://", "gs:///x"]
)
def test_urls_with_secrets_or_without_host_are_rejected(url):
    with pytest.raises(UsageError) as caught:
        open_storage(url)
    assert "secret" not in str(caught.value)


def test_invalid_options_are_rejected(monkeypatch):
    with pytest.raises(UsageError, match="concurrency is 0"):
        RemoteOptions(concurrency=0)
    monkeypatch.setenv("FASTVID_CACHE", "somewhere")
    monkeypatch.setenv("FASTVID_CACHE_BYTES", "much")
    with pytest.raises(UsageError, match="FASTVID_CACHE_BYTES is 'much'"):
        open_storage("http://host/x")


def test_error_names_the_extra_when_obstore_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "obstore", None)
    for name in ("fastvid.storage.objects", "fastvid.storage.client"):
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(MissingDependency, match=r"fastvid-toolkit\[object-stores\]"):
        open_storage("s3://bucket/x")


def test_local_storage_does_not_import_obstore():
    code = "import sys, fastvid.storage as s; s.open_storage('x').list(); print('obstore' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout == "False\n"


def test_forked_child_raises_instead_of_hanging(server):
    code = (
        "import os, sys; from fastvid.storage import open_storage\n"
        "storage = open_storage(sys.argv[1]); storage.read('a.bin')\n"
        "child = os.fork()\n"
        "if child: sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
        "try: storage.read('a.bin')\n"
        "except Exception as error: print(error, flush=True); os._exit(7)\n"
    )
    command = [sys.executable, "-W", "ignore", "-c", code, server.url]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert run.returncode == 7, run.stderr
    assert "used before this process was forked" in run.stdout
    assert "spawn or forkserver" in run.stdout


def test_pending_retries_do_not_delay_the_exit(server):
    # The server never responds and patience is long: the program must exit although its pool is still retrying.
    code = (
        "import sys, threading; from fastvid.storage import open_storage, RemoteOptions\n"
        "s = open_storage(sys.argv[1], options=RemoteOptions(stall_seconds=1, patience_seconds=1000))\n"
        "s.read('ok'); ranges = [(0, memoryview(bytearray(1))) for _ in range(4)]\n"
        "t = threading.Thread(target=s.read_into, args=('a.bin', ranges), daemon=True); t.start(); sys.stdin.read()\n"
    )
    server.files["ok"] = b"ok"
    server.faults.extend(["none", *["stall"] * 100])
    command, pipes = [sys.executable, "-c", code, server.url], dict.fromkeys(("stdin", "stderr"), subprocess.PIPE)
    with subprocess.Popen(command, text=True, **pipes) as process:
        while len(server.gets()) < 5 and process.poll() is None:
            time.sleep(0.01)
        _, said = process.communicate(timeout=300)
    assert process.returncode == 0, said
    assert len(server.gets()) >= 5


def test_a_thread_reads_on_while_the_program_ends(server):
    code = (
        "import sys, threading; from fastvid.storage import open_storage\n"
        "s, data = open_storage(sys.argv[1]), bytearray(40)\n"
        "ranges = [(at, memoryview(data)[at : at + 10]) for at in range(0, 40, 10)]\n"
        "def read(): threading.main_thread().join(); s.read_into('a.bin', ranges); print(data.hex(), flush=True)\n"
        "threading.Thread(target=read).start()\n"
    )
    done = subprocess.run([sys.executable, "-c", code, server.url], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == DATA[:40].hex(), done.stderr
