"""The StatefulDataLoader example resumes exactly where its state was saved."""

import itertools

import pytest

from tests.examples import kit

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")


@pytest.fixture(scope="module")
def example():
    pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")
    return kit.load("stateful_dataloader")


def test_a_resumed_stateful_dataloader_yields_exactly_the_remaining_batches_and_the_next_epoch(example, tmp_path):
    url = kit.dataset(tmp_path, 20)

    def keys(batches):
        return [tuple(batch.key) for batch in batches]

    clips = example.make(url, crop=32).dataset
    whole = keys(clips) + keys(clips)
    assert len(whole) == 10
    for taken in range(1, 6):
        loader = example.make(url, crop=32)
        seen = keys(itertools.islice(loader, taken))
        resumed = example.make(url, crop=32)
        resumed.load_state_dict(loader.state_dict())
        while len(seen) < 10:
            seen += keys(resumed)
        assert seen == whole
