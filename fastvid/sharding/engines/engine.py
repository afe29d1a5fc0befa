"""Where sources are encoded: what an engine is, and which ones there are.

An engine takes tasks and gives one outcome for each, in any order, whatever dies on the way. It decides nothing else:
what is encoded, what is tried again, where samples lie and what the ledger says is the job's business, so a job gives
the same bytes with every engine. A new one is a class with `run` and `close`, and a line in ENGINES.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from typing import Final, Protocol

from fastvid.errors import UsageError
from fastvid.sharding.work.messages import Outcome, Settings, Task


class Engine(Protocol):
    """Runs tasks somewhere. `fastvid.sharding.work.encode_source.encode_source` is the work, and may die, hang or lie.

    Args:
        settings: What all tasks have in common.
        workers: Sources that are encoded at the same time; by default as many as there are cores for it.
        address: Where the machines are, in the engine's own words; by default where its users expect them.
    """

    def __init__(self, settings: Settings, workers: int | None = None, address: str | None = None) -> None: ...

    def run(self, tasks: Iterable[Task]) -> Iterator[Outcome]:
        """Encodes the tasks' sources; takes a task only when there is room for it. May be called again.

        A task whose process or machine died for good has a transient outcome.

        Raises:
            MissingDependency: A package or program that the engine needs is not there.
            WorkerError: Nothing can be encoded any more.
        """
        ...

    def close(self) -> None:
        """Stops all workers at once, whatever they are doing."""
        ...


ENGINES: Final = {
    "local": "fastvid.sharding.engines.local_engine:LocalEngine",
    "ray": "fastvid.sharding.engines.ray_engine:RayEngine",
}
"""Engines by name, as import strings: what one needs is imported when it is asked for."""


def open_engine(name: str, settings: Settings, *, workers: int | None = None, address: str | None = None) -> Engine:
    """An engine by name; nothing runs before it gets tasks.

    Raises:
        UsageError: There is no such engine, or it takes no address.
        MissingDependency: A package that it needs is not installed.
    """
    if name not in ENGINES:
        raise UsageError(f"engine {name!r} is not known; known are {', '.join(ENGINES)}")
    module, _, attribute = ENGINES[name].partition(":")
    kind: type[Engine] = getattr(importlib.import_module(module), attribute)
    return kind(settings, workers, address)
