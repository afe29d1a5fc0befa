"""Orders that give each group of samples a share: datasets of a mixture, classes of a balanced epoch.

The shares of an epoch are exact: every group gets its number of positions, and which position goes to which group is a
keyed permutation. A group that gets more positions than it has samples gives every sample again before any a third
time; one that gets fewer goes on in the next epoch where this one stopped. So a group is always passed through in
whole laps, each in an order of its own, and nothing has to be remembered: which lap and which place in it follows from
the epoch and the position.
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
"""Part of the key and of a loader's fingerprint: another algorithm gets another name."""

_TAG: Final = int.from_bytes(b"grouped1", "little")


class Members(Protocol):
    """Which sample is number `indices[i]` of group `groups[i]`."""

    def __call__(self, groups: IntArray, indices: IntArray, /) -> IntArray:
        """Samples, int64 [N]."""
        ...


class GroupedOrder:
    """The order of one epoch over groups with fixed shares.

    Args:
        sizes: Samples of each group, >= 1.
        counts: Positions that each group gets in an epoch, >= 0.
        members: From group and number in the group to the sample.
        seed: 0 <= seed < 2**64.
        epoch: 0 <= epoch < 2**64.
    """

    def __init__(self, sizes: Sequence[int], counts: Sequence[int], members: Members, seed: int, epoch: int) -> None:
        self.seed, self.epoch = seed, epoch
        self._members = members
        self._places = Order(sum(counts), seed, epoch)
        self._sizes = np.asarray(sizes, dtype=np.int64)
        self._ends = np.cumsum(np.asarray(counts, dtype=np.int64))
        self._starts = np.concatenate([np.zeros(1, dtype=np.int64), self._ends[:-1]])
        # Python's integers, because an epoch times a count may leave 64 bits.
        begun = [divmod(epoch * count, size) for count, size in zip(counts, sizes, strict=True)]
        self._laps = np.asarray([lap & MASK64 for lap, _ in begun], dtype=np.uint64)
        self._offsets = np.asarray([offset for _, offset in begun], dtype=np.int64)
        self._halves = np.asarray([max(1, ((size - 1).bit_length() + 1) // 2) for size in sizes], dtype=np.uint64)
        state = mix64_int((seed + _TAG) & MASK64)
        groups = np.arange(1, len(sizes) + 1, dtype=np.uint64) * np.uint64(GOLDEN)
        self._states = mix64(groups + np.uint64(state))

    @property
    def num_samples(self) -> int:
        """Positions of the epoch."""
        return self._places.num_samples

    def ids(self, positions: npt.ArrayLike) -> IntArray:
        """The samples at some positions, int64 [N]; see `Order.ids`."""
        slots = self._places.ids(positions)
        groups = np.searchsorted(self._ends, slots, side="right")
        sizes = self._sizes[groups]
        more, indices = np.divmod(self._offsets[groups] + slots - self._starts[groups], sizes)
        laps = self._laps[groups] + more.astype(np.uint64)
        return self._members(groups, self._permuted(groups, laps, indices, sizes))

    def _permuted(self, groups: IntArray, laps: UInt64Array, indices: IntArray, sizes: IntArray) -> IntArray:
        """Place `indices` of each lap's own order: the network of `Order` with keys by lane."""
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
    """`total` positions by weight, whole numbers that add up to it (largest remainders, the first group at a tie).

    Args:
        total: Positions, >= 0.
        weights: Not negative, at least one positive.
    """
    whole = sum(weights)
    shares = [total * weight / whole for weight in weights]
    counts = [int(share) for share in shares]
    # Rounding may leave more than the number of groups only where floats are coarser than one position.
    order = sorted(range(len(shares)), key=lambda group: (counts[group] - shares[group], group))
    for turn in range(total - sum(counts)):
        counts[order[turn % len(order)]] += 1
    return counts
