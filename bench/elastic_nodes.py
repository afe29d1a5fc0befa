"""Nodes of `bench.elastic`: network namespaces on one bridge, each with a torchrun agent that can be harmed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from fastvid.errors import JobError

ROOT: Final = Path(__file__).parents[1]
SUBNET: Final = "10.117.0"
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


class Network:
    """A bridge with a namespace for each node, and the rendezvous' store outside them. Needs root.

    Args:
        nodes: How many namespaces.

    Raises:
        JobError: The system refuses.
    """

    def __init__(self, nodes: int) -> None:
        self.nodes, self.tag = nodes, f"fv{os.getpid() % 100000}"
        self.host = f"{SUBNET}.254"
        self._store: subprocess.Popen[str] | None = None

    def namespace(self, number: int) -> str:
        """Name of a node's namespace."""
        return f"{self.tag}n{number}"

    def link(self, number: int) -> str:
        """Name of the outer end of a node's cable."""
        return f"{self.tag}v{number}"

    def __enter__(self) -> Network:
        bridge = f"{self.tag}br"
        self._ip("link", "add", bridge, "type", "bridge")
        self._ip("addr", "add", f"{self.host}/24", "dev", bridge)
        self._ip("link", "set", bridge, "up")
        for number in range(self.nodes):
            space, link = self.namespace(number), self.link(number)
            self._ip("netns", "add", space)
            self._ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", space)
            self._ip("link", "set", link, "master", bridge, "up")
            self._ip("-n", space, "addr", "add", f"{SUBNET}.{number + 1}/24", "dev", "eth0")
            self._ip("-n", space, "link", "set", "eth0", "up")
            self._ip("-n", space, "link", "set", "lo", "up")
        code = _STORE.format(host=self.host, port=PORT)
        self._store = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        assert self._store.stdout is not None
        if self._store.stdout.readline().strip() != "ready":
            raise JobError("the rendezvous' store did not start")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._store is not None:
            self._store.kill()
            self._store.wait()
        for number in range(self.nodes):
            with contextlib.suppress(JobError):
                self._ip("netns", "del", self.namespace(number))
            with contextlib.suppress(JobError):
                self._ip("link", "del", self.link(number))
        with contextlib.suppress(JobError):
            self._ip("link", "del", f"{self.tag}br")

    def cut(self, number: int) -> None:
        """Pulls a node's cable."""
        self._ip("link", "set", self.link(number), "down")

    def _ip(self, *words: str) -> None:
        result = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
        if result.returncode:
            raise JobError(f"ip {' '.join(words)}: {result.stderr.strip()}", hint="network namespaces need root")


class Node:
    """One node: a torchrun agent in a namespace, with one worker.

    Args:
        network: Where it is.
        number: Which node.
        recipe: File that is trained.
        most: Nodes that the job may have.
        logs: Folder of its log.
    """

    def __init__(self, network: Network, number: int, recipe: Path, most: int, logs: Path) -> None:
        self.network, self.number, self.recipe, self.most = network, number, recipe, most
        self.log = logs / f"{recipe.stem}-node{number}.log"
        self.cut = False
        self._agent: subprocess.Popen[Any] | None = None

    @property
    def alive(self) -> bool:
        """Whether its agent runs and can be reached."""
        return self._agent is not None and self._agent.poll() is None and not self.cut

    def start(self) -> None:
        """Starts the agent."""
        conf = "keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=1,join_timeout=120,is_host=0"
        command = ["ip", "netns", "exec", self.network.namespace(self.number), sys.executable]
        command += ["-m", "torch.distributed.run", "--nnodes", f"1:{self.most}", "--nproc-per-node", "1"]
        command += ["--max-restarts", "100", "--rdzv-backend", "c10d", "--rdzv-id", self.recipe.stem]
        command += ["--rdzv-endpoint", f"{self.network.host}:{PORT}", "--rdzv-conf", conf, "--monitor-interval", "0.2"]
        command += ["--local-addr", f"{SUBNET}.{self.number + 1}"]
        command += ["-m", "fastvid.train", str(self.recipe)]
        environment = os.environ | {
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0",
            "PYTHONPATH": str(ROOT),
        }  # fmt: skip
        with self.log.open("ab") as log:
            self._agent = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True
            )

    def workers(self) -> list[int]:
        """Process ids of its workers."""
        return [] if self._agent is None else _children(self._agent.pid)

    def leave(self) -> None:
        """Asks the agent to end, as a scheduler does, and waits for it."""
        assert self._agent is not None
        self._agent.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._agent.wait(timeout=60)

    def kill_worker(self) -> None:
        """SIGKILL to the worker alone."""
        for pid in self.workers():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def kill(self) -> None:
        """SIGKILL to agent and worker, as a power cut."""
        if self._agent is None or self._agent.poll() is not None:
            return
        pids = [self._agent.pid, *self.workers()]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._agent.wait()
        time.sleep(0.05)

    def cut_off(self) -> None:
        """Pulls the cable for good; its processes stay and must find out by themselves."""
        self.cut = True
        self.network.cut(self.number)


def _children(pid: int) -> list[int]:
    try:
        words = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [int(word) for word in words]
