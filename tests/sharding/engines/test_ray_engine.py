"""Sharding on a Ray cluster: the same bytes as on one machine, even if a node dies during the job."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from bench.common.ports import reserved_port
from fastvid.errors import MissingDependency, StorageError, WorkerError
from fastvid.sharding.change.add import add_sources
from fastvid.sharding.encode.profiles import PROFILES
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
from tests.sharding.shardtools import REPOSITORY, command, ledger, make, settings, tars

RAY = (sys.executable, "-m", "ray.scripts.scripts")
_ONE = "--num-cpus=1 --node-ip-address=127.0.0.1"

# Of nodes and jobs. A dead node is noticed in two seconds instead of twenty, because it refuses connections; one that a
# busy machine keeps waiting has time to answer. A dead head is noticed in five seconds instead of sixty.
ENVIRONMENT = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "20000",
    "RAY_health_check_failure_threshold": "2",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "5",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Whatever token the user of this machine has.
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
    "PYTHONPATH": str(REPOSITORY),
}


class Node:
    """One node: the processes that ``ray start`` has started."""

    def __init__(self, *options: str, folder: str) -> None:
        self._log = open(f"{folder}/start.log", "ab")  # noqa: SIM115
        words = ["start", "--block", "--disable-usage-stats", "--num-gpus=0", "--object-store-memory=100000000"]
        streams = {"stdin": subprocess.DEVNULL, "stdout": self._log, "stderr": self._log}
        command, variables = [*RAY, *words, *options], os.environ | ENVIRONMENT
        self.process = subprocess.Popen(command, env=variables, start_new_session=True, **streams)

    def kill(self) -> None:
        if self.process.returncode is not None:
            return
        victims = [self.process.pid]
        with contextlib.suppress(psutil.NoSuchProcess):
            victims += [child.pid for child in psutil.Process(self.process.pid).children(recursive=True)]
        for pid in victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self._log.close()


class Cluster:
    """A head and other nodes, one CPU each. A context: what is left is killed at its end."""

    def __init__(self, nodes: int = 2) -> None:
        # Ray makes sockets there, whose names may have 107 bytes.
        self.folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
        self._reserved = contextlib.ExitStack()
        port = self._reserved.enter_context(reserved_port())
        self.address = f"127.0.0.1:{port}"
        head = f"--head --port={port} --include-dashboard=false --temp-dir={self.folder} {_ONE}"
        self.head = Node(*head.split(), folder=self.folder)
        self.others: list[Node] = []
        self._await(1)
        for _ in range(nodes - 1):
            self.add()
        self._await(nodes)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        for node in [*self.others, self.head]:
            node.kill()
        self._reserved.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def add(self) -> Node:
        node = Node(f"--address={self.address}", *_ONE.split(), folder=self.folder)
        self.others.append(node)
        return node

    def kill_node(self) -> None:
        self.others.pop(0).kill()

    def _await(self, nodes: int) -> None:
        """Until so many nodes are in the head's table, of which ``ray start`` speaks only then."""
        log, deadline = Path(self.folder, "start.log"), time.monotonic() + 300
        while log.read_text().count("Ray runtime started") < nodes:
            if time.monotonic() > deadline:
                raise TimeoutError(log.read_text())
            time.sleep(0.1)


SETTINGS = settings(PROFILES["compact"].changed(short_side=96))


def staged(out):
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
        words = [sys.executable, "-m", "fastvid", "shard", *options, "--out", out, *engine]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        job = subprocess.Popen(words, env=os.environ | ENVIRONMENT, **pipes)
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


@pytest.mark.soak
def test_index_and_add_on_a_cluster_equal_one_machine(tmp_path, monkeypatch):
    raw, more = tmp_path / "raw", tmp_path / "more"
    for number in range(2):
        make(raw / "run" / f"{number}.mp4", frames=6 + number)
        make(more / "jump" / f"{number + 2}.mp4", frames=9 + number)
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    with Cluster(nodes=1) as cluster:
        for name, engine in (("local", {}), ("ray", {"engine": "ray", "ray_address": cluster.address})):
            run_job(str(raw), str(tmp_path / name), workers=1)
            added = add_sources(str(tmp_path / name), str(more), workers=1, **engine)
            assert (added.report.packed, added.generation) == (2, 2)
            index_tars([str(tmp_path / name)], str(tmp_path / f"index-{name}"), workers=1, **engine)
            index_videos([str(raw)], tmp_path / f"place-{name}", workers=1, **engine)
            index_lerobot(f"lerobot:{V3}", tmp_path / f"robot-{name}", workers=1, **engine)
    for name in ("", "index-", "place-", "robot-"):
        suffixes = (".pkt", ".files") if name.endswith(("place-", "robot-")) else (".pkt", ".idx", ".tar")
        one, other = (files(tmp_path / f"{name}{engine}", *suffixes) for engine in ("local", "ray"))
        assert one == other
        assert len(one) >= len(suffixes)


def files(folder, *suffixes):
    return {path.name: path.read_bytes() for path in folder.glob("data-*") if path.suffix in suffixes}


def test_a_missing_ray_and_an_unreachable_cluster_raise_clear_errors(tmp_path, monkeypatch):
    make(tmp_path / "raw" / "a.mp4", frames=3)
    with pytest.raises(WorkerError, match=r"cannot connect to a Ray cluster at 127\.0\.0\.1:1: .* refused"):
        run_job(tmp_path / "raw", tmp_path / "out", engine="ray", ray_address="127.0.0.1:1")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingDependency, match=re.escape("fastvid-toolkit[ray]")):
        How("ray").open_engine(SETTINGS)


def begun(tmp_path, settings=SETTINGS):
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
