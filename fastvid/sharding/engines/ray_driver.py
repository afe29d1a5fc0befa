"""The child process that connects a job to a Ray cluster; only this file imports Ray.

`fastvid.sharding.engines.ray_engine` starts it. It reads the job's settings, then tasks, from its standard input. To
its standard output it writes outcomes and, whenever it changes, the number of tasks that the cluster has room for. If a
node dies, Ray reruns its tasks on other nodes, including those whose finished samples were lost with the node.
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
from fastvid.media.timing import Reason
from fastvid.runtime.processes import available_cores, pack
from fastvid.runtime.values import things
from fastvid.sharding.engines import ray_engine
from fastvid.sharding.engines.local import Parent
from fastvid.sharding.work.tasks import Outcome

# Seconds between checks of the cluster's size, and of the job's messages while tasks run.
_SIZE_CHECK_SECONDS: Final = 2.0
_POLL_SECONDS: Final = 0.1
# Groups of tasks submitted per CPU: one runs, the others are queued, so that no CPU waits for the job.
_TASKS_PER_CPU: Final = 2
_CONNECT_SECONDS: Final = 20.0
_SAME_VERSION_HINT: Final = "install the same fastvid on every node"


def main() -> None:
    """Serve the job until it sends "stop" or closes the input."""
    # Ray adds the current folder of this process to the search path of its workers.
    os.chdir("/")
    parent = Parent()
    start = parent.messages.get()
    try:
        cluster = _ClusterClient(parent, start)
        cluster.serve()
    except FastvidError as error:
        missing = isinstance(error, MissingDependency)
        parent.send(pack({"failure": error.message, "hint": error.hint, "missing": missing}))
        # Wait: the job reads the message and then kills this process.
        parent.messages.get()


class _ClusterClient:
    """A connection to a Ray cluster and the tasks in flight there."""

    def __init__(self, parent: Parent, start: dict[str, Any]) -> None:
        try:
            import ray
        except ImportError as error:
            raise MissingDependency(f"Ray cannot be imported: {error}") from error
        self.ray, self.parent = ray, parent
        self.workers: int | None = start["workers"]
        self.settings = json.dumps(start["settings"], sort_keys=True)
        _connect(ray, start["address"], self.workers)
        # Ray retries only after system failures such as a node's death; our own exceptions are final.
        self.remote = ray.remote(num_cpus=1, max_retries=int(start["retries"]))(ray_engine.encode)
        self.running: dict[Any, list[dict[str, Any]]] = {}
        self._size_checked_at = 0.0
        self._size: tuple[int, int] | None = None

    def serve(self) -> None:
        """Receive tasks and send outcomes until the job sends "stop"."""
        while True:
            self._report_size()
            for message in self._messages():
                if "stop" in message:
                    self.ray.shutdown()
                    return
                tasks = message["tasks"]
                self.running[self.remote.remote(__version__, self.settings, json.dumps(tasks))] = tasks
            if self.running:
                done, _ = self.ray.wait(list(self.running), num_returns=1, timeout=_POLL_SECONDS)
                for reference in done:
                    for outcome in self._outcomes(reference, self.running.pop(reference)):
                        self.parent.send(outcome)

    def _messages(self) -> list[dict[str, Any]]:
        """Return the messages that have arrived; if no task is running, wait a little for the first one."""
        messages: list[dict[str, Any]] = []
        try:
            if not self.running:
                messages.append(self.parent.messages.get(timeout=_SIZE_CHECK_SECONDS))
            while True:
                messages.append(self.parent.messages.get_nowait())
        except queue.Empty:
            return messages

    def _report_size(self) -> None:
        """Send the job the size of the cluster if it has changed."""
        if time.monotonic() - self._size_checked_at < _SIZE_CHECK_SECONDS:
            return
        self._size_checked_at = time.monotonic()
        alive = [node for node in self.ray.nodes() if node["Alive"]]
        size = len(alive), int(sum(node["Resources"].get("CPU", 0) for node in alive))
        if size != self._size:
            self._size = size
            slots = self.workers or _TASKS_PER_CPU * size[1]
            self.parent.send(pack({"slots": slots, "cluster": f"{things(size[0], 'node')}, {things(size[1], 'CPU')}"}))

    def _outcomes(self, reference: Any, tasks: list[dict[str, Any]]) -> list[bytes]:
        errors = self.ray.exceptions
        try:
            node, pieces = self.ray.get(reference)
        except errors.RayTaskError as error:
            cause = error.cause
            if isinstance(cause, FastvidError):
                raise cause from error
            raise WorkerError(f"a Ray worker cannot run fastvid: {cause!r}", hint=_SAME_VERSION_HINT) from error
        except (
            errors.WorkerCrashedError,
            errors.NodeDiedError,
            errors.OutOfMemoryError,
            errors.ObjectLostError,
        ) as error:
            # All of Ray's retries have failed.
            message = f"on the Ray cluster: {_summarize(error)}"
            return [
                Outcome(task["index"], reason=Reason.CRASHED, message=message, transient=True).to_bytes()
                for task in tasks
            ]
        except errors.RayError as error:
            raise WorkerError(f"the Ray cluster failed: {_summarize(error)}") from error
        missing = any(Outcome.from_bytes(piece).reason is Reason.MISSING for piece in pieces)
        if missing and os.path.exists(path := tasks[0]["path"]):
            raise WorkerError(
                f"{path} does not exist on node {node}", hint="mount the sources at the same path on all nodes"
            )
        return [bytes(piece) for piece in pieces]


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
