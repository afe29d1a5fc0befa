"""Saved states stay valid: a loader's state is as recorded, part by part."""

import pytest

from tests.golden import golden, states

RECORDED = golden.read(states.NAME)


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    return states.cases(tmp_path_factory.mktemp("states"))


@pytest.mark.parametrize("name", RECORDED)
def test_a_state_is_as_recorded(cases, name):
    golden.check(states.NAME, name, cases[name](), RECORDED[name])


def test_every_state_is_recorded(cases):
    assert sorted(cases) == sorted(RECORDED)
