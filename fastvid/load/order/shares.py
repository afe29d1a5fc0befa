"""Orders in which each group of samples gets a fixed share: datasets of a mixture, classes of a balanced epoch.

Shares are exact in every epoch: each group gets its number of positions, and a keyed permutation assigns positions to
groups. A group with more positions than samples visits every sample a second time before any a third time; a group
with fewer continues in the next epoch where it stopped. So each group is visited in whole laps, each lap in its own
order. No state is needed: the lap and the index in it follow from the epoch and the position.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from fastvid.load.order.hashes import GOLDEN, MASK64, mix32, mix64, mix64_int
from fastvid.load.order.permutation import ROUNDS, Order
from fastvid.runtime.arrays import IntArray, UInt64Array

GROUPED_VERSION: Final = "fastvid-grouped-1"
"""Part of a loader's fingerprint; must change when the algorithm changes."""

_TAG: Final = int.from_bytes(b"grouped1", "little")


class Members(Protocol):
    """Maps (group, index in the group) to a sample."""

    def __call__(self, groups: IntArray, indices: IntArray, /) -> IntArray:
        """Return the samples, int64 [N]."""
        ...


class GroupedOrder:
    """The order of one epoch over groups with fixed shares.

    `sizes`: samples in each group, >= 1.
    """

    def __init__(self, sizes: Sequence[int], counts: Sequence[int], members: Members, seed: int, epoch: int) -> None:
        self.seed, self.epoch = seed, epoch
        self._members = members
        self._places = Order(sum(counts), seed, epoch)
        self._sizes = np.asarray(sizes, dtype=np.int64)
        self._ends = np.cumsum(np.asarray(counts, dtype=np.int64))
        self._starts = np.concatenate([np.zeros(1, dtype=np.int64), self._ends[:-1]])
        # Python integers, because epoch * count may overflow 64 bits.
        begun = [divmod(epoch * count, size) for count, size in zip(counts, sizes, strict=True)]
        self._laps = np.asarray([lap & MASK64 for lap, _ in begun], dtype=np.uint64)
        self._offsets = np.asarray([offset for _, offset in begun], dtype=np.int64)
        self._halves = np.asarray([max(1, ((size - 1).bit_length() + 1) // 2) for size in sizes], dtype=np.uint64)
        state = mix64_int((seed + _TAG) & MASK64)
        groups = np.arange(1, len(sizes) + 1, dtype=np.uint64) * np.uint64(GOLDEN)
        self._states = mix64(groups + np.uint64(state))

    @property
    def num_samples(self) -> int:
        """Number of positions in the epoch."""
        return self._places.num_samples

    def ids(self, positions: npt.ArrayLike) -> IntArray:
        """Return the samples at these positions, int64 [N]; see `Order.ids`."""
        slots = self._places.ids(positions)
        groups = np.searchsorted(self._ends, slots, side="right")
        sizes = self._sizes[groups]
        more, indices = np.divmod(self._offsets[groups] + slots - self._starts[groups], sizes)
        laps = self._laps[groups] + more.astype(np.uint64)
        return self._members(groups, self._permuted(groups, laps, indices, sizes))

    def _permuted(self, groups: IntArray, laps: UInt64Array, indices: IntArray, sizes: IntArray) -> IntArray:
        """Permute `indices` within each lap: the Feistel network of `Order`, with separate keys for each element."""
        words = [mix64(mix64(self._states[groups] ^ laps) + np.uint64((n * GOLDEN) & MASK64)) for n in (1, 2, 3)]
        keys = [(word >> np.uint64(shift)).astype(np.uint32) for word in words for shift in (0, 32)]
        assert len(keys) == ROUNDS
        halves = self._halves[groups]
        found = indices.astype(np.uint64)
        lanes = np.arange(len(found))
        while len(lanes):
            half = halves[lanes]
            mask = ((np.uint64(1) << half) - np.uint64(1)).astype(np.uint32)
            left, right = (found[lanes] >> half).astype(np.uint32), found[lanes].astype(np.uint32) & mask
            for key in keys:
                left, right = right, left ^ (mix32(right ^ key[lanes]) & mask)
            found[lanes] = (left.astype(np.uint64) << half) | right.astype(np.uint64)
            lanes = lanes[found[lanes] >= sizes[lanes].astype(np.uint64)]
        return found.astype(np.int64)


def apportion(total: int, weights: Sequence[float]) -> list[int]:
    """Divide `total` positions in proportion to the weights, by largest remainders (ties go to the first group).

    `weights`: non-negative, at least one positive. Returns integers that add up to `total`.
    """
    whole = sum(weights)
    shares = [total * weight / whole for weight in weights]
    counts = [int(share) for share in shares]
    # More positions than groups can remain only where floats are coarser than one position.
    order = sorted(range(len(shares)), key=lambda group: (counts[group] - shares[group], group))
    for turn in range(total - sum(counts)):
        counts[order[turn % len(order)]] += 1
    return counts
