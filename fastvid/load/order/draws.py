"""The order of an epoch and the random numbers of its clips, by hashing: no state is kept, and each position is
computed on its own. What these functions return must never change.

`Permutation`: a keyed permutation of the samples. A loader's whole state is one position, and all ranks compute the
same order without communication. Above 65,536 samples a balanced Feistel network with six rounds permutes the smallest
power of four that is at least the number of samples, and results out of range are permuted again (cycle walking; fewer
than four times on average). A Feistel network reaches few of the permutations of a small set, so up to 65,536 samples
are sorted by a keyed hash instead.

`Draws`: the random numbers of one clip, each a hash of (seed, epoch, position, purpose, index), so the same for any
world size, batch size, thread and back-end, and after any restart. `BatchDraws` computes the same ones for all clips of
a batch as arrays. Library generators are not used because their algorithms may change between versions.

`GroupedOrder`: each group of samples, a dataset of a mixture or a class, gets a fixed number of positions, and a keyed
permutation assigns positions to groups. A group with more positions than samples visits every sample a second time
before any a third time; a group with fewer continues in the next epoch where it stopped. So each group is visited in
whole laps, each lap in its own order; the lap and the index in it follow from the epoch and the position.
"""

from __future__ import annotations

import hashlib
import struct
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from fastvid.errors import UsageError
from fastvid.format.dataset import Dataset
from fastvid.runtime.arrays import AnyArray, FloatArray, IntArray, UInt32Array, UInt64Array

# 2**64 divided by the golden ratio, odd: the step of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014).
GOLDEN: Final = 0x9E3779B97F4A7C15
MASK64: Final = 2**64 - 1

_S30, _S27, _S31 = np.uint64(30), np.uint64(27), np.uint64(31)
_S11, _S32, _LOW32 = np.uint64(11), np.uint64(32), np.uint64(2**32 - 1)
_S16, _S13 = np.uint32(16), np.uint32(13)


def mix64(words: UInt64Array) -> UInt64Array:
    """Apply SplitMix64's finaliser, a bijection of 64-bit words.

    Source:
        Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014; constants of variant 13 of
        Stafford's "Better bit mixing".

    `words`: uint64, at least one dimension (numpy warns when a scalar overflows, not when an array does).
    """
    words = (words ^ (words >> _S30)) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> _S27)) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> _S31)


def mix64_int(word: int) -> int:
    """Return `mix64` of one Python integer, 0 <= word < 2**64."""
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & MASK64
    return word ^ (word >> 31)


def mix32(words: UInt32Array) -> UInt32Array:
    """Apply MurmurHash3's 32-bit finaliser, a bijection of 32-bit words.

    Source:
        Appleby: MurmurHash3, fmix32.

    `words`: uint32, at least one dimension.
    """
    words = (words ^ (words >> _S16)) * np.uint32(0x85EBCA6B)
    words = (words ^ (words >> _S13)) * np.uint32(0xC2B2AE35)
    return words ^ (words >> _S16)


ORDER_VERSION: Final = "fastvid-order-1"
"""Part of the key; must change when the algorithm changes, so that states of the old one are refused."""

ROUNDS: Final = 6
"""Feistel rounds; four are visibly biased in small domains (chi-squared over permutations), six are not from 65,537."""

SORTED_LIMIT: Final = 65_536
"""Largest set that is sorted by hash; its order takes half a megabyte during the epoch."""


def check_positions(positions: npt.ArrayLike, num_samples: int) -> IntArray:
    """Return positions as int64 [N] after checking that they are inside an epoch."""
    wanted = np.atleast_1d(np.asarray(positions, dtype=np.int64))
    if len(wanted) and (wanted.min() < 0 or wanted.max() >= num_samples):
        outside = wanted.min() if wanted.min() < 0 else wanted.max()
        raise UsageError(f"position {outside} is outside an epoch of {num_samples} samples")
    return wanted


