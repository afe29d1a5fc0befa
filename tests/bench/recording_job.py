"""A job for the benchmarks' workers. Worker processes import only this file of the tests."""

from pathlib import Path


class RecordingJob:
    """Appends the number of each finished task to a file, one per line."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __call__(self, task: int, /) -> None:
        with self._path.open("a") as notes:
            notes.write(f"{task}\n")
