"""The child process that connects a job to a Ray cluster; only this file imports Ray.

`fastvid.sharding.job.ray_engine` starts it. It reads the shards to make from its standard input, starts a Ray task for
each, and writes the number of every finished shard to its standard output. If a node dies, another one makes its shard;
a node that joins later gets shards too.
"""

from __future__ import annotations

import os
import pickle
import socket
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from fastvid import __version__
from fastvid.errors import FastvidError, MissingDependency, WorkerError, error_to_json
from fastvid.runtime.processes import available_cores, pack
from fastvid.runtime.values import things
from fastvid.sharding.engines.local import Parent
from fastvid.sharding.job import ray_engine

# Seconds between looks at the cluster's nodes.
_LOOK_SECONDS: Final = 2.0
_CONNECT_SECONDS: Final = 20.0
# How often a shard is given to another node after its node died or killed it for lack of memory.
_RETRIES: Final = 8


def main() -> None:
    """Make the shards that the job asks for, or send it the error."""
    # Ray adds the current folder of this process to the search path of its workers.
    os.chdir("/")
    parent = Parent()
    start = parent.messages.get()
    try:
        cluster = _Cluster(start)
        for message in cluster.messages():
            parent.send(pack(message))
        cluster.ray.shutdown()
    except FastvidError as error:
        parent.send(pack({"failure": error_to_json(error)}))
        # Wait: the job reads the message and then kills this process.
        parent.messages.get()


class _Cluster:
    """A connection to a Ray cluster, and the shards that it makes."""

    def __init__(self, start: dict[str, Any]) -> None:
        try:
            import ray
        except ImportError as error:
            raise MissingDependency(f"Ray cannot be imported: {error}") from error
        self.ray, self._workers = ray, start["workers"]
        _connect(ray, start["address"], self._workers)
        self._job = ray.put(pickle.loads(Path(start["job"]).read_bytes()))  # noqa: S301 - the job itself wrote it
        # Ray gives a task to another node if its node dies or kills it for lack of memory.
        self._make = ray.remote(max_retries=_RETRIES, scheduling_strategy="SPREAD")(ray_engine.make_shard)
        self._waiting = deque[int](start["shards"])
        self._running: dict[Any, tuple[int, int]] = {}  # shard and CPUs of each task
        self._size = ""

    def messages(self) -> Iterator[dict[str, Any]]:
        """Yield messages to the job until all shards are made: finished shards, and changes of the cluster's size."""
        while self._waiting or self._running:
            nodes = [int(node["Resources"].get("CPU", 0)) for node in self.ray.nodes() if node["Alive"]]
            size = f"{things(len(nodes), 'node')}, {things(sum(nodes), 'CPU')}"
            if size != self._size:
                self._size = size
                yield {"cluster": size}
            self._give_waiting(nodes)
            if not self._running:  # no node has a CPU yet
                time.sleep(_LOOK_SECONDS)
                continue
            for call in self.ray.wait(list(self._running), timeout=_LOOK_SECONDS)[0]:
                shard, _ = self._running.pop(call)
                self._await(call, shard)
                yield {"shard": shard}

    def _give_waiting(self, nodes: Sequence[int]) -> None:
        """Start as many tasks as the cluster can work on. `nodes`: number of CPUs of each node."""
        most = min(self._workers or sum(nodes), sum(nodes))
        free = most - sum(cpus for _, cpus in self._running.values())
        left = len(self._waiting) + len(self._running)
        # A task gets at most the CPUs of the smallest node, so that any node can repeat it if its node dies.
        cpus = max(1, min([most // max(left, 1), *(number for number in nodes if number)]))
        while self._waiting and free >= cpus:
            shard = self._waiting.popleft()
            call = self._make.options(num_cpus=cpus).remote(self._job, shard, cpus, __version__)
            self._running[call] = shard, cpus
            free -= cpus

    def _await(self, call: Any, shard: int) -> None:
        """Raise if a task that has ended failed: its own error, or WorkerError if the cluster is at fault."""
        errors = self.ray.exceptions
        try:
            self.ray.get(call)
        except errors.RayTaskError as error:
            if isinstance(error.cause, FastvidError):
                raise error.cause from error
            raise WorkerError(
                f"a Ray worker cannot run fastvid: {error.cause!r}", hint="install the same fastvid on every node"
            ) from error
        except errors.RayError as error:
            raise WorkerError(f"shard {shard} has failed on the Ray cluster: {_summarize(error)}") from error


def _connect(ray: Any, address: str | None, workers: int | None) -> None:
    # Do not print the workers' output here, and do not change the root logger.
    quiet = {"log_to_driver": False, "configure_logging": False}
    try:
        if address:
            _check_reachable(address)
            ray.init(address=address, **quiet)
        else:
            cores = workers or available_cores()
            ray.init(address="local", num_cpus=cores, include_dashboard=False, **quiet)
    except (ConnectionError, RuntimeError, ValueError, TimeoutError, OSError) as error:
        where = f"at {address}" if address else "on this machine"
        raise WorkerError(
            f"cannot connect to a Ray cluster {where}: {_summarize(error)}", hint="run `ray status`"
        ) from error


def _check_reachable(address: str) -> None:
    """Raise OSError if nothing listens at the address: Ray itself would retry forever."""
    host, _, port = address.rpartition(":")
    if host and port.isdecimal() and "/" not in host:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS).close()


def _summarize(error: BaseException) -> str:
    """Return an error's message and the last line of its cause's message, on one line."""
    why = str(error.__cause__ or "").strip().splitlines()[-1:]
    return " ".join(": ".join([str(error), *why]).split())[:400]


if __name__ == "__main__":
    main()
