"""Available cores: ranks of a node share them, and a container's quota limits them, in every command."""

from __future__ import annotations

from contextlib import closing

import psutil
import pytest

from fastvid.media.ffmpeg import Limits, find_ffmpeg
from fastvid.runtime.processes import available_cores
from fastvid.sharding.encode.profiles import PROFILES, Settings
from fastvid.sharding.engines.local import LocalEngine
from fastvid.sharding.verify.verify import verify_dataset
from fastvid.sharding.work.tasks import SourceTask
from tests.datasets import make_clip, pack

CHECKER = "fastvid.sharding.verify.check_processes"


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
    machine(4)
    for number in range(6):
        (tmp_path / f"{number}.mp4").write_bytes(b"no video")
    todo = [SourceTask(number, f"{number}", str(tmp_path / f"{number}.mp4"), f"{number}") for number in range(6)]
    with closing(LocalEngine(Settings(PROFILES["compact"], find_ffmpeg(), Limits(), 600.0))) as engine:
        assert len(list(engine.run(todo))) == 6
        assert len({worker.child.pid for worker in engine._pool}) == 4


def test_verify_starts_a_process_for_each_core_of_its_container(machine, tmp_path):
    clip = make_clip(tmp_path / "clip.mp4")
    store = pack(tmp_path / "dataset", [[(f"c/{number}", clip, 0)] for number in range(6)])
    machine(4)
    started = set()

    def note(*_):
        children = psutil.Process().children()
        started.update(child.pid for child in children if CHECKER in child.cmdline())

    report = verify_dataset(store.url, progress=note)
    assert (report.samples, report.problems) == (6, [])
    assert len(started) == 4
