"""Handles failed clips: raises their error, or masks and counts them up to a maximum rate."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Final, Literal, get_args

from fastvid.errors import FastvidError, UnavailableError, UsageError
from fastvid.load.workers.stats import Counters
from fastvid.runtime.checks import check_choice

_log = logging.getLogger(__name__)

OnError = Literal["raise", "skip"]
Workers = Literal["thread", "process"]

SKIP_SLACK: Final = 5
"""Skipped clips tolerated beyond the allowed rate, so that two bad clips among the first ten do not end a run. If clips
fail at half an allowed rate of 1 %, chance exceeds rate plus slack in fewer than one run in a thousand."""


class Skips:
    """A loader's policy for failed clips.

    Args:
        on_error: "raise" or "skip".
        max_rate: Maximum fraction of skipped clips, 0 to 1.

    Raises:
        UsageError: If an argument is out of range.
    """

    def __init__(self, on_error: OnError, max_rate: float) -> None:
        check_choice("on_error", on_error, get_args(OnError))
        if not 0 <= max_rate <= 1:
            raise UsageError(f"max_skip_rate is {max_rate}, expected 0 to 1")
        self._on_error, self._max_rate = on_error, max_rate

    def take(
        self, errors: Mapping[int, Exception], rows: int, step: Counters, total: Counters, views: int = 1
    ) -> dict[int, Exception]:
        """Count the failed clips of a batch.

        Args:
            errors: By row of the canvas, see `fastvid.load.batch.canvas`.
            rows: Rows of the batch.
            step: Counters of this batch; updated.
            total: Counters of all batches before.
            views: Canvas rows for each row of each stream.

        Returns:
            The first error of each masked row.

        Raises:
            FastvidError: If errors are raised, or too many clips were skipped.
            Exception: If the error is not the clip's fault.
        """
        first: dict[int, Exception] = {}
        for row in sorted(errors):
            # If one stream or view of a clip fails, the whole clip fails.
            first.setdefault(row // views % rows, errors[row])
        for error in first.values():
            # Wrong arguments, a store that fails or refuses, and bugs in fastvid are not the clip's fault.
            own = isinstance(error, FastvidError) and not isinstance(error, UsageError | UnavailableError)
            if self._on_error == "raise" or not own:
                raise error
            step.skips[type(error).__name__] += 1
            _log.warning("clip skipped: %s", error)
        step.clips -= len(first)
        if first:
            self._check(first, step, total)
        return first

    def _check(self, errors: Mapping[int, Exception], step: Counters, total: Counters) -> None:
        skips = total.skips + step.skips
        skipped = skips.total()
        seen = total.clips + step.clips + skipped
        if skipped > SKIP_SLACK + self._max_rate * seen:
            reasons = ", ".join(f"{count} {reason}" for reason, count in skips.most_common())
            raise FastvidError(
                f"{skipped} of {seen} clips were skipped ({reasons}), more than max_skip_rate={self._max_rate} allows",
                hint="run `fastvid verify` to find damaged samples and exclude them with where=",
            ) from errors[max(errors)]
