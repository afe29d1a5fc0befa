"""Make requests to a store, no faster than the store accepts, and retry those that fail.

obstore's own retries cannot replace these: obstore does not retry a truncated response without an entity tag, and
reports a refusal only after its last attempt, too late to lower the rate. Object stores refuse requests with 429 or 503
when too many arrive (S3: 5,500 reads a second and prefix), and a few at any time. While only few requests are refused
and there is no limit yet, each is retried after a pause. The rate is halved when many of the last requests were
refused, lowered a little when few were, and grows again while requests are answered, as in DCTCP (additive increase,
multiplicative decrease): processes that share a store converge to equal shares without knowing of each other.

When the rate is halved, the process also pauses all its requests: for the seconds in the response's Retry-After where
the client library passes them on, else for `PAUSE`.
"""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar

from fastvid.errors import FastvidError, StorageError, UnavailableError
from fastvid.storage.protocol import TRAFFIC, RemoteOptions, Version, is_missing

LEAST: Final = 8.0
"""Lowest rate, in requests a second. Where it is still too high, the pauses after refusals lower it further."""

GROWTH: Final = 2.0
"""In each second the limit grows by this many requests a second, or by a tenth of itself if that is more."""

TOLERATED: Final = 0.25
"""Share of the last requests that may be refused before the rate is halved: a store that refuses a few at any rate
would otherwise be read ten times slower."""

CUT: Final = 0.75
"""While the rate is limited, a refusal lowers it by `CUT` times the share of refused requests. With this value the rate
still grows where one request in ten is refused, and stays where it is with one in eight."""

_LAST: Final = 100  # number of last requests that the share is computed over
_FEWEST: Final = 32  # smallest divisor of the share, so that the first few refusals are not a large share

PAUSE: Final = 1.0
"""Seconds without requests after many were refused: stores count requests over about a second. Without the pause, most
requests of many processes are refused (``python -m bench stores`` counts them)."""

LONGEST: Final = 60.0
"""Longest pause in seconds that is kept when a store asks for one."""

_WINDOW: Final = 1.0  # seconds over which requests are counted


class Rate:
    """Limits the rate of one process's requests to one store. Thread-safe.

    `clock`: returns the time in seconds. Attributes: `limit`, None without one; `answered`, time of the last answer.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self.limit: float | None = None  # in requests a second
        self._begun: deque[float] = deque()
        self._refused: deque[bool] = deque(maxlen=_LAST)  # whether each of the last requests was refused
        self._next = self._lowered = self.answered = clock()

    def delay(self) -> float:
        """Schedule the next request; return after how many seconds it may begin."""
        with self._lock:
            now = self._clock()
            start = now if self.limit is None else max(now, self._next)
            if self.limit is not None:
                self._next = start + 1 / self.limit
            self._begun.append(start)
            while self._begun[0] < now - _WINDOW:
                self._begun.popleft()
            return start - now

    def refuse(self, begun: float, wait: float = 0.0) -> bool:
        """Count a refused request; return whether all requests pause now.

        `begun`: when the request began, in seconds of `clock`. `wait`: pause in seconds that the store asks for; only
        `LONGEST` of it is kept.
        """
        with self._lock:
            now = self._clock()
            # Requests that began before the rate was lowered say nothing about the new one.
            if self.limit is not None and begun < self._lowered:
                return now < self._lowered
            self._refused.append(True)
            share = sum(self._refused) / max(len(self._refused), _FEWEST)
            recent = sum(now - _WINDOW <= start <= now for start in self._begun) / _WINDOW
            if share <= TOLERATED and not wait:
                if self.limit is not None and now > self._lowered + _WINDOW:
                    self.limit, self._lowered = max(LEAST, min(recent, self.limit) * (1 - CUT * share)), now
                return False
            self.limit = max(LEAST, min(recent, self.limit or recent) / 2)
            self._lowered = now + max(PAUSE, min(wait, LONGEST))
            self._next = self._lowered + 1 / self.limit
            self._refused.clear()
            return True

    def answer(self) -> None:
        """Count a request that was answered, and raise the limit."""
        with self._lock:
            self.answered = self._clock()
            self._refused.append(False)
            if self.limit is not None:
                # At the limit answers arrive every 1 / limit seconds: each adds its part of the growth per second.
                self.limit += max(GROWTH, self.limit / 10) / self.limit
                # A limit far above the actual rate of requests has no effect: remove it.
                is_settled = self.answered > self._lowered + 2 * _WINDOW
                if is_settled and self.limit > 2 * max(LEAST, len(self._begun) / _WINDOW):
                    self.limit = None


T = TypeVar("T")

_ending = threading.Event()
# Such functions run in reverse order, so this one runs before `concurrent.futures` joins its threads, which it does
# even for daemon threads: pending requests then give up, instead of delaying the exit until their last retry.
threading._register_atexit(_ending.set)  # type: ignore[attr-defined]


def pause(seconds: float) -> bool:
    """Sleep and return True; if the program exits meanwhile, return False at once."""
    return seconds <= 0 or not _ending.wait(seconds)


FIRST_SECONDS: Final = 15.0
"""Seconds to retry before the first response: a storage that never responded more likely has a wrong address."""

FIRST_PAUSE: Final = 0.1
LONGEST_PAUSE: Final = 10.0
"""Pauses in seconds between attempts: they double from the first to the longest, and each is shortened at random by up
to half (jitter)."""

LONGEST_REFUSED_PAUSE: Final = 1.0
"""Longest pause in seconds after a refusal for too many requests: short, because the rate is lowered as well."""

_TRIES_TO_REPORT: Final = 3  # failures are logged as warnings from this attempt on

log = logging.getLogger(__name__)

_jitter = random.SystemRandom()  # does not touch the state of the user's `random`


# The rate of each scheme and host or bucket: a store counts the requests to all folders together.
_rates: dict[str, Rate] = {}

# PID of the process that made the first request. A client's threads do not survive a fork, so a child would hang.
_process: int | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a request failed."""

    reason: str
    transient: bool = False  # whether a retry may succeed
    refused: bool = False  # whether the store refused it because of too many requests
    wait: float = 0.0  # pause in seconds that the store asks for; 0 if it asks for none


