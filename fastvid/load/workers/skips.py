"""What becomes of clips that fail: an error, or a row that is masked, counted by reason and bounded by a rate."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Final, Literal, get_args

from fastvid.errors import FastvidError, UsageError
from fastvid.load.workers.stats import Counters
from fastvid.runtime.checks import check_choice

_log = logging.getLogger(__name__)

OnError = Literal["raise", "skip"]
Workers = Literal["thread", "process"]

SKIP_SLACK: Final = 5
"""Skipped clips that are forgiven on top of the allowed rate, so that two bad clips among the first ten do not end a
run. At half the allowed rate of 1 %, chance exceeds rate plus slack in fewer than one run in a thousand."""


class Skips:
    """A loader's rule for clips that fail.

    Args:
        on_error: "raise" or "skip".
        max_rate: Share of clips that may be skipped, 0 to 1.

    Raises:
        UsageError: An argument is out of range.
    """

    def __init__(self, on_error: OnError, max_rate: float) -> None:
        check_choice("on_error", on_error, get_args(OnError))
        if not 0 <= max_rate <= 1:
            raise UsageError(f"max_skip_rate is {max_rate}, expected 0 to 1")
        self._on_error, self._max_rate = on_error, max_rate

    def take(
        self, errors: Mapping[int, Exception], rows: int, step: Counters, total: Counters, views: int = 1
    ) -> dict[int, Exception]:
        """Counts the clips of a batch that failed.

        Args:
            errors: By row of the canvas, see `fastvid.load.batch.canvas`.
            rows: Rows of the batch.
            step: Where this batch is counted.
            total: All batches before.
            views: Rows of the canvas for each row of each stream.

        Returns:
            The first error of each row that is masked.

        Raises:
            FastvidError: Errors are raised, or too many clips were skipped.
            Exception: The fault is not a clip's.
        """
        first: dict[int, Exception] = {}
        for row in sorted(errors):
            # A clip of which one stream or view fails fails as a whole.
            first.setdefault(row // views % rows, errors[row])
        for error in first.values():
            # What is wrong with the caller's arguments or with fastvid is no fault of the clip.
            if self._on_error == "raise" or isinstance(error, UsageError) or not isinstance(error, FastvidError):
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
                f"{skipped} of {seen} clips had to be skipped ({reasons}),"
                f" more than max_skip_rate={self._max_rate} allows",
                hint="`fastvid verify` finds what is damaged; where= leaves it out",
            ) from errors[max(errors)]
