"""Block shuffle: shuffle the shards, then the samples within windows, for storage with slow random reads.

The shards are put in a keyed random order, their samples are laid out one after the other and cut into windows, and
each window is shuffled with its own key. A reader touches only the shards of one window at a time, and any position
can still be computed independently.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from fastvid.errors import UsageError
from fastvid.load.order.hashes import MASK64, mix64_int
from fastvid.load.order.permutation import Order
from fastvid.runtime.arrays import IntArray

BLOCKS_VERSION: Final = "fastvid-blocks-1"
"""Part of a loader's fingerprint; must change when the algorithm changes."""

_SHARDS_TAG: Final = int.from_bytes(b"shards-1", "little")
_WINDOW_TAG: Final = int.from_bytes(b"window-1", "little")

_KEPT_WINDOWS: Final = 4
"""Window orders cached: a batch that straddles two windows needs two, and a planner that looks ahead one more."""


@dataclass(frozen=True)
class BlockShuffle:
    """Shuffle shards, then the samples within windows.

    Args:
        window: Samples per window; the order is uniform within a window. Several shards' worth mix well: with windows
            of ten shards a batch comes from ten shards. Memory is 8 bytes per sample of the window, at most half a
            megabyte.

    Raises:
        UsageError: If `window` is below 1.
    """

    window: int = 16_384

    def __post_init__(self) -> None:
        if self.window < 1:
            raise UsageError(f"window is {self.window}, expected at least 1 sample")


class BlockOrder:
    """Block-shuffled order of one epoch.

    `sizes`: samples in each shard, int64 [S]; samples are numbered through the shards in this order. `window`:
    maximum samples per window; window sizes of an epoch differ by at most one sample.
    """

    def __init__(self, sizes: IntArray, window: int, seed: int, epoch: int) -> None:
        self.seed, self.epoch = seed, epoch
        self.num_samples = int(sizes.sum())
        order = Order(len(sizes), _keyed(seed, _SHARDS_TAG), epoch).ids(np.arange(len(sizes)))
        firsts = np.cumsum(sizes) - sizes
        self._ends = np.cumsum(sizes[order])
        # Sample number minus index in the layout: constant within a shard.
        self._shifts = firsts[order] - (self._ends - sizes[order])
        self._windows = -(-self.num_samples // window)
        self._orders: OrderedDict[int, Order] = OrderedDict()

    def ids(self, positions: npt.ArrayLike) -> IntArray:
        """Return the samples at these positions, int64 [N]; see `Order.ids`."""
        wanted = np.atleast_1d(np.asarray(positions, dtype=np.int64))
        if len(wanted) and (wanted.min() < 0 or wanted.max() >= self.num_samples):
            outside = wanted.min() if wanted.min() < 0 else wanted.max()
            raise UsageError(f"position {outside} is outside an epoch of {self.num_samples} samples")
        # Window w begins at w * N // windows, so position p is in window ((p + 1) * windows - 1) // N.
        windows = ((wanted + 1) * self._windows - 1) // max(1, self.num_samples)
        places = np.empty_like(wanted)
        for window in np.unique(windows).tolist():
            inside = windows == window
            begin = window * self.num_samples // self._windows
            places[inside] = begin + self._order(window).ids(wanted[inside] - begin)
        return places + self._shifts[np.searchsorted(self._ends, places, side="right")]

    def _order(self, window: int) -> Order:
        order = self._orders.pop(window, None)
        if order is None:
            begin, end = (number * self.num_samples // self._windows for number in (window, window + 1))
            order = Order(end - begin, _keyed(_keyed(self.seed, _WINDOW_TAG), window), self.epoch)
        self._orders[window] = order
        while len(self._orders) > _KEPT_WINDOWS:
            self._orders.popitem(last=False)
        return order


def _keyed(seed: int, word: int) -> int:
    return mix64_int(mix64_int(seed) + word & MASK64)
