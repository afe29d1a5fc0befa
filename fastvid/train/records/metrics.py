"""What a run writes about itself: JSON lines with units in the keys, and one console line for people."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any, TypeVar

from fastvid.train.records.tensorboard import Board

log = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"

Item = TypeVar("Item")


class Recorder:
    """Appends rows to a file; each row is one JSON object on one line, written at once.

    Rows have ``kind``: "train" every few steps, "eval", and "start" whenever a process group begins or goes on. Work
    after the last checkpoint of a killed run is done again, so its rows come twice; `curve` leaves out the lost ones.

    Args:
        path: The file; None writes nothing, as on all ranks but the first.
        board: Gets the rows as well.
    """

    def __init__(self, path: Path | None, board: Board | None = None) -> None:
        self._board = board
        self._file: IO[str] | None = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            torn = path.exists() and not path.read_bytes().endswith(b"\n") and path.stat().st_size > 0
            self._file = path.open("a", encoding="utf-8")
            if torn:
                # The last writer was killed inside a line; `read` skips what it left.
                self._file.write("\n")

    def write(self, kind: str, **values: Any) -> None:
        """Appends a row. Values that are no numbers (nan, inf) become null, which every JSON reader accepts."""
        if self._file is None:
            return
        row = {
            "kind": kind,
            **{
                name: None if isinstance(value, float) and not math.isfinite(value) else value
                for name, value in values.items()
            },
        }
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        if self._board is not None:
            self._board.write(kind, row)

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()
        if self._board is not None:
            self._board.close()


def read(path: Path) -> list[dict[str, Any]]:
    """All rows of a metrics file, in the order written; a line cut short by a kill is left out."""
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
    """The rows of one kind that belong to the weights the run ended with, by samples; no lost work."""
    kept: dict[int, dict[str, Any]] = {}
    for row in rows:
        if row["kind"] == "start":
            kept = {samples: earlier for samples, earlier in kept.items() if samples <= row["samples"]}
        elif row["kind"] == kind:
            kept[row["samples"]] = row
    return [kept[samples] for samples in sorted(kept)]


class Stopwatch:
    """Where the time of some steps went.

    Attributes:
        clips: Clips trained on, over all ranks.
        steps: Steps.
        wait_s: Seconds spent waiting for batches.
    """

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Begins a new stretch of steps."""
        self._began = time.perf_counter()
        self.clips = self.steps = 0
        self.wait_s = 0.0

    def count(self, clips: int) -> None:
        """A step is done."""
        self.clips += clips
        self.steps += 1

    def timed(self, batches: Iterable[Item]) -> Iterator[Item]:
        """The same batches; waiting for each is timed."""
        iterator = iter(batches)
        while True:
            asked = time.perf_counter()
            try:
                batch = next(iterator)
            except StopIteration:
                return
            self.wait_s += time.perf_counter() - asked
            yield batch
            # Held no longer than the step, so that its memory can be used again.
            del batch

    @contextlib.contextmanager
    def paused(self) -> Iterator[float]:
        """Leaves out the time of what is done inside, such as an evaluation. Gives the time of its beginning."""
        began = time.perf_counter()
        yield began
        self._began += time.perf_counter() - began

    @property
    def seconds(self) -> float:
        """Since the stretch began."""
        return time.perf_counter() - self._began

    def numbers(self) -> dict[str, float]:
        """Speed of the stretch."""
        seconds = max(self.seconds, 1e-9)
        return {
            "clips_per_s": self.clips / seconds,
            "step_ms": 1000 * seconds / max(1, self.steps),
            "wait_percent": 100 * self.wait_s / seconds,
        }


def console(row: dict[str, Any], done: int, total: int, watch: Stopwatch) -> None:
    """One line for people: a "train" row, samples done and to do, and the time left at the speed of this process."""
    left = (total - done) * watch.seconds / max(1, watch.clips)
    log.info(
        "%s/%s clips  loss %.4f  top1 %.1f %%  lr %.4g  %.1f clips/s  wait %.0f %%  left %s",
        f"{done:,}",
        f"{total:,}",
        row["loss"],
        row["top1_percent"],
        row["lr"],
        row["clips_per_s"],
        row["wait_percent"],
        clock(left),
    )


def clock(seconds: float) -> str:
    """Seconds as h:mm:ss."""
    whole = max(0, round(seconds))
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"
