"""Makes shards on the nodes of a Ray cluster: a task makes and writes a whole shard, and reports only that it is done.
Ray itself is used in a child process (`fastvid.sharding.job.ray_driver`), because it exits the process that uses it
when the cluster's head dies, and changes signal handlers and logging; a job may run in a notebook.

A node makes a shard like a job on that machine, with a `LocalEngine`. So a hostile file can only crash a process of the
`LocalEngine`, which has resource limits, and never Ray's own. If a node dies, the samples that it has encoded are in
the job's folder, and the next node uses them.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import pickle
import secrets
import select
import socket
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

from fastvid import __version__
from fastvid.errors import FastvidError, FormatError, MissingDependency, StorageError, WorkerError, error_from_json
from fastvid.format.schema import LEDGER_PARTS
from fastvid.media.ffmpeg import VARIABLE, find_ffmpeg
from fastvid.runtime.processes import how_it_ended
from fastvid.sharding.encode.flow import same_streams
from fastvid.sharding.encode.profiles import Settings
from fastvid.sharding.engines.local import Child, LocalEngine
from fastvid.sharding.job.lock import Staging, scratch_folder
from fastvid.sharding.job.plan import JobPart, digest
from fastvid.sharding.job.run import How, Job, ShardWork
from fastvid.storage import open_storage

_LOG = logging.getLogger(__name__)

_ENVIRONMENT: Final = {"RAY_USAGE_STATS_ENABLED": "0"}  # send no usage statistics to Ray's developers
# Time limit for connecting: Ray itself retries forever. Starting a cluster on a busy machine takes a minute.
_CONNECT_SECONDS: Final = 180.0
# Time limit for stopping a cluster that was started for the job.
_SHUTDOWN_SECONDS: Final = 20.0


class RayEngine:
    """Makes shards on the nodes of a Ray cluster, on one CPU each, or on more if there are more CPUs than shards.

    Every node needs the same fastvid, the same build of ffmpeg, and the sources and the dataset's folder at the same
    paths. `workers`: maximum number of CPUs of the cluster to use; by default all.
    """

    def __init__(self, settings: Settings, workers: int | None = None, address: str | None = None) -> None:  # noqa: ARG002
        if importlib.util.find_spec("ray") is None:
            raise MissingDependency(
                "engine 'ray' needs Ray, which is not installed", hint="pip install 'fastvid-toolkit[ray]'"
            )
        self._workers, self._address = workers, address or os.environ.get("RAY_ADDRESS")
        self._environment = _ENVIRONMENT
        if self._address is None and "RAY_AUTH_MODE" not in os.environ:
            # Otherwise Ray writes a token to the user's home, and every cluster started later requires it.
            self._environment = _ENVIRONMENT | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        self._child: Child | None = None
        self._left: set[int] = set()

    def make_shards(self, work: ShardWork, how: How, shards: Sequence[int]) -> Iterator[int]:
        """See `fastvid.sharding.job.run.Job.run`."""
        self._left = set(shards)
        if not shards:
            return
        with tempfile.NamedTemporaryFile(prefix="fastvid-job-") as file:
            pickle.dump((work, how), file)
            file.flush()
            child = self._child = Child("fastvid.sharding.job.ray_driver", self._environment)
            limits = {"workers": self._workers, "address": self._address}
            child.send({"job": file.name, "shards": [*shards], **limits})
            if not select.select([child.output], [], [], _CONNECT_SECONDS)[0]:
                raise WorkerError(f"the Ray cluster did not respond within {_CONNECT_SECONDS:.0f} s")
            while self._left:
                for message in self._messages(child):
                    if "failure" in message:
                        raise error_from_json(message["failure"])
                    if "cluster" in message:
                        _LOG.info("Ray cluster: %s", message["cluster"])
                    else:
                        self._left.discard(message["shard"])
                        yield message["shard"]

    def _messages(self, child: Child) -> list[dict[str, Any]]:
        try:
            return [header for header, _ in child.receive()]
        except (FormatError, EOFError) as error:
            status, message = child.kill()
            self._child = None
            raise WorkerError(
                f"lost the connection to the Ray cluster: the Ray process {how_it_ended(status)}: {message}",
                hint="run the same command again when the cluster is back; finished work is kept",
            ) from error

    def close(self) -> None:
        """Stop the cluster's work, and the cluster if it was started for this job."""
        if self._child is not None:
            if not self._left:
                self._child.wait(_SHUTDOWN_SECONDS)
            self._child.kill()
            self._child = None


def make_shard(job: tuple[ShardWork, How], shard: int, workers: int, version: str = __version__) -> None:
    """Make a shard on this node.

    `version`: version of the job's fastvid, which must be this node's. `workers`: sources processed in parallel.
    """
    work, how = job
    node = socket.gethostname()
    if version != __version__:
        raise WorkerError(f"node {node} has fastvid {__version__}, but the job runs {version}")
    _check_folder(work, node)
    settings = work.settings = settings_here(work.settings, node)
    if work.scratch is not None:
        work.scratch = scratch_folder(work.storage, work.scratch.root.parent)
    try:
        with contextlib.closing(LocalEngine(settings, workers)) as engine:
            Job(work, replace(how, part=JobPart(shard, len(work.shards)))).make(engine)
    except StorageError as error:
        raise error.at(node=node) from error


def _check_folder(work: ShardWork, node: str) -> None:
    """Raise a WorkerError unless this node can read and write the job's folder."""
    storage = open_storage((work.records or work.storage).url)
    try:
        job = Staging(storage).job()
        if job is None or digest(job) != digest(work.identity):
            raise StorageError("the job is not there")
        probe = f"{LEDGER_PARTS}/progress/.{node}-{os.getpid()}"
        storage.write(probe, b"")
        storage.delete(probe)
    except FastvidError as error:
        raise WorkerError(
            f"node {node} cannot reach {storage.url}: {error.message}",
            hint="write to a folder that all nodes share at the same path, or to an object store",
        ) from error


def settings_here(settings: Settings, node: str) -> Settings:
    """Return the settings with the path of this node's ffmpeg.

    Raises WorkerError if its build, or for flow the version of OpenCV, differs from the job's.
    """
    build = settings.profile.completed(find_ffmpeg())
    if build.identity() != settings.build.identity():
        raise WorkerError(
            f"node {node} has {build}, but the job has {settings.build}",
            hint=f"install the same build on all nodes, or set {VARIABLE} to it before `ray start`",
        )
    try:
        same_streams(settings.streams.to_json())
    except FastvidError as error:
        raise WorkerError(f"node {node}: {error.message}", hint="install the same version on all nodes") from error
    return replace(settings, build=build)