class Client(ABC):
    """Makes requests to a folder of a store, with retries."""

    def __init__(self, url: str, options: RemoteOptions) -> None:
        self.url, self.options = url.rstrip("/"), options
        self.rate = _rates.setdefault("/".join(self.url.split("/", 3)[:3]), Rate())
        self._answered = False

    @abstractmethod
    def _explain(self, error: Exception) -> Failure:
        """Return why a request failed and whether to retry it; raise `error` if it is not an error of a request."""

    @abstractmethod
    def _translated(self, error: Exception, file: str, tries: int = 1, seconds: float = 0.0) -> FastvidError:
        """Return the error to raise for a failed request, after `tries` attempts in `seconds`."""

    @abstractmethod
    def _current(self, name: str) -> Version:
        """Return the current version of `name`; raise StorageError if the file does not exist."""

    def file(self, name: str) -> str:
        """Return the URL of `name`."""
        return f"{self.url}/{name}"

    def head(self, name: str) -> Version | None:
        """Return the current version of `name`, or None if the file does not exist."""
        with MissingIgnored():
            return self._current(name)
        return None

    def _call(self, name: str, call: Callable[[], T]) -> T:
        """Make a request; retry it for up to `patience_seconds` while a retry may succeed."""
        global _process
        if _process not in (None, os.getpid()):
            raise StorageError(
                "remote storage was used before this process was forked",
                file=self.file(name),
                hint="start worker processes with the spawn or forkserver method",
            )
        _process, file = os.getpid(), self.file(name)
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
                    # While the store answers other requests, it works: do not count that time as an outage.
                    since = max(start, self.rate.answered)
                    wait = 0.0 if self.rate.refuse(begun, failure.wait) else min(wait, LONGEST_REFUSED_PAUSE)
                patience = self.options.patience_seconds
                if not self._answered:
                    patience = min(patience, FIRST_SECONDS)
                spent = time.monotonic() - since
                if not failure.transient or spent + wait > patience:
                    raise self._translated(error, file, tries, spent) from error
                say = log.warning if tries >= _TRIES_TO_REPORT else log.info
                say("attempt %d at %s failed, retrying in %.1f s: %s", tries, file, wait, failure.reason)
                if not pause(wait):
                    raise self._translated(error, file, tries, spent) from error
            else:
                self._answered = True
                self.rate.answer()
                return result


class MissingIgnored:
    """Ends a ``with`` block without an error if the file that it requests does not exist."""

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> bool:
        return isinstance(error, StorageError) and is_missing(error)
