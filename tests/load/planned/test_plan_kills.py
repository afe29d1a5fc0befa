"""Ranks killed at random moments: what the resumed worlds deliver is one undisturbed epoch, row by row."""

import json

import pytest

from tests import forks


@pytest.mark.parametrize("kills", [1, pytest.param(5, marks=pytest.mark.soak)])
def test_killed_worlds_of_other_sizes_deliver_each_row_once(kills):
    done = forks.run("tests.load.planned.kills", kills, 11, FASTVID_LOG="WARNING")
    assert done.returncode == 0, done.stderr
    for found in json.loads(done.stdout).values():
        assert found["each_once"]
        assert found["kills"] >= kills
        assert all(found["same"])
        assert found["control_differs"]
