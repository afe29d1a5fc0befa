"""What a long job writes to stderr: log lines, in which names cannot forge further lines, and its progress."""

from __future__ import annotations

import copy
import logging
import os
import sys
import time
from collections import deque
from typing import Final

from fastvid.errors import visible
from fastvid.runtime.values import check_choice, duration


class LineFormatter(logging.Formatter):
    """Formats records with the time; text in their arguments cannot control the terminal or forge a line."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname).1s %(message)s", "%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        """Return a record's line."""
        safe = copy.copy(record)
        if isinstance(record.args, tuple):
            safe.args = tuple(visible(value) if isinstance(value, str) else value for value in record.args)
        # An argument that is an object, such as an exception, may have a text of several lines.
        safe.msg, safe.args = "\n".join(map(visible, safe.getMessage().split("\n"))), None
        return super().format(safe)


def log_to_stderr() -> None:
    """Write the log to stderr at the level of the variable FASTVID_LOG."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter())
    level = os.environ.get("FASTVID_LOG", "INFO").upper()
    check_choice("FASTVID_LOG", level, logging.getLevelNamesMapping())
    logging.basicConfig(level=level, handlers=[handler])


_LOG = logging.getLogger(__name__)

# The rate is measured over the last minutes, because consecutive sources take similar times.
_WINDOW_SECONDS: Final = 300.0
_TERMINAL_SECONDS: Final = 0.5  # between two reports on a terminal
_LOG_SECONDS: Final = 15.0  # between two reports in a log


class Progress:
    """Counts finished items and reports periodically: in place on a terminal, as log lines elsewhere."""

    def __init__(self, total: int, *, what: str = "sources") -> None:
        self.total, self.done, self.what = total, 0, what
        self.rejected = 0
        self._terminal = sys.stderr.isatty()
        self._every = _TERMINAL_SECONDS if self._terminal else _LOG_SECONDS
        now = time.monotonic()
        self._marks = deque([(now, 0)])
        self._said = now

    def take(self, done: int, *, rejected: int) -> None:
        """Count items that were finished in an earlier run; they do not count in the rate."""
        self.done += done
        self.rejected += rejected
        self._marks = deque([(time.monotonic(), self.done)])

    def advance(self, *, rejected: bool = False) -> None:
        """Count one finished item."""
        self.done += 1
        self.rejected += rejected
        now = time.monotonic()
        if now - self._said >= self._every:
            self._said = now
            self._marks.append((now, self.done))
            while now - self._marks[0][0] > _WINDOW_SECONDS:
                self._marks.popleft()
            self._say(self.text(now))

    def finish(self) -> None:
        """Show the final count and end the line."""
        if self._terminal:
            self._say(self.text(time.monotonic()))
            sys.stderr.write("\n")

    def rate(self, now: float) -> float:
        """Return the number of items finished per second in the last minutes; `now`: seconds of the clock."""
        since, before = self._marks[0]
        return (self.done - before) / (now - since) if now > since else 0.0

    def text(self, now: float) -> str:
        """Return the current progress as text."""
        rate = self.rate(now)
        parts = [f"{self.done}/{self.total} {self.what}"]
        if rate > 0:
            parts += [f"{rate:.2f}/s", f"{duration(round((self.total - self.done) / rate))} left"]
        if self.rejected:
            parts.append(f"{self.rejected} rejected")
        return ", ".join(parts)

    def _say(self, text: str) -> None:
        if self._terminal:
            sys.stderr.write(f"\r{text}\x1b[K")
            sys.stderr.flush()
        else:
            _LOG.info("%s", text)
