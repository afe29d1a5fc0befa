"""The process that talks to a Ray cluster for a job; only this file imports Ray.

Started by `fastvid.sharding.engines.ray_engine`.

It reads the job's settings from its standard input, then tasks; it answers on its standard output with the number of
tasks that the cluster has room for, whenever that changes, and with outcomes. A node that dies costs nothing but time:
Ray starts its tasks anew elsewhere, and also those whose finished samples were lost with it.
"""

from __future__ import annotations

import json
import os
import queue
import socket
import time
from typing import Any, Final

from fastvid import __version__
from fastvid.errors import FastvidError, MissingDependency, WorkerError
from fastvid.media.reasons import Reason
from fastvid.runtime.cores import available_cores
from fastvid.runtime.messages import pack
from fastvid.runtime.units import things
from fastvid.sharding.engines import ray_work
from fastvid.sharding.engines.child import Parent
from fastvid.sharding.work.messages import Outcome

# Seconds between looks at the cluster's size, and at the job's messages while tasks run.
_CENSUS_SECONDS: Final = 2.0
_LOOK_SECONDS: Final = 0.1
# Tasks that wait in the cluster for each one that runs, so that no CPU waits for the job.
_AHEAD: Final = 2
_REACH_SECONDS: Final = 20.0
_EVERYWHERE: Final = "install the same fastvid on every node"


def main() -> None:
    """Works until it is told to stop, or its input ends."""
    parent = Parent()
    start = parent.messages.get()
    try:
        cluster = _Cluster(parent, start)
        cluster.serve()
    except FastvidError as error:
        missing = isinstance(error, MissingDependency)
        parent.send(pack({"failure": error.message, "hint": error.hint, "missing": missing}))
        # The job reads it and ends this process.
        parent.messages.get()


class _Cluster:
    """A connection to a cluster, and the tasks that run there."""

    def __init__(self, parent: Parent, start: dict[str, Any]) -> None:
        try:
            import ray
        except ImportError as error:
            raise MissingDependency(f"Ray does not load: {error}") from error
        self.ray, self.parent = ray, parent
        self.workers: int | None = start["workers"]
        self.settings = json.dumps(start["settings"], sort_keys=True)
        _connect(ray, start["address"], self.workers)
        # Ray counts only what the system does to a task, a node's death above all; an exception is ours and final.
        self.remote = ray.remote(num_cpus=1, max_retries=int(start["retries"]))(ray_work.encode)
        self.running: dict[Any, dict[str, Any]] = {}
        self._counted = 0.0
        self._size: tuple[int, int] | None = None

    def serve(self) -> None:
        """Takes tasks and gives outcomes until it is told to stop."""
        while True:
            self._count()
            for message in self._messages():
                if "stop" in message:
                    self.ray.shutdown()
                    return
                task = message["task"]
                self.running[self.remote.remote(__version__, self.settings, json.dumps(task))] = task
            if self.running:
                done, _ = self.ray.wait(list(self.running), num_returns=1, timeout=_LOOK_SECONDS)
                for reference in done:
                    self.parent.send(self._outcome(reference, self.running.pop(reference)))

    def _messages(self) -> list[dict[str, Any]]:
        """What has arrived; waits a little for the first one when there is nothing else to do."""
        messages: list[dict[str, Any]] = []
        try:
            if not self.running:
                messages.append(self.parent.messages.get(timeout=_CENSUS_SECONDS))
            while True:
                messages.append(self.parent.messages.get_nowait())
        except queue.Empty:
            return messages

    def _count(self) -> None:
        """Tells the job how large the cluster is, when that has changed."""
        if time.monotonic() - self._counted < _CENSUS_SECONDS:
            return
        self._counted = time.monotonic()
        alive = [node for node in self.ray.nodes() if node["Alive"]]
        size = len(alive), int(sum(node["Resources"].get("CPU", 0) for node in alive))
        if size != self._size:
            self._size = size
            slots = self.workers or _AHEAD * size[1]
            self.parent.send(pack({"slots": slots, "cluster": f"{things(size[0], 'node')}, {things(size[1], 'CPU')}"}))

    def _outcome(self, reference: Any, task: dict[str, Any]) -> bytes:
        errors = self.ray.exceptions
        try:
            node, piece = self.ray.get(reference)
        except errors.RayTaskError as error:
            cause = error.cause
            if isinstance(cause, FastvidError):
                raise cause from error
            raise WorkerError(f"a Ray worker cannot run fastvid: {cause!r}", hint=_EVERYWHERE) from error
        except (
            errors.WorkerCrashedError,
            errors.NodeDiedError,
            errors.OutOfMemoryError,
            errors.ObjectLostError,
        ) as error:
            # After all retries.
            message = f"on the Ray cluster: {_brief(error)}"
            return Outcome(task["index"], reason=Reason.CRASHED, message=message, transient=True).to_bytes()
        except errors.RayError as error:
            raise WorkerError(f"the Ray cluster fails: {_brief(error)}") from error
        outcome = Outcome.from_bytes(piece)
        if outcome.reason is Reason.MISSING and os.path.exists(task["path"]):
            raise WorkerError(f"node {node} does not see {task['path']}", hint="mount the sources alike on all nodes")
        return bytes(piece)


def _connect(ray: Any, address: str | None, workers: int | None) -> None:
    # Its workers' prints stay where they are, and the root logger as it is.
    quiet = {"log_to_driver": False, "configure_logging": False}
    try:
        if address:
            _reach(address)
            ray.init(address=address, **quiet)
        else:
            cores = workers or available_cores()
            ray.init(address="local", num_cpus=cores, include_dashboard=False, **quiet)
    except (ConnectionError, RuntimeError, ValueError, TimeoutError, OSError) as error:
        where = f"at {address} " if address else ""
        raise WorkerError(f"no Ray cluster {where}takes the job: {_brief(error)}", hint="see `ray status`") from error


def _reach(address: str) -> None:
    """Raises OSError when nothing listens there: Ray would try again for ever."""
    host, _, port = address.rpartition(":")
    if host and port.isdecimal() and "/" not in host:
        socket.create_connection((host.strip("[]"), int(port)), _REACH_SECONDS).close()


def _brief(error: BaseException) -> str:
    """What an error says and, as the last line of its cause does, why."""
    why = str(error.__cause__ or "").strip().splitlines()[-1:]
    return " ".join(": ".join([str(error), *why]).split())[:400]


if __name__ == "__main__":
    main()
