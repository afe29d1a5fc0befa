"""The trainer's loader: what is left of an epoch whose last batch was trained on is its evaluation."""

from __future__ import annotations

import pytest

from fastvid.train.run.assemble import Labelled
from tests.load.fakes import FakeDataset
from tests.load.tools import make, rows


@pytest.mark.parametrize("restart", [True, False])
def test_a_state_of_the_last_batch_resumes_in_its_epoch_without_batches(restart):
    loader = Labelled(make(FakeDataset(32)))
    for _ in loader:
        state = loader.state_dict()
    expected = [rows(batch) for batch in loader]
    if restart:
        loader = Labelled(make(FakeDataset(32)))
    loader.load_state_dict(state)
    assert (loader.epoch, loader.steps_left) == (0, 0)
    assert loader.state_dict() == state
    assert list(loader) == [], "the epoch is not trained on again, and is evaluated after this"
    assert (loader.epoch, loader.steps_left) == (1, 4)
    assert [rows(batch) for batch in loader] == expected
