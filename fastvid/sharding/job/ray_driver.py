"""The child process that connects a job to a Ray cluster; only this file imports Ray.

`fastvid.sharding.job.ray_engine` starts it. It reads what to do from its standard input, gives each node one shard at a
time, and writes the number of every shard that is made to its standard output. If a node dies, another one makes its
shard; a node that joins later gets shards too.
"""

from __future__ import annotations

import os
import pickle
import socket
import time
from collections import Counter, deque
from collections.abc import Iterator
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
    """A connection to a Ray cluster, the nodes that work, and the shards that they make."""

    def __init__(self, start: dict[str, Any]) -> None:
        try:
            import ray
        except ImportError as error:
            raise MissingDependency(f"Ray cannot be imported: {error}") from error
        self.ray, self._start = ray, start
        _connect(ray, start["address"], start["workers"])
        self._job = ray.put(pickle.loads(Path(start["job"]).read_bytes()))  # noqa: S301 - the job itself wrote it
        self._waiting = deque[int](start["shards"])
        self._tries: Counter[str] = Counter()
        self._nodes: dict[str, tuple[Any, int]] = {}  # actor and CPUs of each node that works, by its id
        self._running: dict[Any, tuple[str, int | None]] = {}  # node and shard of each call; None while a node starts
        self._looked_at, self._size = 0.0, ""

    def messages(self) -> Iterator[dict[str, Any]]:
        """Yield what the job must know, until all shards are made."""
        idle: list[str] = []
        while self._waiting or any(shard is not None for _, shard in self._running.values()):
            yield from self._look()
            while idle and self._waiting:
                self._give(idle.pop(), self._waiting.popleft())
            if not self._running:
                time.sleep(_LOOK_SECONDS)
                continue
            done, _ = self.ray.wait(list(self._running), num_returns=1, timeout=_LOOK_SECONDS)
            for call in done:
                node, shard = self._running.pop(call)
                answer = self._answer(call)
                if isinstance(answer, Exception):
                    self._lose(node, shard, answer)
                elif answer is not None and shard is not None:
                    self._give(node, shard, lost=answer)
                else:
                    idle.append(node)
                    yield from () if shard is None else ({"shard": shard},)

    def _give(self, node: str, shard: int, lost: str | None = None) -> None:
        """Give a node a shard; `lost`: a source of it that the node has not found."""
        if lost is not None and os.path.exists(lost):
            raise WorkerError(
                f"{lost} does not exist on a node of the cluster",
                hint="mount the sources at the same path on all nodes",
            )
        if node not in self._nodes:  # it has died meanwhile
            self._waiting.appendleft(shard)
        else:
            self._running[self._nodes[node][0].make.remote(shard, check=lost is None)] = node, shard

    def _lose(self, node: str, shard: int | None, error: Exception) -> None:
        """Forget a node whose process died; another one makes its shard."""
        self._nodes.pop(node, None)
        what = f"node {node}" if shard is None else f"shard {shard}"
        self._tries[what] += 1
        if self._tries[what] > _RETRIES:
            raise WorkerError(f"{what} has failed {self._tries[what]} times on the Ray cluster: {_summarize(error)}")
        if shard is not None:
            self._waiting.appendleft(shard)

    def _look(self) -> Iterator[dict[str, Any]]:
        """Let new nodes work, after all of them were checked; yield the size of the cluster if it has changed."""
        if time.monotonic() - self._looked_at < _LOOK_SECONDS:
            return
        self._looked_at = time.monotonic()
        alive = {node["NodeID"]: int(node["Resources"].get("CPU", 0)) for node in self.ray.nodes() if node["Alive"]}
        for name in self._nodes.keys() - alive.keys():
            del self._nodes[name]
        size = f"{things(len(alive), 'node')}, {things(sum(alive.values()), 'CPU')}"
        if size != self._size:
            self._size = size
            yield {"cluster": size}
        places = {name: self._only_on(name) for name, cpus in alive.items() if cpus and name not in self._nodes}
        check = self.ray.remote(num_cpus=0, max_retries=0)(ray_engine.check_node)
        known = __version__, self._start["url"], self._start["identity"]
        checks = {name: check.options(scheduling_strategy=place).remote(*known) for name, place in places.items()}
        good = [name for name, call in checks.items() if not isinstance(self._answer(call), Exception)]
        node = self.ray.remote(ray_engine.Node)
        for name in good:
            free = (self._start["workers"] or sum(alive.values())) - sum(cpus for _, cpus in self._nodes.values())
            cpus = min(alive[name], free)
            if cpus > 0:
                actor = node.options(num_cpus=cpus, scheduling_strategy=places[name]).remote(self._job, cpus)
                self._nodes[name] = actor, cpus
                self._running[actor.ready.remote()] = name, None

    def _only_on(self, node: str) -> Any:
        return self.ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False)

    def _answer(self, call: Any) -> Any:
        """Return what a node answers, or the error of Ray if its process has died; raise the node's own errors."""
        errors = self.ray.exceptions
        died = (errors.RayActorError, errors.WorkerCrashedError, errors.NodeDiedError, errors.OutOfMemoryError)
        gone = (errors.ObjectLostError, errors.TaskUnschedulableError, errors.ActorUnschedulableError)
        try:
            return self.ray.get(call)
        except errors.RayTaskError as error:
            if isinstance(error.cause, FastvidError):
                raise error.cause from error
            raise WorkerError(
                f"a Ray worker cannot run fastvid: {error.cause!r}", hint="install the same fastvid on every node"
            ) from error
        except (*died, *gone) as error:
            return error
        except errors.RayError as error:
            raise WorkerError(f"the Ray cluster failed: {_summarize(error)}") from error


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
    """Return an error's message and the last line of its cause's, on one line."""
    why = str(error.__cause__ or "").strip().splitlines()[-1:]
    return " ".join(": ".join([str(error), *why]).split())[:400]


if __name__ == "__main__":
    main()
