"""A loader whose batch size changes while it runs."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastvid.errors import UsageError
from tests.load.fakes import FakeDataset
from tests.load.tools import epoch_of, make, rows


@settings(max_examples=40, deadline=None)
@given(
    size=st.integers(4, 60),
    world=st.integers(1, 3),
    legs=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 4)), max_size=5),
)
def test_an_epoch_is_exact_when_the_batch_size_changes_anywhere(size, world, legs):
    dataset = FakeDataset(size)
    undisturbed = epoch_of(dataset, 1, last="keep", global_batch_size=size)[0]
    ranks = [make(dataset, last="keep", rank=rank, world_size=world, global_batch_size=world) for rank in range(world)]
    delivered = []
    for more, steps in [*legs, (0, size)]:
        for rank in ranks:
            rank.set_batch_size(world + more)
            assert rank.global_batch_size == world + more
        for step, batches in enumerate(zip(*ranks, strict=True)):
            delivered += [row for batch in batches for row in rows(batch)]
            if step == steps:
                break
        if ranks[0].epoch == 1:
            break
    assert delivered == undisturbed


def test_an_invalid_batch_size_is_refused_and_changes_nothing():
    loader = make(FakeDataset(20), rank=0, world_size=3, global_batch_size=6)
    for wrong, message in ((2, "smaller than the world"), (21, "do not fill one batch of 21")):
        with pytest.raises(UsageError, match=message):
            loader.set_batch_size(wrong)
    assert loader.global_batch_size == 6
    assert len(list(loader)) == 3


def test_changing_the_batch_size_ends_a_running_iteration():
    loader = make(FakeDataset(40))
    batches = iter(loader)
    next(batches)
    loader.set_batch_size(16)
    with pytest.raises(UsageError, match="ended"):
        next(batches)
    assert [batch.start for batch in loader] == [8, 24]
