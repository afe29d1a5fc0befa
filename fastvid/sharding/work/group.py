"""Groups of tasks that read the same file, which a worker fetches, hashes and probes once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby

from fastvid.sharding.work.messages import SourceTask


def group_by_file(tasks: Iterable[SourceTask]) -> Iterator[list[SourceTask]]:
    """Yield the consecutive tasks of each file together, lazily: one task further than the group is taken."""
    for _, group in groupby(tasks, key=_file):
        yield list(group)


def _file(task: SourceTask) -> tuple[object, ...]:
    # Indexing reads a video by itself.
    return task.path, task.member, task.tag, task.patience, task.index if task.indexes else None
