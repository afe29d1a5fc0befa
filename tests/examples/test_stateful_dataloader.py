"""The StatefulDataLoader example resumes exactly where its state was saved."""

import pytest

from tests.examples import kit

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")


@pytest.fixture(scope="module")
def example():
    pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")
    return kit.load("stateful_dataloader")


def test_a_resumed_stateful_dataloader_yields_exactly_the_remaining_batches(example, tmp_path):
    url = kit.dataset(tmp_path, 20)

    def keys(loader):
        return [batch.key for batch in loader]

    whole = keys(example.make(url, crop=32))
    assert len(whole) == 5
    for taken in range(1, 5):
        loader = example.make(url, crop=32)
        iterator = iter(loader)
        first = [next(iterator).key for _ in range(taken)]
        state = loader.state_dict()
        del iterator
        resumed = example.make(url, crop=32)
        resumed.load_state_dict(state)
        assert first + keys(resumed) == whole
