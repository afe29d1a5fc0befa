"""Stateless random numbers: each is a hash of (seed, epoch, position, purpose, index).

A number depends on nothing else, so it is the same for any world size, batch size, thread and back-end, and after any
restart. Library generators are not used because their algorithms may change between versions.

A clip needs at most a dozen numbers, for which Python integers are faster than numpy arrays.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from fastvid.load.order.hashes import GOLDEN, MASK64, mix64_int

DRAWS_VERSION: Final = "fastvid-draws-1"
"""Part of a loader's fingerprint; must change when the algorithm changes."""

_DOUBLE: Final = 2.0**-53  # spacing of float64 numbers in [0.5, 1)


class Purpose(IntEnum):
    """What a number is used for. Different purposes are independent; existing values must never change."""

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
        """Return floats uniform in [0, 1), multiples of 2**-53."""
        return [(word >> 11) * _DOUBLE for word in self.words(purpose, count, first)]

    def integers(self, purpose: Purpose, high: int, count: int) -> list[int]:
        """Return integers uniform in 0 <= i < high; probabilities differ by a factor of at most 1 + high / 2**64."""
        return [(word * high) >> 64 for word in self.words(purpose, count)]
