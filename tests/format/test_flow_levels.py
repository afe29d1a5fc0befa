"""Flow as levels: accuracy, clipping and layout."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fastvid.format.planes import STEPS, ZERO, to_levels, to_pixels

SHAPES = st.tuples(st.integers(1, 6), st.integers(1, 6), st.just(2))
FLOWS = hnp.arrays(np.float32, SHAPES, elements=st.floats(-60, 60, width=32))
BOUNDS = st.sampled_from([1.0, 7.5, 20.0, 64.0])


@given(FLOWS, BOUNDS)
def test_flow_round_trips_within_half_a_level_and_is_clipped_beyond_the_bound(flow, bound):
    back = to_pixels(to_levels(flow, bound), bound)
    assert back.shape == flow.shape
    assert np.abs(back - np.clip(flow, -bound, bound)).max() <= 0.5 * bound / STEPS * (1 + 1e-4)


@given(FLOWS, BOUNDS)
def test_negated_flow_has_exactly_mirrored_levels(flow, bound):
    levels, negated = to_levels(flow, bound).astype(int), to_levels(-flow, bound).astype(int)
    assert (levels + negated == 2 * ZERO).all()
    assert (to_pixels(to_levels(-flow, bound), bound) == -to_pixels(to_levels(flow, bound), bound)).all()


def test_zero_flow_is_level_128_and_x_is_stored_above_y():
    flow = np.zeros((2, 3, 2), np.float32)
    flow[..., 1] = 20.0
    levels = to_levels(flow, 20.0)
    assert levels.dtype == np.uint8
    assert (levels[:2] == ZERO).all()
    assert (levels[2:] == ZERO + STEPS).all()
    assert to_pixels(levels, 20.0)[0, 0].tolist() == pytest.approx([0.0, 20.0])
