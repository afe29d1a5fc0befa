"""Repeats requests that fail for a while, at the rate that the store takes."""

from __future__ import annotations

import logging
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar

from fastvid.errors import FastvidError, StorageError, UnavailableError
from fastvid.storage.options import RemoteOptions
from fastvid.storage.pool import pause
from fastvid.storage.rate import Rate
from fastvid.storage.traffic import TRAFFIC

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

T = TypeVar("T")

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
                    self.rate.refuse(begun, failure.wait)
                    # While the store answers others, this request only has to wait for its turn.
                    wait, since = min(wait, LONGEST_REFUSED_PAUSE), max(start, self.rate.answered)
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
