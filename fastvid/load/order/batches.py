"""Split an epoch into global batches, and each global batch into one share per rank. Pure arithmetic.

A global batch is a range of positions of the epoch's order. It does not depend on the world size, so ranks may join and
leave between batches, and the batch size may change at any position.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

import numpy as np

from fastvid.errors import StateError, UsageError
from fastvid.load.order.epoch import EpochOrder
from fastvid.runtime.arrays import IntArray
from fastvid.runtime.checks import check_choice, check_integer
from fastvid.runtime.world import World

Last = Literal["drop", "mask", "keep"]

MASKED = -1
"""Position of a row without a sample."""

ClipShape = tuple[int, int, int]
"""Frames, height and width of a clip."""


def rank_slice(batch: int, rank: int, world: int, group: int = 1) -> tuple[int, int]:
    """Return the rows [start, stop) of a global batch that belong to a rank.

    The slices of all ranks cover the batch in rank order, and their sizes differ by at most one group of rows.
    """
    groups = batch // group
    return rank * groups // world * group, (rank + 1) * groups // world * group


def rank_rows(rows: int, samples: int, world: World, group: int = 1) -> IntArray:
    """Return which samples of a global batch a rank gets.

    `rows`: rows of the global batch over all ranks. `samples`: samples in it, at most `rows`; the rows after them
    are masked. `group`: consecutive rows that stay on one rank. Returns numbers of the samples within the batch,
    int64 [b], b >= 1; MASKED for a row without a sample.
    """
    first, end = rank_slice(rows, world.rank, world.size, group)
    # An empty share gets one group of masked rows, which must not be those of the next rank.
    numbers = np.arange(first, max(end, first + group), dtype=np.int64)
    numbers[(numbers >= samples) | (numbers >= end)] = MASKED
    return numbers


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """One rank's rows of one global batch."""

    start: int
    stop: int
    # positions of this rank's rows in the epoch's order, int64 [b], b >= 1; MASKED for a row without a sample.
    # Those of a planned batch are not consecutive.
    positions: IntArray
    shape: ClipShape | None = None  # shape that all rows of the global batch get; None if sampler and crop decide it
    # first row of each of this rank's bins, and the number of rows, int64 [n + 1]; None if rows are not packed.
    bins: IntArray | None = None

    @property
    def weight(self) -> float:
        """Weight of each sample; the weights of all ranks add up to one."""
        return 1.0 / (self.stop - self.start)


class EpochBatches(Protocol):
    """The batches of one epoch. A position counts the samples of the epoch in the order of delivery."""

    @property
    def num_samples(self) -> int:
        """Samples per epoch."""
        ...

    def count(self, position: int, /) -> int:
        """Return the number of batches from `position` to the end of the epoch."""
        ...

    def is_over(self, position: int, /) -> bool:
        """Return whether no batch follows `position`; may cost much less than `count`."""
        ...

    def shares(self, position: int, /) -> Iterator[Share]:
        """Yield this rank's rows of each global batch from `position` to the end of the epoch, computed lazily."""
        ...


class Batching(Protocol):
    """How the epochs of a dataset are divided into batches, as one rank sees them."""

    @property
    def text(self) -> str:
        """Everything that determines the batches besides the order, for the loader's fingerprint; "" if a state may
        continue with other batches."""
        ...

    def epoch(self, order: EpochOrder, /) -> EpochBatches:
        """Return the batches of an epoch."""
        ...


@dataclass(frozen=True, slots=True)
class Batches:
    """The batches of an epoch: ranges of its order. Any position may begin a batch."""

    num_samples: int  # samples per epoch
    size: int  # samples per global batch
    # how to treat the remaining samples at the end of the epoch: "drop" discards them; "mask" pads the batch with
    # masked rows, so that every batch has the same shape; "keep" makes a smaller batch in which every rank has at
    # least one row, masked if there are fewer samples than ranks, or `clips_per_video` of them.
    last: Last
    world: World
    group: int = 1  # consecutive rows that stay on one rank; must divide `size`, and above 1 requires last="drop"
    clips_per_video: int = 1

    def __post_init__(self) -> None:
        check_choice("last", self.last, get_args(Last))
        for name, field in (("global_batch_size", "size"), ("group_size", "group")):
            object.__setattr__(self, field, check_integer(name, getattr(self, field), 1))
        if self.size % self.group or (self.group > 1 and self.last != "drop"):
            raise UsageError(
                f"group_size is {self.group} with global_batch_size {self.size} and last={self.last!r}",
                hint="choose a group_size that divides global_batch_size, and last='drop' if it is above 1",
            )
        if self.size % self.unit:
            raise UsageError(
                f"global_batch_size is {self.size} with group_size={self.group} and"
                f" clips_per_video={self.clips_per_video}",
                hint=f"choose a multiple of {self.unit}: global_batch_size counts clips",
            )
        if self.size // self.unit < self.world.size:
            groups = f" in groups of {self.unit}" if self.unit > 1 else ""
            raise UsageError(
                f"global_batch_size {self.size}{groups} is smaller than the world of {self.world.size}",
                hint=f"give every rank at least one {'clip' if self.unit == 1 else 'group'} of each batch",
            )
        if not self.count(0):
            raise UsageError(
                f"{self.num_samples} samples do not fill one batch of {self.size} with last='drop'",
                hint="use a smaller global_batch_size, or last='mask'",
            )

    @property
    def unit(self) -> int:
        """Consecutive rows that stay on one rank: whole groups of whole videos."""
        return math.lcm(self.group, self.clips_per_video)

    @property
    def text(self) -> str:
        """See `Batching`."""
        return ""

    def epoch(self, _order: EpochOrder, /) -> Batches:
        """See `Batching`: all epochs have the same batches."""
        return self

    def count(self, position: int) -> int:
        """Return the number of batches from `position` to the end of the epoch."""
        if position % self.clips_per_video:
            raise StateError(
                f"position {position} is between the {self.clips_per_video} clips of a video",
                hint="resume from a state_dict() of a loader, which is always between two batches",
            )
        left = max(0, self.num_samples - position)
        return left // self.size if self.last == "drop" else -(-left // self.size)

    def is_over(self, position: int) -> bool:
        """See `EpochBatches`."""
        return not self.count(position)

    def shares(self, position: int) -> Iterator[Share]:
        """See `EpochBatches`."""
        return (self.share(position + number * self.size) for number in range(self.count(position)))

    def share(self, position: int) -> Share:
        """Return this rank's rows of the global batch that starts at `position`, which must be inside the epoch."""
        stop = min(position + self.size, self.num_samples)
        assert 0 <= position < stop, position
        samples = stop - position
        numbers = rank_rows(samples if self.last == "keep" else self.size, samples, self.world, self.unit)
        return Share(position, stop, np.where(numbers == MASKED, MASKED, position + numbers))
