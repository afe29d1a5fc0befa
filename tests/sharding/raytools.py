"""A Ray cluster of several nodes on one machine, whose nodes die as machines do: at once and without a word."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from bench.common.ports import reserved_port
from tests.sharding.shardtools import REPOSITORY

RAY = (sys.executable, "-m", "ray.scripts.scripts")

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
        self.process = subprocess.Popen(
            [
                *RAY,
                "start",
                "--block",
                "--disable-usage-stats",
                "--num-gpus=0",
                "--object-store-memory=100000000",
                *options,
            ],
            env=os.environ | ENVIRONMENT,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )

    def kill(self) -> None:
        """Kills every process of the node."""
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
        self.head = Node(
            "--head",
            f"--port={port}",
            "--num-cpus=1",
            "--node-ip-address=127.0.0.1",
            "--include-dashboard=false",
            f"--temp-dir={self.folder}",
            folder=self.folder,
        )
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
        """Starts one more node."""
        node = Node(f"--address={self.address}", "--num-cpus=1", "--node-ip-address=127.0.0.1", folder=self.folder)
        self.others.append(node)
        return node

    def kill_node(self) -> None:
        """Kills a node that is not the head."""
        self.others.pop(0).kill()

    def _await(self, nodes: int) -> None:
        """Until so many nodes are in the head's table, of which ``ray start`` speaks only then."""
        log, deadline = Path(self.folder, "start.log"), time.monotonic() + 300
        while log.read_text().count("Ray runtime started") < nodes:
            if time.monotonic() > deadline:
                raise TimeoutError(log.read_text())
            time.sleep(0.1)
