"""Sharding on a Ray cluster: the same bytes as on one machine, even if a node dies during the job."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import replace

import pytest

from fastvid import __version__
from fastvid.errors import MissingDependency, WorkerError
from fastvid.media.ffmpeg import Limits, find_ffmpeg
from fastvid.media.timing import Reason
from fastvid.sharding.change.add import add_sources
from fastvid.sharding.encode.profiles import PROFILES
from fastvid.sharding.engines import ray_engine
from fastvid.sharding.engines.local import open_engine
from fastvid.sharding.in_place import index_videos
from fastvid.sharding.job.index import index_tars
from fastvid.sharding.job.job import run_job
from fastvid.sharding.lerobot.jobs import index_lerobot
from fastvid.sharding.work.tasks import Outcome, Settings, SourceTask
from tests.sharding.lerobot.tools import V3
from tests.sharding.raytools import ENVIRONMENT, Cluster
from tests.sharding.shardtools import command, ledger, make, tars

SETTINGS = Settings(PROFILES["compact"].changed(short_side=96), find_ffmpeg(), Limits(), 600.0)


def staged(out):
    """Return the number of samples that a job has encoded."""
    return sum(1 for path in out.glob("**/staging/*/*")) + 3 * sum(1 for path in out.glob("data-*.tar"))


def test_dead_node_changes_no_byte(tmp_path):
    raw = tmp_path / "raw"
    for number in range(8):
        make(raw / f"class{number % 2}" / f"{number}.mp4", size="320x240", frames=90)
    (raw / "class0" / "bad.mp4").write_bytes(b"no video")
    options = [raw, "--samples-per-shard", "3"]
    assert command(*options, "--out", tmp_path / "local").returncode == 3
    with Cluster(nodes=2) as cluster:
        out, engine = tmp_path / "ray", ["--engine", "ray", "--ray-address", cluster.address]
        job = subprocess.Popen(
            [sys.executable, "-m", "fastvid", "shard", *options, "--out", out, *engine],
            env=os.environ | ENVIRONMENT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        while job.poll() is None and staged(out) < 2:
            time.sleep(0.05)
        alive = job.poll() is None
        cluster.kill_node()
        printed, said = job.communicate(timeout=240)
    assert alive
    assert job.returncode == 3, said
    assert "2 nodes, 2 CPUs" in said
    assert tars(out) == tars(tmp_path / "local")
    assert ledger(out) == ledger(tmp_path / "local")
    assert re.search(r"^ +8 packed", printed, re.MULTILINE)


def test_index_and_add_on_a_cluster_equal_one_machine(tmp_path):
    raw, more = tmp_path / "raw", tmp_path / "more"
    for number in range(2):
        make(raw / "run" / f"{number}.mp4", frames=6 + number)
        make(more / "jump" / f"{number + 2}.mp4", frames=9 + number)
    with Cluster(nodes=1) as cluster, pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        for name, engine in (("local", {}), ("ray", {"engine": "ray", "ray_address": cluster.address})):
            run_job(str(raw), str(tmp_path / name), workers=1)
            added = add_sources(str(tmp_path / name), str(more), workers=1, **engine)
            assert (added.report.packed, added.generation) == (2, 2)
            index_tars([str(tmp_path / name)], str(tmp_path / f"index-{name}"), workers=1, **engine)
            index_videos([str(raw)], tmp_path / f"place-{name}", workers=1, **engine)
            index_lerobot(f"lerobot:{V3}", tmp_path / f"robot-{name}", workers=1, **engine)
    for name in ("place-", "robot-"):
        one, other = (
            {path.name: path.read_bytes() for path in (tmp_path / f"{name}{engine}").glob("data-*")}
            for engine in ("local", "ray")
        )
        assert one == other
        assert "data-000000.files" in one
    for name in ("", "index-"):
        one, other = tmp_path / f"{name}local", tmp_path / f"{name}ray"
        assert tars(one) == tars(other)
        assert len(tars(one)) == 2
        assert sidecars(one) == sidecars(other)


def sidecars(folder):
    return {path.name: path.read_bytes() for path in folder.glob("data-*") if path.suffix in (".idx", ".pkt")}


def test_missing_ray_names_the_extra(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingDependency, match=re.escape("fastvid-toolkit[ray]")):
        open_engine("ray", SETTINGS)


def test_unreachable_cluster_raises_a_clear_error(tmp_path):
    task = SourceTask(0, "a", str(tmp_path / "a.mp4"), "a")
    with (
        closing(open_engine("ray", SETTINGS, address="127.0.0.1:1")) as engine,
        pytest.raises(WorkerError, match=r"cannot connect to a Ray cluster at 127\.0\.0\.1:1: .* refused"),
    ):
        list(engine.run([task]))


def work(*tasks, settings=SETTINGS, version=__version__):
    todo = json.dumps([task.to_json() for task in tasks])
    return ray_engine.encode(version, json.dumps(settings.to_json()), todo)


@pytest.fixture
def _no_worker_stays():
    yield
    ray_engine.close()


@pytest.mark.usefixtures("_no_worker_stays")
def test_ray_worker_returns_outcomes_and_reuses_its_process(tmp_path):
    path = make(tmp_path / "a.mp4", frames=3)
    (tmp_path / "bad.mp4").write_bytes(b"no video")
    _, (first, clip) = work(
        SourceTask(0, "a", str(path), "a"), SourceTask(2, "c", str(path), "c", start=0.04, end=0.08)
    )
    assert [sample.key for sample in Outcome.from_bytes(first).samples] == ["a"]
    assert [sample.num_frames for sample in Outcome.from_bytes(clip).samples] == [1]
    (engine,) = ray_engine._engines.values()
    before = engine._pool[0].child.pid
    _, (second,) = work(SourceTask(1, "bad", str(tmp_path / "bad.mp4"), "bad"))
    assert Outcome.from_bytes(second).reason is Reason.NOT_VIDEO
    assert engine._pool[0].child.pid == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": "0.0.1"}, "fastvid"),
        ({"settings": replace(SETTINGS, build=replace(SETTINGS.build, version="4.0"))}, "ffmpeg 4.0"),
    ],
)
def test_node_with_other_software_raises(tmp_path, change, message):
    with pytest.raises(WorkerError, match=message):
        work(SourceTask(0, "a", str(tmp_path / "a.mp4"), "a"), **change)
