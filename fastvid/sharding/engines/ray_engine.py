"""Encodes on the nodes of a Ray cluster. Ray itself runs in a child process (`fastvid.sharding.engines.ray_driver`).

Ray ends the process that uses it when the cluster's head is gone, and changes signal handlers and logging while it is
there: none of that may happen to a job, which has shards to finish and may be somebody's notebook.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import secrets
import select
from collections.abc import Iterable, Iterator
from typing import Any, Final

from fastvid.errors import FormatError, MissingDependency, WorkerError
from fastvid.runtime.children import how_it_ended
from fastvid.sharding.engines.child import Child
from fastvid.sharding.work.messages import Outcome, Settings, Task

_LOG = logging.getLogger(__name__)

_INSTALL: Final = "pip install 'fastvid-toolkit[ray]'"
# How often a task is started anew when its node dies, or kills it for lack of memory, before its outcome is transient.
RETRIES: Final = 8
_ENVIRONMENT: Final = {
    # Without end otherwise: a source that needs too much memory would be tried for ever.
    "RAY_task_oom_retries": str(RETRIES),
    # A job tells nobody that it runs.
    "RAY_USAGE_STATS_ENABLED": "0",
}
# What connecting may take: Ray itself tries for ever. Starting a cluster on a busy machine takes a minute.
_CONNECT_SECONDS: Final = 180.0
# What Ray may take to stop a cluster that it has started for the job.
_LEAVE_SECONDS: Final = 20.0


class RayEngine:
    """Encodes on the nodes of a Ray cluster, one source at a time for each of its CPUs.

    Every node needs the same fastvid and the same build of ffmpeg, and sees the sources under the same paths. Only this
    process writes to the dataset.

    Args:
        settings: What all tasks have in common.
        workers: Sources that are encoded at the same time; by default as many as the cluster has CPUs, also when it
            grows or shrinks.
        address: Of the cluster's head, as ``host:port`` or ``auto``; by default RAY_ADDRESS, or else a cluster that is
            started on this machine and stopped again.

    Raises:
        MissingDependency: Ray is not installed.
    """

    def __init__(self, settings: Settings, workers: int | None = None, address: str | None = None) -> None:
        if importlib.util.find_spec("ray") is None:
            raise MissingDependency("engine 'ray' needs Ray, which is not installed", hint=_INSTALL)
        address = address or os.environ.get("RAY_ADDRESS")
        self._start = {"settings": settings.to_json(), "workers": workers, "address": address, "retries": RETRIES}
        self._environment = _ENVIRONMENT
        if address is None and "RAY_AUTH_MODE" not in os.environ:
            # Ray would write a token to the user's home, and each cluster that is started later would ask for it.
            self._environment = _ENVIRONMENT | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        self._child: Child | None = None
        self._slots = 0
        self._open: set[int] = set()

    def run(self, tasks: Iterable[Task]) -> Iterator[Outcome]:
        """See `fastvid.sharding.engines.engine.Engine`."""
        waiting = iter(tasks)
        task = next(waiting, None)
        while task is not None or self._open:
            child = self._running()
            while task is not None and len(self._open) < self._slots:
                self._open.add(task.index)
                child.send({"task": task.to_json()})
                task = next(waiting, None)
            try:
                for header, blobs in child.hear():
                    outcome = self._understand(header, blobs)
                    if outcome is not None:
                        yield outcome
            except (FormatError, EOFError) as error:
                status, said = child.end()
                self._child = None
                raise WorkerError(
                    f"the connection to the Ray cluster is lost: its process {how_it_ended(status)}: {said}",
                    hint="run the same command again when the cluster is back: what is done is kept",
                ) from error

    def close(self) -> None:
        """See `fastvid.sharding.engines.engine.Engine`."""
        if self._child is None:
            return
        if not self._open:
            self._child.send({"stop": True})
            self._child.leave(_LEAVE_SECONDS)
        self._child.end()
        self._child = None

    def _running(self) -> Child:
        if self._child is None:
            self._slots = 0
            self._open.clear()
            self._child = Child("fastvid.sharding.engines.ray_driver", self._environment)
            self._child.send(self._start)
            if not select.select([self._child.output], [], [], _CONNECT_SECONDS)[0]:
                raise WorkerError(f"the Ray cluster does not answer within {_CONNECT_SECONDS:.0f} s")
        return self._child

    def _understand(self, header: dict[str, Any], blobs: memoryview) -> Outcome | None:
        if "failure" in header:
            kind = MissingDependency if header["missing"] else WorkerError
            raise kind(str(header["failure"]), hint=header["hint"])
        if "slots" in header:
            self._slots = int(header["slots"])
            _LOG.info("Ray cluster: %s", header["cluster"])
            return None
        outcome = Outcome.from_parts(header, blobs)
        if outcome.index not in self._open:
            raise FormatError("the Ray cluster answers what it was not asked")
        self._open.discard(outcome.index)
        return outcome
