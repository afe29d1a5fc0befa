"""Encode on the nodes of a Ray cluster.

Ray itself runs in a child process (`fastvid.sharding.engines.ray_driver`). Ray exits the process that uses it when the
cluster's head dies, and changes signal handlers and logging. A job must not suffer that: it has shards to finish, and
may run in a notebook.

The function that Ray workers run: it passes tasks to a child process, like a local job.

Ray's own process never parses a source: a hostile file can only break a child, which has resource limits.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import secrets
import select
import socket
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, Final

from fastvid import __version__
from fastvid.errors import FormatError, JobError, MissingDependency, WorkerError
from fastvid.media.ffmpeg import VARIABLE, find_ffmpeg
from fastvid.runtime.processes import how_it_ended
from fastvid.sharding.encode.flow import same_streams
from fastvid.sharding.engines.local import Child, LocalEngine
from fastvid.sharding.work.tasks import Outcome, Settings, SourceTask, group_by_file

_LOG = logging.getLogger(__name__)

_INSTALL: Final = "pip install 'fastvid-toolkit[ray]'"
# How often a task is retried after its node died or killed it for lack of memory, before its outcome is transient.
RETRIES: Final = 8
_ENVIRONMENT: Final = {
    # Ray's default is unlimited: a source that needs too much memory would be retried forever.
    "RAY_task_oom_retries": str(RETRIES),
    # Send no usage statistics to Ray's developers.
    "RAY_USAGE_STATS_ENABLED": "0",
}
# Time limit for connecting: Ray itself retries forever. Starting a cluster on a busy machine takes a minute.
_CONNECT_SECONDS: Final = 180.0
# Time limit for stopping a cluster that was started for the job.
_SHUTDOWN_SECONDS: Final = 20.0


class RayEngine:
    """Encodes on the nodes of a Ray cluster, one file at a time per CPU.

    Every node needs the same fastvid, the same build of ffmpeg, and the sources at the same paths. Only this process
    writes to the dataset.
    """

    def __init__(self, settings: Settings, workers: int | None = None, address: str | None = None) -> None:
        if importlib.util.find_spec("ray") is None:
            raise MissingDependency("engine 'ray' needs Ray, which is not installed", hint=_INSTALL)
        address = address or os.environ.get("RAY_ADDRESS")
        self._start = {"settings": settings.to_json(), "workers": workers, "address": address, "retries": RETRIES}
        self._environment = _ENVIRONMENT
        if address is None and "RAY_AUTH_MODE" not in os.environ:
            # Otherwise Ray writes a token to the user's home, and every cluster started later requires it.
            self._environment = _ENVIRONMENT | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        self._child: Child | None = None
        self._slots = 0
        # The unfinished tasks of each file that the cluster has.
        self._open: list[set[int]] = []

    def run(self, tasks: Iterable[SourceTask]) -> Iterator[Outcome]:
        """See `fastvid.sharding.engines.local.Engine`."""
        waiting = group_by_file(tasks)
        group = next(waiting, None)
        while group is not None or self._open:
            child = self._connected_child()
            while group is not None and len(self._open) < self._slots:
                self._open.append({task.index for task in group})
                child.send({"tasks": [task.to_json() for task in group]})
                group = next(waiting, None)
            try:
                for header, blobs in child.receive():
                    outcome = self._handle_message(header, blobs)
                    if outcome is not None:
                        yield outcome
            except (FormatError, EOFError) as error:
                status, message = child.kill()
                self._child = None
                raise WorkerError(
                    f"lost the connection to the Ray cluster: the Ray process {how_it_ended(status)}: {message}",
                    hint="run the same command again when the cluster is back; finished work is kept",
                ) from error

    def close(self) -> None:
        """See `fastvid.sharding.engines.local.Engine`."""
        if self._child is None:
            return
        if not self._open:
            self._child.send({"stop": True})
            self._child.wait(_SHUTDOWN_SECONDS)
        self._child.kill()
        self._child = None

    def _connected_child(self) -> Child:
        if self._child is None:
            self._slots = 0
            self._open.clear()
            self._child = Child("fastvid.sharding.engines.ray_driver", self._environment)
            self._child.send(self._start)
            if not select.select([self._child.output], [], [], _CONNECT_SECONDS)[0]:
                raise WorkerError(f"the Ray cluster did not respond within {_CONNECT_SECONDS:.0f} s")
        return self._child

    def _handle_message(self, header: dict[str, Any], blobs: memoryview) -> Outcome | None:
        if "failure" in header:
            kind = MissingDependency if header["missing"] else WorkerError
            raise kind(str(header["failure"]), hint=header["hint"])
        if "slots" in header:
            self._slots = int(header["slots"])
            _LOG.info("Ray cluster: %s", header["cluster"])
            return None
        outcome = Outcome.from_parts(header, blobs)
        group = next((group for group in self._open if outcome.index in group), None)
        if group is None:
            raise FormatError("the Ray cluster replied to a task it was not given")
        group.discard(outcome.index)
        if not group:
            self._open.remove(group)
        return outcome


# The engine of the job that this process works for; its worker process is reused for all tasks.
_engines: dict[str, LocalEngine] = {}


def encode(version: str, settings: str, tasks: str) -> tuple[str, list[bytes]]:
    """Run tasks of one file, given as JSON; return the node's name and the bytes of each outcome."""
    node = socket.gethostname()
    if version != __version__:
        raise WorkerError(f"node {node} has fastvid {__version__}, but the job runs {version}")
    if settings not in _engines:
        close()
        _engines[settings] = LocalEngine(_for_this_node(Settings.from_json(json.loads(settings)), node), workers=1)
    try:
        outcomes = list(_engines[settings].run([_task(record) for record in json.loads(tasks)]))
    except BaseException:
        close()
        raise
    return node, [outcome.to_bytes() for outcome in outcomes]


def _task(record: dict[str, Any]) -> SourceTask:
    return SourceTask(**record | {"member": None if record["member"] is None else tuple(record["member"])})


def close() -> None:
    """Stop the worker process, if there is one."""
    while _engines:
        _engines.popitem()[1].close()


def _for_this_node(settings: Settings, node: str) -> Settings:
    """Return the settings with this node's ffmpeg; its build, and OpenCV for flow, must match."""
    build = find_ffmpeg()
    if build.identity() != settings.build.identity():
        raise WorkerError(
            f"node {node} has {build}, but the job has {settings.build}",
            hint=f"install the same build on all nodes, or set {VARIABLE} to it before `ray start`",
        )
    try:
        same_streams(settings.streams.to_json())
    except JobError as error:
        raise WorkerError(f"node {node}: {error.message}", hint="install the same version on all nodes") from error
    return replace(settings, build=build)
