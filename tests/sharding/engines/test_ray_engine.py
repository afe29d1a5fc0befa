"""Sharding on a Ray cluster: the same bytes as on one machine, even if a node dies during the job."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from fastvid.errors import MissingDependency, StorageError, WorkerError
from fastvid.sharding.change.add import add_sources
from fastvid.sharding.encode.profiles import PROFILES
from fastvid.sharding.engines.local import open_engine
from fastvid.sharding.in_place import index_videos
from fastvid.sharding.job.index import index_tars
from fastvid.sharding.job.job import EncodeShards, run_job
from fastvid.sharding.job.lock import Staging
from fastvid.sharding.job.ray_engine import make_shard
from fastvid.sharding.job.run import How
from fastvid.sharding.lerobot.jobs import index_lerobot
from fastvid.sharding.sources.tars import gather_sources
from fastvid.storage import LocalStorage
from tests.sharding.lerobot.tools import V3
from tests.sharding.raytools import ENVIRONMENT, Cluster
from tests.sharding.shardtools import command, ledger, make, settings, tars

SETTINGS = settings(PROFILES["compact"].changed(short_side=96))


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
    make(tmp_path / "raw" / "a.mp4", frames=3)
    with pytest.raises(WorkerError, match=r"cannot connect to a Ray cluster at 127\.0\.0\.1:1: .* refused"):
        run_job(tmp_path / "raw", tmp_path / "out", engine="ray", ray_address="127.0.0.1:1")


def begun(tmp_path, settings=SETTINGS):
    """Return a job of one shard that has been recorded in its folder."""
    found = gather_sources(str(tmp_path / "raw"))
    storage = LocalStorage(tmp_path / "out")
    work = EncodeShards(storage, found, settings, samples_per_shard=10)
    Staging(storage).begin(work.identity)
    return work


def test_nodes_that_differ_from_the_job_say_so_before_they_work(tmp_path):
    path = make(tmp_path / "raw" / "a.mp4", frames=3)
    make(tmp_path / "raw" / "b.mp4", frames=3)
    other = replace(SETTINGS, build=replace(SETTINGS.build, version="4.0"))
    with pytest.raises(WorkerError, match=r"ffmpeg 4\.0"):
        make_shard((begun(tmp_path, other), How()), 0, 1)
    shutil.rmtree(tmp_path / "out")
    work = begun(tmp_path)
    with pytest.raises(WorkerError, match=r"runs 0\.0\.1"):
        make_shard((work, How()), 0, 1, version="0.0.1")
    os.remove(path)
    with pytest.raises(StorageError, match=f"file does not exist.*{path}.*node="):
        make_shard((work, How()), 0, 1)
    Staging(work.storage).begin({"seed": 9}, replace=True)
    with pytest.raises(WorkerError, match=f"cannot reach {work.storage.url}: the job is not there") as caught:
        make_shard((work, How()), 0, 1)
    assert "a folder that all nodes share" in caught.value.hint
