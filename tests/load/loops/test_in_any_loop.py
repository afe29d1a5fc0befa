"""A ClipLoader inside the loops of others: nothing is doubled, lost or silently empty."""

import json
import pickle

import pytest
from torch.utils.data import DataLoader, IterableDataset

from fastvid.errors import UsageError
from tests import forks
from tests.load.fakes import FakeDataset
from tests.load.tools import make, rows

# From torch on a machine without an accelerator.
pytestmark = pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true")


@pytest.mark.parametrize("options", [{}, {"pin_memory": True}])
def test_a_dataloader_passes_batches_on_as_they_are(options):
    dataset = FakeDataset(43)
    loader = make(dataset)
    assert isinstance(loader, IterableDataset)
    passed = DataLoader(loader, batch_size=None, **options)
    assert len(passed) == 5
    expected = make(dataset)
    for _ in range(2):
        whole = list(passed)
        assert [type(batch) for batch in whole] == [type(next(iter(make(dataset))))] * 5
        assert [rows(batch) for batch in whole] == [rows(batch) for batch in expected]
    assert loader.epoch == 2


def test_a_dataloader_that_collates_takes_one_batch_or_says_why_not():
    dataset = FakeDataset(32)
    assert [rows(one) for one in DataLoader(make(dataset))] == [rows(one) for one in make(dataset)]
    with pytest.raises(UsageError, match=r"collates 4 batches(.|\n)*hint: use DataLoader\(loader, batch_size=None\)"):
        next(iter(DataLoader(make(dataset), batch_size=4)))


@pytest.mark.parametrize("batch_size", [None, 1])
def test_worker_processes_of_a_dataloader_are_refused_before_they_deliver_anything(batch_size):
    delivered = []
    with pytest.raises(UsageError, match=r"each process would deliver every clip(.|\n)*hint: use num_workers=0"):
        delivered += DataLoader(make(FakeDataset(32)), batch_size=batch_size, num_workers=1)
    assert delivered == []


def test_a_loader_sent_to_another_process_is_refused():
    with pytest.raises(UsageError, match="hint: use num_workers=0"):
        pickle.dumps(make(FakeDataset(32)))


def test_a_dataloader_left_early_never_makes_an_empty_epoch():
    passed = DataLoader(make(FakeDataset(32)), batch_size=None)
    assert [sum(1 for _ in zip(range(4), passed, strict=False)) for _ in range(3)] == [4, 4, 4]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Run the scenarios of `tests/load/loops/trainer_ranks.py` in two processes; return what each rank saw."""
    out = tmp_path_factory.mktemp("ranks")
    done = forks.ranks(2, "tests.load.loops.trainer_ranks", out)
    assert [rank.returncode for rank in done] == [0, 0], done
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize(
    "scenario",
    [
        "Accelerate with the loader",
        "Accelerate with an ExactSampler of one rank",
        "DistributedDataParallel with an ExactSampler",
        "Trainer that returns the loader",
        "Lightning with the loader",
        "Lightning with an ExactSampler",
    ],
)
def test_two_ranks_get_each_clip_of_each_epoch_once(ranks, scenario):
    seen = [rank[scenario] for rank in ranks]
    assert all(len(part) == 2 * 16 for part in seen)
    for epoch in range(2):
        positions = sorted(position for part in seen for number, position in part if number == epoch)
        assert positions == list(range(32))


@pytest.mark.parametrize(
    "scenario",
    [
        "Accelerate with a DataLoader",
        "Accelerate with a DataLoader that is not dispatched",
        "Accelerate with an ExactSampler of each rank",
        "Trainer with the loader as dataset",
    ],
)
def test_a_second_sharing_of_the_batches_is_refused(ranks, scenario):
    for rank in ranks:
        assert "Accelerate would share the batches" in rank[scenario], rank[scenario]


def test_a_loader_made_before_its_process_group_is_refused(ranks):
    for number, rank in enumerate(ranks):
        assert f"was made for rank 0 of 1, before this process became rank {number} of 2" in rank["made before"]
