"""Nodes of `bench.elastic.elastic`: a torchrun agent per host that can be killed or cut off, and a rendezvous store."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from bench.common.hosts import Hosts
from fastvid.errors import JobError

ROOT: Final = Path(__file__).parents[2]
PORT: Final = 29400

_STORE: Final = """
import sys, time
from datetime import timedelta
from torch.distributed import TCPStore
store = TCPStore({host!r}, {port}, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=600))
print("ready", flush=True)
while True:
    time.sleep(1)
"""


@contextlib.contextmanager
def network(nodes: int) -> Iterator[Hosts]:
    """Create one host per node, and a last one that runs the rendezvous store. Needs root."""
    with Hosts(nodes + 1) as hosts:
        code = _STORE.format(host=hosts.addresses[nodes], port=PORT)
        command = hosts.command(nodes, [sys.executable, "-c", code])
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as store:
            try:
                assert store.stdout is not None
                if store.stdout.readline().strip() != "ready":
                    raise JobError("the rendezvous store did not start")
                yield hosts
            finally:
                store.kill()


class Node:
    """One node: a torchrun agent in a namespace, with one worker."""

    def __init__(self, hosts: Hosts, number: int, recipe: Path, most: int, logs: Path) -> None:
        self.hosts, self.number, self.recipe, self.most = hosts, number, recipe, most
        self.log = logs / f"{recipe.stem}-node{number}.log"
        self.cut = False
        self._agent: subprocess.Popen[Any] | None = None

    @property
    def alive(self) -> bool:
        """Whether its agent is running and reachable."""
        return self._agent is not None and self._agent.poll() is None and not self.cut

    def start(self) -> None:
        """Start the agent."""
        conf = "keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=1,join_timeout=120,is_host=0"
        command = self.hosts.command(self.number, [sys.executable, "-m", "torch.distributed.run"])
        command += ["--nnodes", f"1:{self.most}", "--nproc-per-node", "1"]
        command += ["--max-restarts", "100", "--rdzv-backend", "c10d", "--rdzv-id", self.recipe.stem]
        command += [
            "--rdzv-endpoint",
            f"{self.hosts.addresses[-1]}:{PORT}",
            "--rdzv-conf",
            conf,
            "--monitor-interval",
            "0.2",
        ]
        command += ["--local-addr", self.hosts.addresses[self.number]]
        command += ["-m", "fastvid.train", str(self.recipe)]
        environment = os.environ | {
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT),
            **self.hosts.environment,
        }  # fmt: skip
        with self.log.open("ab") as log:
            self._agent = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True
            )

    def workers(self) -> list[int]:
        """Return the process ids of its workers."""
        return [] if self._agent is None else children(self._agent.pid)

    def leave(self) -> None:
        """Send SIGTERM to the agent, as a scheduler does, and wait for it."""
        assert self._agent is not None
        self._agent.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._agent.wait(timeout=60)

    def kill_worker(self) -> None:
        """Send SIGKILL to the worker only."""
        for pid in self.workers():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def kill(self) -> None:
        """Send SIGKILL to agent and worker, like a power cut."""
        if self._agent is None or self._agent.poll() is not None:
            return
        pids = [self._agent.pid, *self.workers()]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._agent.wait()
        time.sleep(0.05)

    def cut_off(self) -> None:
        """Disconnect the host for good; its processes keep running and must detect this themselves."""
        self.cut = True
        self.hosts.cut(self.number)


def children(pid: int) -> list[int]:
    """Return the process ids of a process' children; empty if it has exited."""
    try:
        words = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [int(word) for word in words]
