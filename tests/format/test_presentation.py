"""Times of frames that are read from a file which may be damaged or made to do harm."""

import tracemalloc
import zlib
from fractions import Fraction

import numpy as np
import pytest

from fastvid.format.presentation import Times

TICK = (1).to_bytes(8, "little") + (1000).to_bytes(8, "little")


def test_times_are_those_that_were_packed():
    times = Times.pack([0, 40, 41, 1000], Fraction(1, 1000))
    times.check()
    assert times.seconds().tolist() == [0.0, 0.04, 0.041, 1.0]
    assert (times.tick, times.ticks().tolist()) == (Fraction(1, 1000), [0, 40, 41, 1000])


@pytest.mark.parametrize(
    "data",
    [
        b"",
        TICK,
        TICK + b"no zlib",
        bytes(16) + zlib.compress(bytes(16)),
        TICK + zlib.compress(np.array([1, 0], "<i8").tobytes()),
        TICK + zlib.compress(np.array([1], "<i8").tobytes()),
        TICK + zlib.compress(np.array([1, 1, 1], "<i8").tobytes()),
        TICK + zlib.compress(np.ones(1 << 22, "<i8").tobytes(), 9),
    ],
    ids=["nothing", "a tick alone", "no zlib", "no clock", "equal", "too few", "too many", "a bomb"],
)
def test_other_times_are_refused_in_little_memory(data):
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="times"):
            Times(data, 3).check()
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
