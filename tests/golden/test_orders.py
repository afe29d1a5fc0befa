"""Samples, frames and crops are as recorded: 10,000 positions with five samplers, and all kinds of order."""

import pytest

from tests.golden import golden, orders

RECORDED = golden.read(orders.NAME)


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    return orders.cases(tmp_path_factory.mktemp("orders"))


@pytest.mark.parametrize("name", RECORDED)
def test_a_loader_visits_the_recorded_order(cases, name):
    golden.check(orders.NAME, name, cases[name](), RECORDED[name])


def test_every_order_is_recorded(cases):
    assert sorted(cases) == sorted(RECORDED)
