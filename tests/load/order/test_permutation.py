"""The order of an epoch is a permutation with random access that never changes between machines or versions."""

import hashlib
import struct
import tracemalloc

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fastvid.errors import UsageError
from fastvid.load.order.draws import SORTED_LIMIT, GroupedOrder, Permutation
from fastvid.load.order.epoch import BlockOrder

M32, M64 = 2**32 - 1, 2**64 - 1


def reference(n, seed, epoch, position):
    """Compute the order with plain integers from its description: key, then Feistel network or sort by hash."""
    digest = hashlib.blake2b(struct.pack("<QQQ", seed, epoch, n) + b"fastvid-order-1", digest_size=32).digest()
    if n <= 65_536:
        start = int.from_bytes(digest[24:], "little")
        return sorted(range(n), key=lambda i: splitmix(start + (i + 1) * 0x9E3779B97F4A7C15))[position]
    bits = (n - 1).bit_length()
    half = (bits + bits % 2) // 2
    mask = 2**half - 1
    x = position
    while True:
        left, right = x >> half, x & mask
        for key in struct.unpack("<6I", digest[:24]):
            left, right = right, left ^ (murmur(right ^ key) & mask)
        x = left << half | right
        if x < n:
            return x


def splitmix(z):
    z &= M64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & M64
    z = (z ^ z >> 27) * 0x94D049BB133111EB & M64
    return z ^ z >> 31


def murmur(h):
    h ^= h >> 16
    h = h * 0x85EBCA6B & M32
    h ^= h >> 13
    h = h * 0xC2B2AE35 & M32
    return h ^ h >> 16


WORDS = st.integers(0, M64)


@given(st.integers(1, 400), WORDS, WORDS)
def test_small_sets_follow_the_reference(n, seed, epoch):
    expected = [reference(n, seed, epoch, p) for p in range(min(n, 20))]
    assert Permutation(n, seed, epoch).ids(np.arange(min(n, 20))).tolist() == expected


@given(st.integers(SORTED_LIMIT + 1, 2**61), WORDS, WORDS, st.data())
@example(SORTED_LIMIT + 1, 0, 0, None)
@example(2**26 + 1, M64, 7, None)
def test_large_sets_follow_the_reference(n, seed, epoch, data):
    positions = [0, 1, n // 2, n - 1]
    if data is not None:
        positions += data.draw(st.lists(st.integers(0, n - 1), max_size=6))
    ids = Permutation(n, seed, epoch).ids(positions)
    assert ids.dtype == np.int64
    assert ids.tolist() == [reference(n, seed, epoch, p) for p in positions]


@pytest.mark.parametrize("n", [1, 2, 3, 1000, SORTED_LIMIT, SORTED_LIMIT + 1, 2**17, 100_003, 262_145])
@pytest.mark.parametrize("shuffle", [True, False])
def test_every_sample_comes_exactly_once(n, shuffle):
    ids = Permutation(n, 3, 1, shuffle=shuffle).ids(np.arange(n))
    assert np.array_equal(np.sort(ids) if shuffle else ids, np.arange(n))


@pytest.mark.parametrize("n", [500, 100_003])
def test_any_subset_of_positions_gives_the_same_samples(n):
    order = Permutation(n, 5, 2)
    everything = order.ids(np.arange(n))
    some = np.random.default_rng(0).integers(0, n, 300)
    assert np.array_equal(order.ids(some), everything[some])
    assert order.ids(n - 1).tolist() == [everything[-1]]
    assert order.ids([]).tolist() == []


@pytest.mark.parametrize("n", [1000, 100_000])
def test_seed_epoch_and_size_each_change_the_order(n):
    first = Permutation(n, 0, 0).ids(np.arange(999))
    for other in (Permutation(n, 1, 0), Permutation(n, 0, 1), Permutation(n + 1, 0, 0)):
        # Two independent orders agree at one position on average.
        assert np.count_nonzero(first == other.ids(np.arange(999))) < 10
    assert np.array_equal(first, Permutation(n, 0, 0).ids(np.arange(999)))


def test_a_hundred_million_samples_take_constant_memory():
    tracemalloc.start()
    ids = Permutation(10**8, 1, 1).ids(np.arange(512))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(set(ids.tolist())) == 512
    assert peak < 200_000


@pytest.mark.parametrize("position", [-1, 10])
def test_positions_outside_the_epoch_are_refused(position):
    for order in (Permutation(10), GroupedOrder([3, 9], [4, 6], None, 0, 0), BlockOrder(np.array([4, 6]), 3, 0, 0)):
        with pytest.raises(UsageError, match=f"position {position} is outside an epoch of 10"):
            order.ids([0, position])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1,), r"num_samples is -1, expected 0 <= num_samples < 2\*\*62$"),
        ((2**62,), r"num_samples is 4611686018427387904, expected 0 <= num_samples < 2\*\*62$"),
        ((5, -1), r"seed is -1, expected 0 <= seed < 2\*\*64$"),
        ((5, 2**64), r"seed is 18446744073709551616, expected 0 <= seed < 2\*\*64$"),
        ((5, 0, -1), r"epoch is -1, expected 0 <= epoch < 2\*\*64$"),
        ((5, 0, 2**64), r"epoch is 18446744073709551616, expected 0 <= epoch < 2\*\*64$"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments, message):
    with pytest.raises(UsageError, match=message):
        Permutation(*arguments)
    assert Permutation(2**62 - 1, 2**64 - 1, 2**64 - 1).ids(0).shape == (1,)
