"""Make requests to a store: at the rate that it takes, and again for a while if they fail.

obstore has retries of its own, which cannot replace these: it does not retry a response that breaks off without an
entity tag, and tells of a refusal only after its last attempt, so that nothing could be learned from it. Object stores
refuse requests with 429 or 503 when too many arrive (S3: 5,500 reads a second and prefix), and a few at any time. The
rate is halved when many of the last requests were refused, lowered a little when few were, and grows again while
requests are answered, as DCTCP does (additive increase, multiplicative decrease): processes that share a store converge
to equal shares without knowing of each other. Before many were refused, only these are made again, after a pause each.

When the rate is halved a process also waits, for as long as the response asks in Retry-After where the client library
passes that on, else for a moment.
"""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, TypeVar

from fastvid.errors import FastvidError, StorageError, UnavailableError
from fastvid.storage.protocol import TRAFFIC, RemoteOptions

LEAST: Final = 8.0
"""Requests a second at the lowest. Where this is still too much, the pauses after refusals do the rest."""

GROWTH: Final = 2.0
"""Requests a second by which the rate grows in each second, or a tenth of the rate if that is more."""

TOLERATED: Final = 0.25
"""Share of the last requests that may be refused before the rate is limited: a store that refuses a few whatever their
rate would else be read ten times slower. While the rate is limited, a refusal lowers it by `CUT` of that share."""

CUT: Final = 0.75
"""With it a limited rate still grows where one request in ten is refused, and settles where one in eight is."""

_LAST: Final = 100  # requests of which the share is taken
_FEWEST: Final = 32  # of so many at least, so that the first refusals do not count as many

PAUSE: Final = 1.0
"""Seconds without requests after many were refused: stores count requests over about a second. Without a pause most
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
        self._refused: deque[bool] = deque(maxlen=_LAST)  # whether each of the last requests was refused
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

    def refuse(self, begun: float, wait: float = 0.0) -> bool:
        """Note that a request was refused; return whether all requests wait.

        `wait`: seconds that the store asks to wait, at most `LONGEST` of which are waited.
        """
        with self._lock:
            now = self._clock()
            # Requests that began before the rate was lowered say nothing about the new one.
            if self._limit is not None and begun < self._lowered:
                return now < self._lowered
            self._refused.append(True)
            share = sum(self._refused) / max(len(self._refused), _FEWEST)
            recent = sum(now - _WINDOW <= start <= now for start in self._begun) / _WINDOW
            if share <= TOLERATED and not wait:
                if self._limit is not None and now > self._lowered + _WINDOW:
                    self._limit, self._lowered = max(LEAST, min(recent, self._limit) * (1 - CUT * share)), now
                return False
            self._limit = max(LEAST, min(recent, self._limit or recent) / 2)
            self._lowered = now + max(PAUSE, min(wait, LONGEST))
            self._next = self._lowered + 1 / self._limit
            self._refused.clear()
            return True

    def answer(self) -> None:
        """Note that a request was answered."""
        with self._lock:
            self._answered = self._clock()
            self._refused.append(False)
            if self._limit is not None:
                # Each answer stands for 1 / limit seconds.
                self._limit += max(GROWTH, self._limit / 10) / self._limit
                # A rate that far exceeds what is asked for limits nothing.
                is_settled = self._answered > self._lowered + 2 * _WINDOW
                if is_settled and self._limit > 2 * max(LEAST, len(self._begun) / _WINDOW):
                    self._limit = None


T = TypeVar("T")

_ending = threading.Event()
# These calls run in reverse, so this one runs before `concurrent.futures` joins its threads, also those of a daemon:
# their requests then give up, instead of delaying the exit for as long as they would retry.
threading._register_atexit(_ending.set)  # type: ignore[attr-defined]


def request_threads(size: int) -> ThreadPoolExecutor:
    """Return a pool for requests that does not delay the exit of the program."""
    return ThreadPoolExecutor(size, "fastvid-storage")


def pause(seconds: float) -> bool:
    """Sleep, and return True; return False early when the program is exiting."""
    return seconds <= 0 or not _ending.wait(seconds)


FIRST_SECONDS: Final = 15.0
"""Time to retry before the first response: a storage that never responded more likely has a wrong address."""

FIRST_PAUSE: Final = 0.1
LONGEST_PAUSE: Final = 10.0
"""Pauses between attempts double from the first to the longest, each drawn uniformly from its upper half (jitter)."""

LONGEST_REFUSED_PAUSE: Final = 1.0
"""Longest pause after a request was refused because there are too many: the rate of requests is lowered as well."""

_TRIES_TO_REPORT: Final = 3

log = logging.getLogger(__name__)

_jitter = random.SystemRandom()  # does not touch the state of the user's `random`


# By scheme and host or bucket, because a store counts the requests of all folders.
_rates: dict[str, Rate] = {}

# Process that made the first request. The threads of a client do not survive a fork: a forked child would hang.
_process: int | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """What a failed request says."""

    reason: str
    transient: bool = False
    refused: bool = False
    wait: float = 0.0  # seconds that the store asks to wait, if it says so


class Attempts:
    """Makes requests to one store.

    `translate`: returns the error to raise, of the failure, the file's URL, the attempts and the seconds they took.
    """

    def __init__(
        self,
        url: str,
        options: RemoteOptions,
        explain: Callable[[Exception], Failure],
        translate: Callable[[Exception, str, int, float], FastvidError],
    ) -> None:
        self._options, self._explain, self._translate = options, explain, translate
        self._answered = False
        self.rate = _rates.setdefault("/".join(url.split("/", 3)[:3]), Rate())

    def make(self, file: str, call: Callable[[], T]) -> T:
        """Make a request, and again for `patience_seconds` if that may help."""
        global _process
        if _process not in (None, os.getpid()):
            raise StorageError(
                "remote storage was used before this process was forked",
                file=file,
                hint="start worker processes with the spawn or forkserver method",
            )
        _process = os.getpid()
        start, tries = time.monotonic(), 0
        while True:
            tries += 1
            if not pause(self.rate.delay()):
                raise UnavailableError("the program is ending", file=file)
            begun = time.monotonic()
            TRAFFIC.sent()
            try:
                result = call()
            except FastvidError:
                raise
            except Exception as error:
                failure, since = self._explain(error), start
                wait = min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** (tries - 1)) * _jitter.uniform(0.5, 1.0)
                if failure.refused:
                    # While the store answers others, this request only has to wait for its turn.
                    since = max(start, self.rate.answered)
                    wait = 0.0 if self.rate.refuse(begun, failure.wait) else min(wait, LONGEST_REFUSED_PAUSE)
                patience = self._options.patience_seconds
                if not self._answered:
                    patience = min(patience, FIRST_SECONDS)
                spent = time.monotonic() - since
                if not failure.transient or spent + wait > patience:
                    raise self._translate(error, file, tries, spent) from error
                say = log.warning if tries >= _TRIES_TO_REPORT else log.info
                say("attempt %d at %s failed, retrying in %.1f s: %s", tries, file, wait, failure.reason)
                if not pause(wait):
                    raise self._translate(error, file, tries, spent) from error
            else:
                self._answered = True
                self.rate.answer()
                return result
