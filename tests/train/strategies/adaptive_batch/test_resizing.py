"""Growing batches from a real loader."""

from hypothesis import given, settings
from hypothesis import strategies as st

from fastvid.train.strategies.adaptive_batch import ResizingLoader
from tests.load.fakes import FakeDataset
from tests.load.tools import make, rows


@settings(max_examples=30, deadline=None)
@given(
    size=st.integers(8, 90),
    last=st.sampled_from(["drop", "mask", "keep"]),
    growths=st.lists(st.integers(1, 90), max_size=4),
)
def test_growing_batches_deliver_the_same_samples_as_fixed_ones(size, last, growths):
    dataset = FakeDataset(size)
    fixed = [row for batch in make(dataset, last=last, global_batch_size=4) for row in rows(batch)]
    loader, seen = make(dataset, last=last, global_batch_size=4), []
    feed = ResizingLoader(
        loader,
        lambda: 4 * 2 ** sum(loader.position >= place for place in growths),
        lambda batch: seen.append(batch.start),
    )
    batches = list(feed)
    assert [row for batch in batches for row in rows(batch)] == fixed
    assert seen == [batch.start for batch in batches]
    assert all(batch.num_rows % 4 == 0 for batch in batches[:-1])
    # The epoch has ended, and the next one is complete.
    assert (loader.epoch, loader.position) == (1, 0)
    assert sum(batch.stop - batch.start for batch in feed) == len(fixed)
