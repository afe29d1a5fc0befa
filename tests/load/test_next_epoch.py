"""Where epoch follows epoch, the first batches of the next one are prefetched: none is lost, doubled or stale."""

import gc
import os

import pytest

from fastvid.errors import ChecksumError
from fastvid.load.batch.canvas import Canvas
from tests.load import fakes
from tests.load.fakes import FakeDataset, fake
from tests.load.tools import fastvid_threads, make, rows, until

SIZE = 20


def epochs(loader, number):
    """Return the rows of each batch of the next epochs."""
    return [[rows(batch) for batch in loader] for _ in range(number)]


def expected(number, epoch, **options):
    """Return what loaders deliver that were made for one epoch each."""
    found = []
    for each in range(epoch, epoch + number):
        loader = make(FakeDataset(SIZE), **options)
        loader.set_epoch(each)
        found += epochs(loader, 1)
    return found


@pytest.mark.parametrize(
    "options",
    [
        {"last": "drop"},
        {"last": "mask", "prefetch": 5},  # more batches than two epochs have
        {"last": "keep", "num_fetchers": 3, "prefetch": 4},
    ],
    ids=str,
)
def test_every_epoch_is_that_of_a_loader_made_for_it(options):
    loader = make(FakeDataset(SIZE), **options)
    assert epochs(loader, 6) == expected(6, 0, **options)
    loader.close()


def test_no_clip_is_decoded_twice_and_no_thread_runs_between_epochs():
    loader = make(FakeDataset(SIZE), decoder=fake("CountingDecoder"), last="keep", prefetch=2)
    fakes.CountingDecoder.decoded = 0
    for epoch in range(1, 7):
        list(loader)
        assert not fastvid_threads()
        # What follows the first epoch is not known to be the second.
        most = SIZE * epoch + (2 * 8 if epoch > 1 else 0)
        assert SIZE * epoch <= fakes.CountingDecoder.decoded <= most


def change_batch_size(loader):
    loader.set_batch_size(4)
    return expected(2, 3, global_batch_size=4)


def go_elsewhere(loader):
    loader.set_epoch(9)
    return expected(2, 9)


def load_a_state(loader):
    loader.load_state_dict(loader.state_dict() | {"epoch": 1, "position": 8})
    first, second = expected(2, 1)
    return [first[1:], second]


def load_another_seed(loader):
    loader.load_state_dict(loader.state_dict() | {"seed": 7})
    return expected(2, 3, seed=7)


def close(loader):
    loader.close()
    return expected(2, 3)


@pytest.mark.parametrize("change", [change_batch_size, go_elsewhere, load_a_state, load_another_seed, close])
def test_what_was_prefetched_is_not_stale(change):
    loader = make(FakeDataset(SIZE), prefetch=4)
    epochs(loader, 3)
    right = change(loader)
    assert epochs(loader, 2) == right


def test_states_are_those_of_what_was_delivered():
    loader, other = make(FakeDataset(SIZE), prefetch=6), make(FakeDataset(SIZE), prefetch=1)
    for _ in range(4):
        states = [[one.state_dict() for _ in one] for one in (loader, other)]
        assert states[0] == states[1]
        assert loader.state_dict() == other.state_dict()
        assert (loader.epoch, loader.position) == (other.epoch, other.position)


def test_a_break_in_a_following_epoch_continues_with_the_next_batch():
    loader = make(FakeDataset(SIZE), prefetch=3)
    epochs(loader, 2)
    head = [rows(next(iter(loader)))]
    assert [head + epochs(loader, 1)[0], *epochs(loader, 1)] == expected(2, 2)


def test_an_error_of_a_prefetched_clip_belongs_to_its_epoch():
    dataset = FakeDataset(SIZE)
    loader = make(dataset, prefetch=4, decoder=fake("CountingDecoder"))
    right = expected(3, 1)
    epochs(loader, 1)
    fakes.CountingDecoder.decoded = 0
    batches = iter(loader)
    first = rows(next(batches))
    # The batch that was taken and four more: the first of epoch 3 is the last. Then the files are damaged.
    until(lambda: fakes.CountingDecoder.decoded == 5 * 8)
    for name, data in dataset.storage.files.items():
        dataset.storage.files[name] = bytes(len(data))
    assert [first, *map(rows, batches)] == right[0]
    assert epochs(loader, 1) == right[1:2]
    batches = iter(loader)
    assert rows(next(batches)) == right[2][0]
    with pytest.raises(ChecksumError):
        next(batches)
    assert (loader.epoch, loader.position) == (3, 8)


def test_a_child_of_a_fork_between_epochs_continues_by_itself():
    loader = make(FakeDataset(SIZE), prefetch=3)
    epochs(loader, 2)
    right = expected(1, 2)
    child = os.fork()
    if not child:
        os._exit(0 if epochs(loader, 1) == right else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert epochs(loader, 1) == right


def test_what_was_prefetched_is_released_by_close():
    loader = make(FakeDataset(SIZE), prefetch=3, decoder=fake("CountingDecoder"))
    epochs(loader, 1)
    fakes.CountingDecoder.decoded = 0
    for number, _ in enumerate(loader, 1):
        until(lambda ahead=number + 3: fakes.CountingDecoder.decoded == 8 * ahead)
    gc.collect()
    assert any(type(work) is Canvas for work in gc.get_objects())
    loader.close()
    gc.collect()
    assert not any(type(work) is Canvas for work in gc.get_objects())
