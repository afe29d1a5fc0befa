"""Argument checks name the argument and its value, with a hint if there are names to choose from."""

from __future__ import annotations

import math

import pytest

from fastvid.errors import UsageError
from fastvid.runtime.values import check_choice, check_least, check_seconds


def refusal(check, *arguments, **values):
    with pytest.raises(UsageError) as refused:
        check(*arguments, **values)
    return str(refused.value)


def test_an_unknown_choice_is_refused_with_those_known():
    assert refusal(check_choice, "last", "pad", ("drop", "keep")) == "last is 'pad'\n  hint: use one of drop, keep"
    assert refusal(check_choice, "num_crops", 2, (1, 3)) == "num_crops is 2\n  hint: use one of 1, 3"
    check_choice("last", "keep", ("drop", "keep"))


def test_numbers_below_the_minimum_are_refused_by_name():
    assert refusal(check_least, 1, threads=2, prefetch=0) == "prefetch is 0, expected at least 1"
    assert refusal(check_least, 0.0, **{"optim.mixup": math.nan}) == "optim.mixup is nan, expected at least 0.0"
    check_least(1, threads=1, prefetch=None)


@pytest.mark.parametrize("value", [0, -1.0, math.inf, math.nan])
def test_seconds_must_be_positive_and_finite(value):
    assert refusal(check_seconds, timeout=value) == f"timeout is {value}, expected a positive number of seconds"
    check_seconds(timeout=0.001)
