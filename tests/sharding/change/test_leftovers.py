"""Killed and finished commands leave no files behind that nothing deletes."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from fastvid.cli.main import main
from fastvid.runtime.processes import namespace
from fastvid.sharding.change.compact import compact_shards
from fastvid.sharding.change.edit import remove_samples
from fastvid.sharding.change.history import collect_garbage
from fastvid.storage import LocalStorage
from tests.datasets import make_clip, pack
from tests.sharding.shardtools import command, make


@pytest.fixture
def store(tmp_path):
    clip = make_clip(tmp_path / "clip.mp4")
    return pack(tmp_path / "d", [[(f"c/{n}", clip, 0) for n in range(3 * s, 3 * s + 3)] for s in range(2)])


def leftovers(store):
    return [path.name for path in store.root.rglob("*") if path.suffix in (".tmp", ".lock")]


@pytest.mark.parametrize("change", [compact_shards, collect_garbage])
def test_files_of_a_killed_compaction_are_deleted_by_the_next_command(change, store):
    # "write" is passed for each file of the new shard: some of them are half written.
    remove_samples(store, ["c/1"])
    code = (
        "import os, signal, sys\n"
        "from fastvid.storage import LocalStorage, local\n"
        "from fastvid.sharding.change.compact import compact_shards\n"
        "local.os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)\n"
        "compact_shards(LocalStorage(sys.argv[1]))\n"
    )
    assert subprocess.run([sys.executable, "-c", code, store.url], check=False).returncode == -9
    assert leftovers(store)
    writing = store.root / f"data-000007.tar.{namespace()}-{os.getpid()}-aa.tmp"
    writing.touch()
    change(store)
    assert leftovers(store) == [writing.name]


def test_changes_leave_no_lock_files(store):
    remove_samples(store, ["c/1"])
    compact_shards(store)
    collect_garbage(store)
    assert not leftovers(store)


def test_shard_and_add_leave_no_empty_folders_or_locks(tmp_path):
    for name in ("raw", "more"):
        make(tmp_path / name / "x" / f"{name}.mp4", frames=3)
    out = LocalStorage(tmp_path / "out")
    assert command(tmp_path / "raw", "--out", out.root, "--workers", 1).returncode == 0
    assert main(["add", out.url, str(tmp_path / "more"), "--workers", "1"]) == 0
    assert not (out.root / "ledger-parts").exists()
    assert not leftovers(out)


def test_swaps_exclude_each_other_although_their_lock_disappears(tmp_path):
    LocalStorage(tmp_path).write("x", b"0")

    def count(_worker):
        done, store = 0, LocalStorage(tmp_path)
        while done < 25:
            before = store.read("x")
            done += store.swap("x", b"%d" % (int(before) + 1), before)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(count, range(4)))
    assert (tmp_path / "x").read_bytes() == b"100"
    assert os.listdir(tmp_path) == ["x"]
