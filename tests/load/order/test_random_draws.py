"""Random numbers depend only on their key: seed, epoch, position, purpose and index."""

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fastvid.load.order.draws import Draws, Purpose, mix64, mix64_int

M64 = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15
WORDS = st.integers(0, M64)


def finalise(z):
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & M64
    z = (z ^ z >> 27) * 0x94D049BB133111EB & M64
    return z ^ z >> 31


def reference(seed, epoch, position, purpose, index):
    """Compute a number from its description: absorb four words, then take the index-th of the SplitMix64 sequence."""
    state = 0
    for word in (seed, epoch, position, purpose):
        state = finalise((state ^ word) + GOLDEN & M64)
    return finalise(state + (index + 1) * GOLDEN & M64)


def test_the_finaliser_is_splitmix64():
    # The first outputs of SplitMix64 seeded with 0, as published with its reference implementation.
    known = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert [mix64_int(i * GOLDEN & M64) for i in (1, 2, 3)] == known
    assert mix64(np.array([i * GOLDEN & M64 for i in (1, 2, 3)], dtype=np.uint64)).tolist() == known


@given(WORDS, WORDS, WORDS, st.sampled_from(Purpose), st.integers(0, 30), st.integers(0, 9))
def test_words_follow_the_reference(seed, epoch, position, purpose, count, first):
    words = Draws(seed, epoch, position).words(purpose, count, first)
    assert words == [reference(seed, epoch, position, purpose, first + i) for i in range(count)]


def test_different_keys_never_share_a_number():
    uses = itertools.product(range(4), range(4), range(60), Purpose)
    words = [w for seed, epoch, position, purpose in uses for w in Draws(seed, epoch, position).words(purpose, 4)]
    assert len(set(words)) == len(words)


def test_numbers_are_uniform_and_independent_of_their_neighbours():
    numbers = np.array([Draws(0, 0, position).uniform(Purpose.CROP, 2) for position in range(20_000)])
    assert numbers.min() >= 0
    assert numbers.max() < 1
    for column in numbers.T:
        counts, _ = np.histogram(column, bins=50, range=(0, 1))
        # 49 degrees of freedom: mean 49, deviation 9.9.
        assert ((counts - 400) ** 2 / 400).sum() < 49 + 4 * 9.9
        # Standard error of a correlation over 20,000 pairs is 0.007.
        assert abs(np.corrcoef(column[:-1], column[1:])[0, 1]) < 0.03
    assert abs(np.corrcoef(numbers[:, 0], numbers[:, 1])[0, 1]) < 0.03


@given(WORDS, st.integers(1, 2**40))
def test_integers_are_below_their_bound(position, high):
    assert all(0 <= i < high for i in Draws(1, 2, position).integers(Purpose.FRAMES, high, 5))


def test_integers_are_uniform():
    drawn = [i for position in range(2000) for i in Draws(7, 0, position).integers(Purpose.FRAMES, 5, 3)]
    counts = np.bincount(drawn, minlength=5)
    # 4 degrees of freedom: mean 4, deviation 2.8.
    assert ((counts - 1200) ** 2 / 1200).sum() < 4 + 4 * 2.8
