"""The function that Ray workers run: it passes tasks to a child process, like a local job.

Ray's own process never parses a source: a hostile file can only break a child, which has resource limits.
"""

from __future__ import annotations

import json
import socket
from dataclasses import replace
from typing import Any

from fastvid import __version__
from fastvid.errors import JobError, WorkerError
from fastvid.media.ffmpeg import VARIABLE, find_ffmpeg
from fastvid.sharding.encode.streams import same_streams
from fastvid.sharding.engines.local_engine import LocalEngine
from fastvid.sharding.work.messages import Settings, SourceTask

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