class Permutation:
    """The order in which one epoch visits the samples.

    `num_samples`: samples in the epoch, >= 0. `shuffle`: false visits the samples in dataset order.
    """

    def __init__(self, num_samples: int, seed: int = 0, epoch: int = 0, *, shuffle: bool = True) -> None:
        for name, value, limit in (("num_samples", num_samples, 2**62), ("seed", seed, 2**64), ("epoch", epoch, 2**64)):
            if not 0 <= value < limit:
                raise UsageError(f"{name} is {value}, expected 0 <= {name} < 2**{limit.bit_length() - 1}")
        self.num_samples, self.seed, self.epoch, self.shuffle = num_samples, seed, epoch, shuffle
        # The size is part of the key: a set that grows by one sample gets a very different order.
        text = struct.pack("<QQQ", seed, epoch, num_samples) + ORDER_VERSION.encode()
        digest = hashlib.blake2b(text, digest_size=4 * ROUNDS + 8).digest()
        self._keys = np.frombuffer(digest, "<u4", count=ROUNDS).astype(np.uint32)
        self._sorted: IntArray | None = None
        if shuffle and num_samples <= SORTED_LIMIT:
            start = np.frombuffer(digest, "<u8", count=1, offset=4 * ROUNDS).astype(np.uint64)
            steps = np.arange(1, num_samples + 1, dtype=np.uint64) * np.uint64(GOLDEN)
            self._sorted = np.argsort(mix64(steps + start), kind="stable").astype(np.int64)

    def ids(self, positions: npt.ArrayLike) -> IntArray:
        """Return the samples at these positions of the epoch.

        `positions`: integers, 0 <= p < num_samples, any order, int64 [N]. Returns rows of the dataset, int64
        [N]. Over all positions each row occurs exactly once.
        """
        wanted = check_positions(positions, self.num_samples)
        if not self.shuffle:
            return wanted.copy()
        if self._sorted is not None:
            return self._sorted[wanted]
        size, half = np.uint64(self.num_samples), np.uint64(_half(self.num_samples))
        return _permuted(wanted.astype(np.uint64), size, half, self._keys).astype(np.int64)


