"""How many requests a second a store takes, learned from its refusals.

Object stores refuse requests with 429 or 503 when too many arrive (S3: 5,500 reads a second and prefix). The rate is
halved when a request is refused, and grows again while requests are answered, as TCP does (additive increase,
multiplicative decrease): processes that share a store converge to equal shares without knowing of each other.

After a refusal a process also waits, for as long as the response asks in Retry-After where the client library passes
that on, else for a moment.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

LEAST: Final = 8.0
"""Requests a second at the lowest. Where this is still too much, the pauses after refusals do the rest."""

GROWTH: Final = 2.0
"""Requests a second by which the rate grows in each second, or a tenth of the rate if that is more."""

PAUSE: Final = 1.0
"""Seconds without requests after one was refused: stores count requests over about a second. Without a pause most
requests of many processes are refused (``python -m bench stores`` counts them)."""

LONGEST: Final = 60.0
"""Longest such pause that a store can ask for, in seconds."""

_WINDOW: Final = 1.0


class Rate:
    """Paces the requests of one process to one store. Thread-safe.

    `clock`: returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._limit: float | None = None
        self._begun: deque[float] = deque()
        self._next = self._lowered = self._answered = clock()

    @property
    def limit(self) -> float | None:
        """Requests a second; None while none was refused."""
        return self._limit

    @property
    def answered(self) -> float:
        """When the last request was answered."""
        return self._answered

    def delay(self) -> float:
        """Take the next place for a request; return after how many seconds it may begin."""
        with self._lock:
            now = self._clock()
            start = now if self._limit is None else max(now, self._next)
            if self._limit is not None:
                self._next = start + 1 / self._limit
            self._begun.append(start)
            while self._begun[0] < now - _WINDOW:
                self._begun.popleft()
            return start - now

    def refuse(self, begun: float, wait: float = 0.0) -> None:
        """Note that a request was refused.

        `wait`: seconds that the store asks to wait, at most `LONGEST` of which are waited.
        """
        with self._lock:
            # Requests that began before the rate was lowered say nothing about the new one.
            if self._limit is not None and begun < self._lowered:
                return
            now = self._clock()
            recent = sum(now - _WINDOW <= start <= now for start in self._begun) / _WINDOW
            self._limit = max(LEAST, min(recent, self._limit or recent) / 2)
            self._lowered = now + max(PAUSE, min(wait, LONGEST))
            self._next = self._lowered + 1 / self._limit

    def answer(self) -> None:
        """Note that a request was answered."""
        with self._lock:
            self._answered = self._clock()
            if self._limit is not None:
                # Each answer stands for 1 / limit seconds.
                self._limit += max(GROWTH, self._limit / 10) / self._limit
