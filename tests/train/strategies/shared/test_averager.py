"""What an average is made of: parameters, statistics and moments."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fastvid.train.strategies.average import moments, reset_moments, statistics


def test_statistics_are_the_floating_point_buffers() -> None:
    norm = nn.BatchNorm1d(2)
    assert [id(buffer) for buffer in statistics(nn.Sequential(norm))] == [id(norm.running_mean), id(norm.running_var)]


@pytest.mark.parametrize(
    ("kind", "each"), [(torch.optim.Adam, 2), (torch.optim.SGD, 0), (torch.optim.Adagrad, 1), (torch.optim.Adadelta, 2)]
)
def test_moments_have_the_shape_of_their_parameter_and_are_no_counters(kind: Any, each: int) -> None:
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


def test_a_parameter_without_a_step_has_no_moments() -> None:
    optimizer = torch.optim.Adam([nn.Parameter(torch.ones(2))])
    assert moments(optimizer) == []


def test_a_reset_zeroes_moments_and_counters_in_place() -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([parameter])
    parameter.sum().backward()
    optimizer.step()
    state = optimizer.state[parameter]
    state["text"] = "plain"
    before = {name: id(value) for name, value in state.items()}
    assert float(state["step"]) == 1
    reset_moments(optimizer)
    assert {name: id(value) for name, value in state.items()} == before
    assert float(state["step"]) == 0
    assert all(not value.any() for value in moments(optimizer))
    assert len(moments(optimizer)) == 2
