"""What an average is made of, and averages of integers: error feedback loses nothing, and ranks get the same bits."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fastvid.train.strategies.average import (
    BITS,
    BLOCK,
    Averager,
    Integers,
    decode,
    encode,
    moments,
    shares,
    statistics,
)


def test_statistics_are_the_floating_point_buffers():
    norm = nn.BatchNorm1d(2)
    assert [id(buffer) for buffer in statistics(nn.Sequential(norm))] == [id(norm.running_mean), id(norm.running_var)]


@pytest.mark.parametrize(
    ("kind", "each"), [(torch.optim.Adam, 2), (torch.optim.SGD, 0), (torch.optim.Adagrad, 1), (torch.optim.Adadelta, 2)]
)
def test_moments_have_the_shape_of_their_parameter_and_are_no_counters(kind, each):
    # The scalar parameter has the shape of a step counter.
    parameters = [nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.ones(4))]
    optimizer = kind(parameters[:2], lr=0.1)
    optimizer.add_param_group({"params": parameters[2:]})
    sum(parameter.sum() for parameter in parameters).backward()
    optimizer.step()
    optimizer.state[parameters[0]]["note"] = torch.ones(7)
    optimizer.state[parameters[0]]["text"] = "plain"
    found = moments(optimizer)
    assert [tensor.shape for tensor in found] == [p.shape for p in parameters for _ in range(each)]
    steps = {id(state.get("step")) for state in optimizer.state.values()}
    assert not [tensor for tensor in found if id(tensor) in steps]


def test_a_parameter_without_a_step_has_no_moments():
    optimizer = torch.optim.Adam([nn.Parameter(torch.ones(2))])
    assert moments(optimizer) == []


@pytest.mark.parametrize("name", BITS)
def test_the_messages_and_what_is_withheld_sum_to_all_that_was_given(outcomes, name):
    ranks = [rank[name] for rank in outcomes(3, "wire")]
    for rank in ranks:
        assert all(torch.equal(mine, others) for mine, others in zip(rank["means"], ranks[0]["means"], strict=True))
    given = sum(rank["given"] for rank in ranks) / len(ranks)
    received = ranks[0]["received"]
    rounded = float((received - given).abs().max())
    kept = received + sum(rank["withheld"] for rank in ranks) / len(ranks)
    # Sums of a hundred numbers near 1: some units in the last place of float64.
    assert float((kept - given).abs().max()) < 1e-13
    # Without feedback the errors of a hundred rounds would add up.
    assert 1e-4 < rounded < 3 * ranks[0]["step"]


@pytest.mark.parametrize("bits", [8, 4])
@given(data=st.data())
def test_levels_are_the_nearest_ones(bits, data):
    length = data.draw(st.sampled_from([0, 1, 2, 5, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 3]))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    values = torch.randn(length, generator=generator, dtype=torch.float64) * 10 ** data.draw(st.integers(-6, 6))
    message = encode(values, bits)
    blocks = -(-length // BLOCK)
    assert message.dtype == torch.uint8
    assert len(message) == 4 * blocks + -(-length * bits // 8)
    found = decode(message, length, bits, torch.float64)
    for start in range(0, length, BLOCK):
        own = values[start : start + BLOCK]
        step = float(own.abs().max()) / (2 ** (bits - 1) - 1)
        assert float((found[start : start + BLOCK] - own).abs().max()) <= step * (0.5 + 1e-6)


def test_a_buffer_follows_no_gradient_and_nothing_is_withheld_at_first():
    averager = Averager([nn.Parameter(torch.ones(2))], [torch.zeros(3, dtype=torch.float64)], 1, words=1)
    assert averager.buffer.dtype == torch.float64
    averager.average()
    assert not averager.buffer.requires_grad
    assert averager.buffer.tolist() == [1, 1, 0, 0, 0, 0]
    assert Averager([nn.Parameter(torch.ones(2))], [], 1).buffer.dtype == torch.float32
    values = torch.ones(4)
    assert not Integers(8).drain(values)
    assert values.tolist() == [1] * 4


@pytest.mark.parametrize("bits", [8, 4])
def test_zeros_stay_zeros_and_what_is_not_finite_stays_so(bits):
    assert not decode(encode(torch.zeros(5), bits), 5, bits, torch.float32).any()
    for bad in (float("nan"), float("inf")):
        values = torch.ones(BLOCK + 1)
        values[3] = bad
        found = decode(encode(values, bits), BLOCK + 1, bits, torch.float32)
        assert not found[:BLOCK].isfinite().all()
        assert found[BLOCK] == 1  # another block


@given(st.integers(0, 10 * BLOCK), st.integers(1, 9))
def test_ranks_own_whole_blocks_of_everything(length, size):
    parts = shares(length, size)
    assert len(parts) == size
    assert (parts[0].start, parts[-1].stop) == (0, length)
    assert all(part.stop == after.start for part, after in itertools.pairwise(parts))
    assert all(part.start % BLOCK == 0 for part in parts)
    assert max(part.stop - part.start for part in parts) <= BLOCK * (-(-length // BLOCK) // size + 1)
