"""Random numbers depend only on their key: seed, epoch, position, purpose and index."""

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fastvid.load.order.draws import BatchDraws, Draws, Purpose, mix64, mix64_int

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


def test_purposes_keep_their_numbers():
    """They are part of what makes the order and the pictures of a seed the same in every version."""
    numbers = {"FRAMES": 1, "CROP": 2, "FLIP": 3, "TEXT": 4, "TRANSFORM": 6, "BINS": 7, "TASK": 8}
    assert {purpose.name: int(purpose) for purpose in Purpose} == numbers


def test_different_keys_never_share_a_number():
    uses = itertools.product(range(4), range(4), range(60), Purpose)
    words = [w for seed, epoch, position, purpose in uses for w in Draws(seed, epoch, position).words(purpose, 4)]
    assert len(set(words)) == len(words)


@given(WORDS, WORDS, WORDS, st.sampled_from(Purpose), st.integers(1, 2**32 - 1))
def test_a_batch_has_the_numbers_of_each_of_its_clips(seed, epoch, position, purpose, high):
    alone, batch = Draws(seed, epoch, position), BatchDraws(seed, epoch, np.array([5, position], dtype=np.uint64))
    assert batch.words(purpose, 4, 3)[1].tolist() == alone.words(purpose, 4, 3)
    assert batch.uniform(purpose, 4, 3)[1].tolist() == alone.uniform(purpose, 4, 3)
    assert batch.integers(purpose, np.array([9, high]), 4)[1].tolist() == alone.integers(purpose, high, 4)


@given(WORDS, st.integers(1, 2**40))
def test_integers_are_below_their_bound(position, high):
    assert all(0 <= i < high for i in Draws(1, 2, position).integers(Purpose.FRAMES, high, 5))
