"""Integer hashes. Sample orders and random draws depend on them, so their output must never change."""

from __future__ import annotations

from typing import Final

import numpy as np

from fastvid.runtime.arrays import UInt32Array, UInt64Array

# 2**64 divided by the golden ratio, odd: the step of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014).
GOLDEN: Final = 0x9E3779B97F4A7C15
MASK64: Final = 2**64 - 1

_S30, _S27, _S31 = np.uint64(30), np.uint64(27), np.uint64(31)
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
