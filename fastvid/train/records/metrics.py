"""Metrics of a run: a JSON lines file with units in the keys, and a console line."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from fastvid.errors import StorageError
from fastvid.runtime.json_text import json_text
from fastvid.train.records.observers import Observers

log = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
_PERCENT = "_percent"

Item = TypeVar("Item")


class Recorder:
    """Appends rows to a file, each as a JSON object on one line, flushed immediately.

    Rows have ``kind``: "train" every few steps, "eval", and "start" whenever a process group starts or resumes. A
    resumed run repeats the work after the last checkpoint, so its rows occur twice; `curve` drops the lost ones.

    `loggers`: they also receive the rows.
    """

    def __init__(self, path: Path | None, loggers: Observers | None = None) -> None:
        self._loggers, self._path = loggers, path
        self._file: io.FileIO | None = None
        self._pending: list[str] = []
        self._failed = False
        if path is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            torn = path.exists() and not path.read_bytes().endswith(b"\n") and path.stat().st_size > 0
            self._file = io.FileIO(path, "a")
        except OSError as error:
            raise StorageError(f"metrics cannot be written: {error.strerror}", file=path) from error
        if torn:
            # The last writer was killed in the middle of a line; `read` skips the incomplete line.
            self._pending.append("")

    def write(self, kind: str, **values: Any) -> None:
        """Append a row. Non-finite values (nan, inf) become null, which every JSON reader accepts.

        A row that cannot be written, for example to a full disk, does not end the run: it is logged, and written
        before the next row.
        """
        if self._file is None:
            return
        text = json_text({"kind": kind, **values})
        self._pending.append(text)
        self._append(self._file)
        if self._loggers is not None:
            self._loggers.call("write", kind, json.loads(text))

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._append(self._file)
            self._file.close()
            if self._pending:
                log.warning("%s: %d rows of metrics are lost", self._path, len(self._pending))

    def _append(self, file: io.FileIO) -> None:
        """Write the pending rows, all or none of them."""
        rest = memoryview("".join(f"{line}\n" for line in self._pending).encode())
        end = file.seek(0, io.SEEK_END)
        try:
            while rest:
                rest = rest[file.write(rest) :]
        except OSError as error:
            with contextlib.suppress(OSError):
                file.truncate(end)
            if not self._failed:
                log.warning("%s: metrics cannot be written, retrying with each row: %s", self._path, error.strerror)
            self._failed = True
        else:
            self._pending.clear()
            self._failed = False


def read(path: Path) -> list[dict[str, Any]]:
    """Return all rows of a metrics file, in the order written, without a line truncated by a kill."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and "kind" in row:
            rows.append(row)
    return rows


def curve(rows: list[dict[str, Any]], kind: str = "train") -> list[dict[str, Any]]:
    """Return the rows of one kind that led to the final weights, sorted by samples, without lost work."""
    kept: dict[int, dict[str, Any]] = {}
    for row in rows:
        if row["kind"] == "start":
            kept = {samples: earlier for samples, earlier in kept.items() if samples <= row["samples"]}
        elif row["kind"] == kind:
            kept[row["samples"]] = row
    return [kept[samples] for samples in sorted(kept)]


class Stopwatch:
    """Measures the speed of a range of steps and the time spent waiting for batches.

    `wait_s`: seconds spent waiting for batches.
    """

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Start a new range of steps."""
        self._began = time.perf_counter()
        self.clips = self.steps = 0
        self.wait_s = 0.0

    def count(self, clips: int) -> None:
        """Count a finished step."""
        self.clips += clips
        self.steps += 1

    def timed(self, batches: Iterable[Item]) -> Iterator[Item]:
        """Yield the same batches, measuring the time spent waiting for each."""
        iterator = iter(batches)
        while True:
            asked = time.perf_counter()
            try:
                batch = next(iterator)
            except StopIteration:
                return
            self.wait_s += time.perf_counter() - asked
            yield batch
            # Drop the reference right after the step, so that the memory can be reused.
            del batch

    @contextlib.contextmanager
    def paused(self) -> Iterator[float]:
        """Exclude the time of the block, for example an evaluation; yields its start time."""
        began = time.perf_counter()
        yield began
        self._began += time.perf_counter() - began

    @property
    def seconds(self) -> float:
        """Seconds since `start`, excluding pauses."""
        return time.perf_counter() - self._began

    def numbers(self) -> dict[str, float]:
        """Return the speed since `start`."""
        seconds = max(self.seconds, 1e-9)
        return {
            "clips_per_s": self.clips / seconds,
            "step_ms": 1000 * seconds / max(1, self.steps),
            "wait_percent": 100 * self.wait_s / seconds,
        }


def console(row: dict[str, Any], shown: Iterable[str], done: int, total: int, watch: Stopwatch) -> None:
    """Log a "train" row as a line, with the columns `shown`, samples done, total, and time left at this speed."""
    left = (total - done) * watch.seconds / max(1, watch.clips)
    log.info(
        "%s/%s clips  %s  lr %.4g  %.1f clips/s  wait %.0f %%  left %s",
        f"{done:,}",
        f"{total:,}",
        "  ".join(shown_number(name, row[name]) for name in shown),
        row["lr"],
        row["clips_per_s"],
        row["wait_percent"],
        clock(left),
    )


def shown_number(name: str, value: float) -> str:
    """Format a metric with its name, whose unit may be its last word: ``top1 93.75 %``, ``rmse 0.1234``."""
    if name.endswith(_PERCENT):
        return f"{name.removesuffix(_PERCENT)} {value:.2f} %"
    return f"{name} {value:.4f}" if 1e-3 <= abs(value) < 1e4 else f"{name} {value:.4g}"


def clock(seconds: float) -> str:
    """Format seconds as h:mm:ss."""
    whole = max(0, round(seconds))
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"
