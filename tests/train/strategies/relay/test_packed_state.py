"""Tokens: values are restored bit for bit, and damage is detected."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastvid.errors import ChecksumError, FastvidError, FormatError
from fastvid.train.strategies.relay import state

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool]


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    made = torch.randn(shape, generator=generator, dtype=torch.float64).to(draw(st.sampled_from(DTYPES)))
    return made.transpose(0, -1) if made.ndim > 1 else made


TREES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | tensors(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3)
    ),
    max_leaves=8,
)


def same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and left.shape == right.shape and left.equal(right)
    if isinstance(left, float) and math.isnan(left):
        return isinstance(right, float) and math.isnan(right)
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


@given(tree=TREES)
def test_a_tree_is_unpacked_unchanged(tree: Any) -> None:
    data = state.pack(tree)
    assert same(state.unpack(data), tree)
    assert state.pack(state.unpack(data)) == data


def test_every_flipped_bit_and_truncation_is_detected() -> None:
    data = state.pack({"weights": torch.arange(6.0), "step": 3})
    for index in range(len(data)):
        for broken in (data[:index], data[:index] + bytes([data[index] ^ 1]) + data[index + 1 :]):
            with pytest.raises((FormatError, ChecksumError)):
                state.unpack(broken)


@pytest.mark.parametrize("value", [{1, 2}, object(), torch.zeros(2).to_sparse(), {2.5: 1}, torch.zeros(1).cfloat()])
def test_unsupported_values_are_refused(value: Any) -> None:
    with pytest.raises(FastvidError, match="token"):
        state.pack({"value": value})


def test_an_unpacked_tensor_owns_its_memory() -> None:
    tree = state.unpack(state.pack([torch.zeros(3), torch.zeros(3)]))
    tree[0].fill_(1)
    assert tree[1].eq(0).all()
