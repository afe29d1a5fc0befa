"""How far a long job is, on stderr: done/total, rate, time left."""

from __future__ import annotations

import logging
import sys
import time
from collections import deque
from typing import Final

_LOG = logging.getLogger(__name__)

# The rate is that of the last minutes: the sources of a set differ less from their neighbours than from the first ones.
_WINDOW_SECONDS: Final = 300.0
_TERMINAL_SECONDS: Final = 0.5
_LOG_SECONDS: Final = 15.0


class Progress:
    """Counts what is done and says so now and then: in place on a terminal, as log lines elsewhere.

    Args:
        total: Everything there is.
        what: What is counted.
    """

    def __init__(self, total: int, *, what: str = "sources") -> None:
        self.total, self.done, self.what = total, 0, what
        self.rejected = 0
        self._terminal = sys.stderr.isatty()
        self._every = _TERMINAL_SECONDS if self._terminal else _LOG_SECONDS
        now = time.monotonic()
        self._marks = deque([(now, 0)])
        self._said = now

    def take(self, done: int, *, rejected: int) -> None:
        """So much was done before; it says nothing about the rate."""
        self.done += done
        self.rejected += rejected
        self._marks = deque([(time.monotonic(), self.done)])

    def advance(self, *, rejected: bool = False) -> None:
        """One more is done."""
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
        """Ends the line."""
        if self._terminal:
            self._say(self.text(time.monotonic()))
            sys.stderr.write("\n")

    def text(self, now: float) -> str:
        """The line as it stands."""
        since, before = self._marks[0]
        rate = (self.done - before) / (now - since) if now > since else 0.0
        parts = [f"{self.done}/{self.total} {self.what}"]
        if rate > 0:
            parts += [f"{rate:.2f}/s", f"{_duration((self.total - self.done) / rate)} left"]
        if self.rejected:
            parts.append(f"{self.rejected} rejected")
        return ", ".join(parts)

    def _say(self, text: str) -> None:
        if self._terminal:
            sys.stderr.write(f"\r{text}\x1b[K")
            sys.stderr.flush()
        else:
            _LOG.info("%s", text)


def _duration(seconds: float) -> str:
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
