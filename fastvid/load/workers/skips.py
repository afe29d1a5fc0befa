"""Handles failed clips: raises their error, or masks and counts them up to a maximum rate."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Final

from fastvid.errors import FastvidError, UnavailableError, UsageError
from fastvid.load.options import OnError, Skip
from fastvid.load.workers.stats import Counters

_log = logging.getLogger(__name__)

SKIP_SLACK: Final = 5
"""Skipped clips tolerated beyond the allowed rate, so that two bad clips among the first ten do not end a run. If clips
fail at half an allowed rate of 1 %, chance exceeds rate plus slack in fewer than one run in a thousand."""


class Skips:
    """A loader's policy for failed clips."""

    def __init__(self, on_error: OnError) -> None:
        if on_error != "raise" and not isinstance(on_error, Skip):
            raise UsageError(f"on_error is {on_error!r}", hint="use 'raise' or Skip(max_rate)")
        self._skip = None if on_error == "raise" else on_error

    def take(
        self, errors: Mapping[int, Exception], rows: int, step: Counters, total: Counters, views: int = 1
    ) -> dict[int, Exception]:
        """Count the failed clips of a batch.

        `errors`: by row of the canvas, see `fastvid.load.batch.canvas`. `rows`: rows of the batch. `views`:
        canvas rows for each row of each stream. Returns the first error of each masked row.
        """
        first: dict[int, Exception] = {}
        for row in sorted(errors):
            # If one stream or view of a clip fails, the whole clip fails.
            first.setdefault(row // views % rows, errors[row])
        for error in first.values():
            # Wrong arguments, a store that fails or refuses, and bugs in fastvid are not the clip's fault.
            own = isinstance(error, FastvidError) and not isinstance(error, UsageError | UnavailableError)
            if self._skip is None or not own:
                raise error
            step.skips[type(error).__name__] += 1
            _log.warning("clip skipped: %s", error)
        step.clips -= len(first)
        if first:
            assert self._skip is not None
            _check(self._skip.max_rate, first, step, total)
        return first


def _check(max_rate: float, errors: Mapping[int, Exception], step: Counters, total: Counters) -> None:
    skips = total.skips + step.skips
    skipped = skips.total()
    seen = total.clips + step.clips + skipped
    if skipped > SKIP_SLACK + max_rate * seen:
        reasons = ", ".join(f"{count} {reason}" for reason, count in skips.most_common())
        raise FastvidError(
            f"{skipped} of {seen} clips were skipped ({reasons}), more than on_error=Skip({max_rate}) allows",
            hint="run `fastvid verify` to find damaged samples and exclude them with where=",
        ) from errors[max(errors)]
