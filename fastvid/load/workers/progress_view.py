"""Shows loader statistics during a run: on the terminal, as JSON lines; and times the waits for copies to a device."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Final

import torch

from fastvid.load.workers.stats import LoaderStats

_log = logging.getLogger(__name__)

_TERMINAL_SECONDS: Final = 0.5
_LOG_SECONDS: Final = 15.0
_WINDOW_SECONDS: Final = 60.0
"""Window of the displayed rate."""

BatchCallback = Callable[[LoaderStats, int, int, int], None]
"""Called after each batch with the stats, epoch, position and number of samples of the epoch."""


def batch_callbacks(*, show_stats: bool, stats_file: str | os.PathLike[str] | None) -> list[BatchCallback]:
    """Return the callbacks to run after each batch."""
    callbacks: list[BatchCallback] = []
    if show_stats:
        callbacks.append(LiveView())
    if stats_file is not None:
        callbacks.append(JsonLines(Path(stats_file)))
    return callbacks


class JsonLines:
    """Appends a line for each batch to a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __call__(self, stats: LoaderStats, epoch: int, position: int, num_samples: int) -> None:
        """Append one line in a single write, so that a killed process leaves no partial line."""
        line = {"time": time.time(), "epoch": epoch, "position": position, "num_samples": num_samples}
        data = (json.dumps(line | stats.as_dict()) + "\n").encode()
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            os.write(descriptor, data)
        finally:
            os.close(descriptor)


class LiveView:
    """Shows statistics periodically: three lines redrawn in place on a terminal, log lines elsewhere."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._every = _TERMINAL_SECONDS if self._terminal else _LOG_SECONDS
        self._said = time.monotonic()
        self._marks: deque[tuple[float, int]] = deque()
        self._drawn = False

    def __call__(self, stats: LoaderStats, epoch: int, position: int, num_samples: int) -> None:
        """Redraw if enough time has passed."""
        now = time.monotonic()
        if self._marks and position < self._marks[-1][1]:
            self._marks.clear()
        last = position >= num_samples
        if self._marks and now - self._said < self._every and not last:
            return
        self._said = now
        self._marks.append((now, position))
        while now - self._marks[0][0] > _WINDOW_SECONDS and len(self._marks) > 2:
            self._marks.popleft()
        lines = self.lines(stats, epoch, position, num_samples)
        if not self._terminal:
            _log.info("%s", " | ".join(lines))
            return
        up = f"\x1b[{len(lines)}F" if self._drawn else ""
        sys.stderr.write(up + "".join(f"{line}\x1b[K\n" for line in lines))
        sys.stderr.flush()
        self._drawn = True

    def lines(self, stats: LoaderStats, epoch: int, position: int, num_samples: int) -> list[str]:
        """Return the lines to show."""
        total = stats.total
        (since, before), (now, _) = self._marks[0], self._marks[-1]
        rate = (position - before) / (now - since) if now > since else 0.0
        left = f", {(num_samples - position) / rate:.0f} s left" if rate else ""
        clips = max(1, total.clips)
        stages = {"fetch": total.fetch_seconds, "decode": total.decode_seconds, "finish": total.finish_seconds}
        whole = sum(stages.values()) or 1.0
        parts = " ".join(f"{stage} {seconds / whole:.0%}" for stage, seconds in stages.items())
        kilobytes = f"{total.bytes_read / clips / 1e3:.0f} of {total.bytes_whole / clips / 1e3:.0f} kB"
        reads = f"a clip reads {kilobytes} in {total.requests / clips:.1f} requests"
        skips = ", ".join(f"{count} {reason}" for reason, count in total.skips.most_common()) or "none"
        return [
            f"epoch {epoch}, {position}/{num_samples} clips, {rate:.1f}/s{left}; waiting {total.wait_share:.0%};"
            f" {stats.ready} batches ready, {stats.queued} clips queued",
            f"{stats.num_threads} threads {stats.busy:.0%} busy: {parts}; {reads}; skipped: {skips}",
            stats.verdict(),
        ]


class CopyClock:
    """Measures on the device's clock how long the consumer's stream waits for batches that are copied and converted.

    The host never waits: each measurement is read after the stream has passed it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None
        self._pending: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._free: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def __enter__(self) -> None:
        if self._device is not None:
            pair = self._free.pop() if self._free else (_event(), _event())
            self._pending.append(pair)
            pair[0].record(torch.cuda.current_stream(self._device))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._device is not None:
            self._pending[-1][1].record(torch.cuda.current_stream(self._device))

    def seconds(self) -> float:
        """Return the seconds of the waits that have ended since the last call."""
        spent = 0.0
        while self._pending and self._pending[0][1].query():  # type: ignore[no-untyped-call]
            start, stop = pair = self._pending.popleft()
            spent += start.elapsed_time(stop) / 1e3
            self._free.append(pair)
        return spent


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
