"""What a Ray worker does with a task: hands it to a process of its own, as a job on one machine does.

Ray's process parses no source: what a hostile file can break is a child that has limits and is killed.
"""

from __future__ import annotations

import json
import socket
from dataclasses import replace

from fastvid import __version__
from fastvid.errors import JobError, WorkerError
from fastvid.media.ffmpeg import VARIABLE, find_ffmpeg
from fastvid.sharding.encode.streams import same_streams
from fastvid.sharding.engines.local_engine import LocalEngine
from fastvid.sharding.work.messages import Settings, Task

# The engine of the job that this process works for; its worker process stays from task to task.
_engines: dict[str, LocalEngine] = {}


def encode(version: str, settings: str, task: str) -> tuple[str, bytes]:
    """One task, from JSON to its node's name and the bytes of its outcome.

    Raises:
        MissingDependency: There is no ffmpeg on this node.
        WorkerError: This node cannot work for the job.
    """
    node = socket.gethostname()
    if version != __version__:
        raise WorkerError(f"node {node} has fastvid {__version__}, the job is run by {version}")
    if settings not in _engines:
        close()
        _engines[settings] = LocalEngine(_here(Settings.from_json(json.loads(settings)), node), workers=1)
    record = json.loads(task)
    record["member"] = None if record["member"] is None else tuple(record["member"])
    try:
        (outcome,) = _engines[settings].run([Task(**record)])
    except BaseException:
        close()
        raise
    return node, outcome.to_bytes()


def close() -> None:
    """Ends the worker process, if there is one."""
    while _engines:
        _engines.popitem()[1].close()


def _here(settings: Settings, node: str) -> Settings:
    """The settings with this node's ffmpeg, which must be the same build; so must be OpenCV, where there is flow."""
    build = find_ffmpeg()
    if build.identity() != settings.build.identity():
        raise WorkerError(
            f"node {node} has {build}, the job {settings.build}",
            hint=f"install the same build on all nodes, or name it in {VARIABLE} before `ray start`",
        )
    try:
        same_streams(settings.streams.to_json())
    except JobError as error:
        raise WorkerError(f"node {node}: {error.message}", hint="install the same version on all nodes") from error
    return replace(settings, build=build)
