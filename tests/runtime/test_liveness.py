"""Which processes are dead: judged by the PID namespace, never by the host name alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import pytest

from fastvid.runtime.processes import is_dead, namespace
from fastvid.sharding.job import lock
from fastvid.storage import LocalStorage, local

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
        return json.dumps({"owner": "x", "host": os.uname().nodename, "namespace": space, "pid": pid}).encode()

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
