"""The sample order of an epoch: a keyed permutation that is computed, not stored.

Any position can be computed independently in constant memory, so a loader's whole state is one position, and all ranks
compute the same order without communication.

Above 65,536 samples a balanced Feistel network with six rounds permutes the smallest power of four that is at least the
number of samples, and results out of range are permuted again (cycle walking; fewer than four times on average). A
Feistel network reaches few of the permutations of a small set, so up to 65,536 samples are sorted by a keyed hash
instead.
"""

from __future__ import annotations

import hashlib
import struct
from typing import Final

import numpy as np
import numpy.typing as npt

from fastvid.errors import UsageError
from fastvid.load.order.hashes import GOLDEN, mix32, mix64
from fastvid.runtime.arrays import IntArray, UInt64Array

ORDER_VERSION: Final = "fastvid-order-1"
"""Part of the key; must change when the algorithm changes, so that states of the old one are refused."""

ROUNDS: Final = 6
"""Feistel rounds; four are visibly biased in small domains (chi-squared over permutations), six are not from 65,537."""

SORTED_LIMIT: Final = 65_536
"""Largest set that is sorted by hash; its order takes half a megabyte during the epoch."""


class Order:
    """The order in which one epoch visits the samples.

    `num_samples`: samples in the epoch, >= 0. `shuffle`: false visits the samples in dataset order.
    """

    __slots__ = ("_half", "_keys", "_sorted", "epoch", "num_samples", "seed", "shuffle")

    def __init__(self, num_samples: int, seed: int = 0, epoch: int = 0, *, shuffle: bool = True) -> None:
        for name, value, limit in (("num_samples", num_samples, 2**62), ("seed", seed, 2**64), ("epoch", epoch, 2**64)):
            if not 0 <= value < limit:
                raise UsageError(f"{name} is {value}, expected 0 <= {name} < 2**{limit.bit_length() - 1}")
        self.num_samples, self.seed, self.epoch, self.shuffle = num_samples, seed, epoch, shuffle
        # The size is part of the key: a set that grows by one sample gets a very different order.
        text = struct.pack("<QQQ", seed, epoch, num_samples) + ORDER_VERSION.encode()
        digest = hashlib.blake2b(text, digest_size=4 * ROUNDS + 8).digest()
        self._keys = np.frombuffer(digest, "<u4", count=ROUNDS).astype(np.uint32)
        self._half = max(1, ((num_samples - 1).bit_length() + 1) // 2) if num_samples else 1
        self._sorted: IntArray | None = None
        if shuffle and num_samples <= SORTED_LIMIT:
            start = np.frombuffer(digest, "<u8", count=1, offset=4 * ROUNDS).astype(np.uint64)
            steps = np.arange(1, num_samples + 1, dtype=np.uint64) * np.uint64(GOLDEN)
            self._sorted = np.argsort(mix64(steps + start), kind="stable").astype(np.int64)

    def __repr__(self) -> str:
        return f"Order({self.num_samples}, seed={self.seed}, epoch={self.epoch}, shuffle={self.shuffle})"

    def ids(self, positions: npt.ArrayLike) -> IntArray:
        """Return the samples at these positions of the epoch.

        `positions`: integers, 0 <= p < num_samples, any order, int64 [N]. Returns rows of the dataset, int64
        [N]. Over all positions each row occurs exactly once.
        """
        wanted = np.atleast_1d(np.asarray(positions, dtype=np.int64))
        if len(wanted) and (wanted.min() < 0 or wanted.max() >= self.num_samples):
            outside = wanted.min() if wanted.min() < 0 else wanted.max()
            raise UsageError(f"position {outside} is outside an epoch of {self.num_samples} samples")
        if not self.shuffle:
            return wanted.copy()
        if self._sorted is not None:
            return self._sorted[wanted]
        ids = self._feistel(wanted.astype(np.uint64))
        lanes = np.flatnonzero(ids >= self.num_samples)
        while len(lanes):
            ids[lanes] = self._feistel(ids[lanes])
            lanes = lanes[ids[lanes] >= self.num_samples]
        return ids.astype(np.int64)

    def _feistel(self, words: UInt64Array) -> UInt64Array:
        half = np.uint64(self._half)
        mask = np.uint32((1 << self._half) - 1)
        left, right = (words >> half).astype(np.uint32), words.astype(np.uint32) & mask
        for key in self._keys:
            left, right = right, left ^ (mix32(right ^ key) & mask)
        return (left.astype(np.uint64) << half) | right.astype(np.uint64)
