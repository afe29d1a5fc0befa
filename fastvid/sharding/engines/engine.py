"""The protocol of engines, which encode sources, and the list of engines.

An engine takes tasks and yields one outcome for each, in any order, even if workers die. Consecutive tasks of one file
should go to one worker, which then fetches and probes it once (`fastvid.sharding.work.group`). The engine decides
nothing else: the job decides what is encoded, what is retried, where samples are written and what goes into the ledger,
so every engine produces the same bytes. A new engine is a class with `run` and `close`, and a line in ENGINES.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from typing import Final, Protocol

from fastvid.errors import UsageError
from fastvid.sharding.work.messages import Outcome, Settings, SourceTask


class Engine(Protocol):
    """Runs tasks in other processes or machines.

    Tasks of one file are a call of `fastvid.sharding.work.encode_source.encode_clips`, which may crash, hang or return
    garbage; bytes and verdicts are the same if each task is called by itself.
    """

    def __init__(self, settings: Settings, workers: int | None = None, address: str | None = None) -> None: ...

    def run(self, tasks: Iterable[SourceTask]) -> Iterator[Outcome]:
        """Encode the tasks' sources, taking a task only when a worker has room for it. May be called again.

        If a task's process or machine died, its outcome is transient.
        """
        ...

    def close(self) -> None:
        """Stop all workers at once, even those with a task in flight."""
        ...


ENGINES: Final = {
    "local": "fastvid.sharding.engines.local_engine:LocalEngine",
    "ray": "fastvid.sharding.engines.ray_engine:RayEngine",
}
"""Import strings of the engines by name, so that an engine's dependencies are imported only when it is used."""


def open_engine(name: str, settings: Settings, *, workers: int | None = None, address: str | None = None) -> Engine:
    """Create an engine by name; it starts no process before `run`."""
    if name not in ENGINES:
        raise UsageError(f"unknown engine {name!r}", hint=f"use one of {', '.join(ENGINES)}")
    module, _, attribute = ENGINES[name].partition(":")
    kind: type[Engine] = getattr(importlib.import_module(module), attribute)
    return kind(settings, workers, address)