def _half(size: int) -> int:
    """Return half the bits, rounded up, of the numbers below `size`."""
    return max(1, ((size - 1).bit_length() + 1) // 2) if size else 1


_Words = UInt64Array | np.uint64


def _permuted(words: UInt64Array, sizes: _Words, halves: _Words, keys: Iterable[Any]) -> UInt64Array:
    """Permute numbers below `sizes` by a Feistel network; results out of range are permuted again.

    `words`: uint64 [N]. `sizes`, `halves`, and uint32 `keys` of each round: one number for all words, or [N].
    """
    masks = ((np.uint64(1) << halves) - np.uint64(1)).astype(np.uint32)
    left, right = (words >> halves).astype(np.uint32), words.astype(np.uint32) & masks
    for key in keys:
        left, right = right, left ^ (mix32(right ^ key) & masks)
    found = (left.astype(np.uint64) << halves) | right.astype(np.uint64)
    outside = np.flatnonzero(found >= sizes)
    if len(outside):
        size, half, *own = (np.broadcast_to(one, found.shape)[outside] for one in (sizes, halves, *keys))
        found[outside] = _permuted(found[outside], size, half, own)
    return found


DRAWS_VERSION: Final = "fastvid-draws-1"
"""Part of a loader's fingerprint; must change when the algorithm changes."""

_DOUBLE: Final = 2.0**-53  # spacing of float64 numbers in [0.5, 1)


class Purpose(IntEnum):
    """What a random number is used for. Purposes are independent of each other; values must never change."""

    FRAMES = 1
    CROP = 2
    FLIP = 3
    TEXT = 4
    TRANSFORM = 6
    BINS = 7
    TASK = 8


@dataclass(frozen=True, slots=True)
class Draws:
    """The random numbers of one clip.

    Attributes:
        seed: The loader's seed, 0 <= seed < 2**64.
        epoch: The epoch, 0 <= epoch < 2**64.
        position: Position of the clip in the epoch's global order.
    """

    seed: int
    epoch: int
    position: int

    def words(self, purpose: Purpose, count: int, first: int = 0) -> list[int]:
        """Return the uniform 64-bit words `first` to `first + count - 1` of a purpose.

        Seed, epoch, position and purpose each go through a bijection, so two clips of an epoch never share a state; the
        words are the SplitMix64 sequence from that state.
        """
        state = 0
        for word in (self.seed, self.epoch, self.position, purpose):
            state = mix64_int(((state ^ word) + GOLDEN) & MASK64)
        state += first * GOLDEN
        return [mix64_int((state + i * GOLDEN) & MASK64) for i in range(1, count + 1)]

    def uniform(self, purpose: Purpose, count: int, first: int = 0) -> list[float]:
        """Return floats uniform in [0, 1), multiples of 2**-53, from `words`."""
        return [(word >> 11) * _DOUBLE for word in self.words(purpose, count, first)]

    def integers(self, purpose: Purpose, high: int, count: int) -> list[int]:
        """Return integers uniform in 0 <= i < high; probabilities differ by a factor of at most 1 + high / 2**64."""
        return [(word * high) >> 64 for word in self.words(purpose, count)]


class BatchDraws:
    """The random numbers of several clips: those of `Draws` for each position, as arrays."""

    def __init__(self, seed: int, epoch: int, positions: IntArray) -> None:
        self.seed, self.epoch, self.positions = seed, epoch, positions
        state = mix64_int((mix64_int((seed + GOLDEN) & MASK64) ^ epoch) + GOLDEN & MASK64)
        self._states = mix64((positions.astype(np.uint64) ^ np.uint64(state)) + np.uint64(GOLDEN))

    def __getitem__(self, row: int) -> Draws:
        return Draws(self.seed, self.epoch, int(self.positions[row]))

    def chosen(self, rows: Sequence[int]) -> BatchDraws:
        """Return the random numbers of the clips in these rows."""
        return BatchDraws(self.seed, self.epoch, self.positions[rows])

    def words(self, purpose: Purpose, count: int, first: int = 0) -> UInt64Array:
        """Return the words of each clip, uint64 [N, count]."""
        states = mix64((self._states ^ np.uint64(purpose)) + np.uint64(GOLDEN))
        steps = np.arange(first + 1, first + count + 1, dtype=np.uint64) * np.uint64(GOLDEN)
        return mix64(states[:, None] + steps)

    def uniform(self, purpose: Purpose, count: int, first: int = 0) -> FloatArray:
        """Return floats uniform in [0, 1), float64 [N, count]."""
        return (self.words(purpose, count, first) >> _S11).astype(np.float64) * _DOUBLE

    def integers(self, purpose: Purpose, high: IntArray, count: int) -> IntArray:
        """Return integers uniform in 0 <= i < high, int64 [N, count]; `high`: int64 [N], each below 2**32."""
        words, most = self.words(purpose, count), high.astype(np.uint64)[:, None]
        # The upper half of a product of 64 and 32 bits.
        upper, lower = words >> _S32, words & _LOW32
        return ((upper * most + (lower * most >> _S32)) >> _S32).astype(np.int64)


def resolve_subset(dataset: Any) -> Any:
    """Return the samples that a `Subset` of a dataset selects, in its order; any other dataset as it is."""
    # Not imported: worker processes have no torch, and where nobody has imported torch, no object is its Subset.
    torch_data = sys.modules.get("torch.utils.data")
    if torch_data is not None and isinstance(dataset, torch_data.Subset):
        inner: Any = dataset.dataset
        whole = resolve_subset(inner)
        if not isinstance(whole, Dataset):
            hint = "make subsets of each dataset, then the mixture"
            raise UsageError(f"dataset is a Subset of a {type(whole).__name__}", hint=hint)
        return whole.select(np.asarray(dataset.indices))
    if not hasattr(dataset, "locate"):
        hint = "open one with `fastvid.open`, or combine several in a `fastvid.Mixture`"
        raise UsageError(f"dataset is a {type(dataset).__name__}, expected a dataset of fastvid", hint=hint)
    return dataset


GROUPED_VERSION: Final = "fastvid-grouped-1"
"""Part of a loader's fingerprint; must change when the algorithm changes."""

_TAG: Final = int.from_bytes(b"grouped1", "little")


class GroupedOrder:
    """The order of one epoch over groups with fixed shares.

    `sizes`: samples in each group, >= 1. `counts`: positions of each group in the epoch. `samples`: the samples of all
    groups, group after group; None if they are numbered so.
    """

    def __init__(
        self, sizes: Sequence[int], counts: Sequence[int], samples: AnyArray | None, seed: int, epoch: int
    ) -> None:
        self.seed, self.epoch, self.num_samples, self._samples = seed, epoch, sum(counts), samples
        self._places = Permutation(self.num_samples, seed, epoch)
        self._sizes, self._counts = np.asarray(sizes, dtype=np.int64), np.asarray(counts, dtype=np.int64)
        self._firsts, self._ends = np.cumsum(self._sizes) - self._sizes, np.cumsum(self._counts)
        # Python integers, because epoch * count may overflow 64 bits.
        begun = [divmod(epoch * count, size) for count, size in zip(counts, sizes, strict=True)]
        self._laps = np.asarray([lap & MASK64 for lap, _ in begun], dtype=np.uint64)
        self._offsets = np.asarray([offset for _, offset in begun], dtype=np.int64)
        self._halves = np.asarray(list(map(_half, sizes)), dtype=np.uint64)
        state = mix64_int((seed + _TAG) & MASK64)
        groups = np.arange(1, len(sizes) + 1, dtype=np.uint64) * np.uint64(GOLDEN)
        self._states = mix64(groups + np.uint64(state))

    def ids(self, positions: npt.ArrayLike) -> IntArray:
        """Return the samples at these positions, int64 [N]; see `Permutation.ids`."""
        slots = self._places.ids(positions)
        groups = np.searchsorted(self._ends, slots, side="right")
        sizes = self._sizes[groups]
        starts = self._ends[groups] - self._counts[groups]
        more, indices = np.divmod(self._offsets[groups] + slots - starts, sizes)
        # The indices of each lap are permuted with keys of their own.
        states = mix64(self._states[groups] ^ (self._laps[groups] + more.astype(np.uint64)))
        words = [mix64(states + np.uint64((n * GOLDEN) & MASK64)) for n in (1, 2, 3)]
        keys = [(word >> np.uint64(shift)).astype(np.uint32) for word in words for shift in (0, 32)]
        assert len(keys) == ROUNDS
        found = _permuted(indices.astype(np.uint64), sizes.astype(np.uint64), self._halves[groups], keys)
        numbers = self._firsts[groups] + found.astype(np.int64)
        return numbers if self._samples is None else self._samples[numbers].astype(np.int64)


def apportion(total: int, weights: Sequence[float]) -> list[int]:
    """Divide `total` positions in proportion to the weights, by largest remainders (ties go to the first group).

    `weights`: non-negative, at least one positive. Returns integers that add up to `total`.
    """
    whole = sum(weights)
    shares = [total * weight / whole for weight in weights]
    counts = [int(share) for share in shares]
    # Usually fewer positions than groups remain; more remain only where floats are coarser than one position.
    order = sorted(range(len(shares)), key=lambda group: (counts[group] - shares[group], group))
    for turn in range(total - sum(counts)):
        counts[order[turn % len(order)]] += 1
    return counts
