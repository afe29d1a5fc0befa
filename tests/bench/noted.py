"""A job for the benchmarks' workers. Processes import this file, and nothing else of the tests."""

from __future__ import annotations

from pathlib import Path


class Noted:
    """Writes down which tasks it did, a line each."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __call__(self, task: int, /) -> None:
        with self._path.open("a") as notes:
            notes.write(f"{task}\n")
