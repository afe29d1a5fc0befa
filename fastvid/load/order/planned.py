"""What the planned batches of an epoch have in common, whatever decides their shapes.

A plan puts the positions of the epoch's order into an order of its own, the planned order, in which `position` of a
loader's state counts. Samples that no batch can contain come first in it, samples that last="drop" discards come last,
so `stop - start` of a batch is the number of its samples.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

import numpy as np

from fastvid.errors import StateError, UsageError
from fastvid.load.order.sizes import ClipSizes, Unfit, report_unfit
from fastvid.runtime.arrays import BoolArray, IntArray

_log = logging.getLogger(__name__)

PLAN_VERSION: Final = "fastvid-plan-1"
"""Part of a loader's fingerprint; must change when Buckets or Packed plan other batches from the same facts."""


def check_fit(fits: BoolArray, sizes: ClipSizes, unfit: Unfit, what: str, key: Callable[[int], str], hint: str) -> None:
    """Log samples that no batch can contain, or raise.

    `fits`: whether each sample fits, bool [N]. `what`: what is wrong with the samples.
    """
    found = np.flatnonzero(~fits)
    if not len(found):
        return
    text = report_unfit(found, len(sizes), what, lambda sample: f"{key(sample)} ({sizes.describe(sample)})")
    if unfit == "raise" or len(found) == len(sizes):
        raise UsageError(text, hint=hint)
    _log.warning("%s; they are skipped in every epoch", text)


def check_boundary(position: int, starts: IntArray, stops: IntArray) -> int:
    """Return the number of the batch that follows `position`, `len(starts)` if none does.

    `position`: samples delivered. `starts`: first position of each batch, int64 [S], ascending. `stops`: one past
    the last position of each batch, int64 [S].
    """
    number = int(np.searchsorted(starts, position))
    if number and stops[number - 1] > position:
        raise StateError(
            f"position {position} is inside the batch of positions {starts[number - 1]} to {stops[number - 1] - 1}",
            hint="resume from a state_dict() of a loader with the same batches=, which is always between two batches",
        )
    return number
