"""Processes: how they ended, which are dead, the cores that they have, and what a child sends."""

import json
import os
import pickle
import signal
import struct
import subprocess
import sys
import time
import zlib
from contextlib import closing

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastvid.errors import FormatError
from fastvid.media.ffmpeg import Limits, find_ffmpeg
from fastvid.runtime import processes
from fastvid.runtime.processes import HEADER_BYTES, Inbox, available_cores, how_it_ended, is_dead, namespace, unpack
from fastvid.sharding.encode.profiles import PROFILES, Settings
from fastvid.sharding.engines.local import LocalEngine
from fastvid.sharding.job import lock
from fastvid.sharding.verify.verify import verify_dataset
from fastvid.sharding.work.tasks import SourceTask
from fastvid.storage import LocalStorage, local
from tests.datasets import make_clip, pack


@pytest.mark.parametrize(
    ("last", "said"),
    [
        ("sys.exit(3)", "exited with 3"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "was killed by SIGKILL"),
        ("os.kill(os.getpid(), signal.SIGRTMIN + 1)", f"was killed by signal {signal.SIGRTMIN + 1}"),
    ],
)
def test_how_it_ended_describes_exit_codes_and_signals(last, said):
    done = subprocess.run([sys.executable, "-c", f"import os, signal, sys; {last}"], check=False)
    assert how_it_ended(done.returncode) == said


@settings(max_examples=50)
@given(st.lists(st.tuples(st.dictionaries(st.text(), st.integers()), st.binary()), max_size=5), st.integers(1, 50))
def test_messages_are_reassembled_from_any_fragments(pieces, step):
    inbox, sent = Inbox(), b"".join(processes.pack(header, blob) for header, blob in pieces)
    found = [piece for start in range(0, len(sent), step) for piece in inbox.add(sent[start : start + step])]
    assert [(header, bytes(blobs)) for header, blobs in found] == pieces


def test_oversized_message_is_refused_before_it_has_arrived():
    piece = processes.pack({}, bytes(1000))
    assert list(Inbox(len(piece)).add(piece))
    with pytest.raises(FormatError, match=f"has {len(piece)} bytes, at most 999"):
        list(Inbox(999).add(piece[:HEADER_BYTES]))


@pytest.mark.parametrize("header", [pickle.dumps({}), b"[1, 2]", b"null", b"\xff", b"[" * 100_000])
def test_a_sound_piece_whose_header_is_no_json_object_is_refused(header):
    with pytest.raises(FormatError, match="header of a message is"):
        unpack(struct.pack("<IQI", len(header), 0, zlib.crc32(header)) + header)


OTHER = "0123456789ab"


@pytest.fixture
def dead():
    """The id of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_only_dead_processes_of_the_same_namespace_are_dead(dead):
    assert is_dead(namespace(), dead)
    assert is_dead(namespace(), str(dead))
    assert not is_dead(namespace(), os.getpid())
    assert not is_dead(OTHER, dead)
    for space, pid in ((None, dead), (namespace(), None), (namespace(), 0), (namespace(), -1), (namespace(), "x")):
        assert not is_dead(space, pid)


def test_a_lease_of_another_namespace_is_not_taken_at_once(dead):
    def lease(space, pid):
        return json.dumps(
            {"state": "running", "owner": "x", "host": os.uname().nodename, "namespace": space, "pid": pid}
        ).encode()

    assert lock._is_dead(lease(namespace(), dead))
    assert not lock._is_dead(lease(OTHER, dead))
    assert not lock._is_dead(lease(namespace(), os.getpid()))


def test_sweep_keeps_the_files_of_living_and_unknown_writers(tmp_path, dead):
    names = {"own": f"x.{namespace()}-{os.getpid()}-aa.tmp", "dead": f"y.{namespace()}-{dead}-aa.tmp"}
    names |= {"other": f"z.{OTHER}-{dead}-aa.tmp", "old": f"w.{OTHER}-{dead}-aa.tmp"}
    for name in names.values():
        (tmp_path / name).touch()
    long_ago = time.time() - local.ABANDONED_SECONDS - 60
    os.utime(tmp_path / names["old"], (long_ago, long_ago))
    LocalStorage(tmp_path).sweep_dead()
    assert set(os.listdir(tmp_path)) == {names["own"], names["other"]}


def test_sweep_in_another_namespace_keeps_the_file_of_a_living_writer(tmp_path):
    unshare = ["unshare", "--fork", "--pid", "--mount-proc"]
    code = "import sys; from fastvid.storage import LocalStorage; LocalStorage(sys.argv[1]).sweep_dead()"
    try:
        subprocess.run([*unshare, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):  # only root may: pretend
        unshare = []
        code = f"from fastvid.storage import local; local.is_dead = lambda space, pid: space == '{OTHER}'; {code}"
    store = LocalStorage(tmp_path)
    with store.create("x") as file:
        file.write(b"new")
        subprocess.run([*unshare, sys.executable, "-c", code, tmp_path], check=True)
    assert store.read("x") == b"new"


CHECKER = "fastvid.sharding.verify.checks"


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine with 64 cores; returns a function that sets its container's CPU quota in cores."""
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(64)))
    monkeypatch.setattr("fastvid.runtime.processes._CGROUPS", tmp_path)
    return lambda quota: (tmp_path / "cpu.max").write_text(f"{round(quota * 100_000) if quota else 'max'} 100000\n")


def test_ranks_of_a_node_share_its_cores(machine, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert available_cores() == 8
    assert available_cores(ranks=1) == 64
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "100000")
    assert available_cores() == 1
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "0")
    assert available_cores() == 64


def test_container_quota_limits_cores(machine):
    assert available_cores() == 64
    machine(3.5)
    assert available_cores() == 3
    machine(0.5)
    assert available_cores() == 1
    machine(None)
    assert available_cores() == 64


def test_shard_starts_a_worker_for_each_core_of_its_container(machine, tmp_path):
    machine(3)
    for number in range(5):
        (tmp_path / f"{number}.mp4").write_bytes(b"no video")
    todo = [SourceTask(number, f"{number}", str(tmp_path / f"{number}.mp4"), f"{number}") for number in range(5)]
    with closing(LocalEngine(Settings(PROFILES["compact"], find_ffmpeg(), Limits(), 600.0))) as engine:
        assert len(list(engine.run(todo))) == 5
        assert len({worker._process.pid for worker in engine._pool}) == 3


@pytest.mark.usefixtures("own_interpreters")
def test_verify_starts_a_process_for_each_core_of_its_container(machine, tmp_path):
    clip = make_clip(tmp_path / "clip.mp4")
    store = pack(tmp_path / "dataset", [[(f"c/{number}", clip, 0)] for number in range(5)])
    machine(3)
    started = set()

    def note(*_):
        children = psutil.Process().children()
        started.update(child.pid for child in children if CHECKER in child.cmdline())

    report = verify_dataset(store.url, progress=note)
    assert (report.samples, report.problems) == (5, [])
    assert len(started) == 3


def test_a_lock_file_and_its_folder_that_are_removed_meanwhile_are_made_again(tmp_path, monkeypatch):
    path = tmp_path / "out" / "lock"
    held = processes.lock_file(path)
    # Its holder removes them while the next one waits.
    monkeypatch.setattr(processes.time, "sleep", lambda _: (path.unlink(), path.parent.rmdir()))
    os.close(processes.lock_file(path, wait=False))
    os.close(held)
    assert path.exists()
