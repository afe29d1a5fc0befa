"""Iterations of a loader: epoch follows epoch, threads end however a loop ends, and batches may change in size."""

import gc
import os
import signal
import subprocess
import sys
import threading
import warnings
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastvid.errors import ChecksumError, UsageError, WorkerError
from fastvid.load.batch.canvas import Canvas
from tests.load import fakes
from tests.load.fakes import FakeDataset, fake
from tests.load.tools import epoch_of, fastvid_threads, make, rows, until


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


def test_prefetch_bounds_the_number_of_prefetched_batches():
    loader = make(FakeDataset(400), prefetch=3, num_threads=4, decoder=fake("CountingDecoder"))
    fakes.CountingDecoder.decoded = 0
    for taken, _ in enumerate(loader, start=1):
        # One batch taken and three prefetched. A surplus batch would still be counted at the following batches.
        ahead = min(400, (taken + 3) * 8)
        until(lambda ahead=ahead: fakes.CountingDecoder.decoded >= ahead)
        assert fakes.CountingDecoder.decoded == ahead


def test_decoders_stay_open_between_epochs():
    fakes.RgbDecoder.opened = 0
    loader = make(FakeDataset(40), num_threads=3)
    for _ in range(4):
        list(loader)
    assert fakes.RgbDecoder.opened == 3


def test_batch_decoders_get_several_clips_per_call():
    fakes.GroupDecoder.groups.clear()
    list(make(FakeDataset(40), decoder=fake("GroupDecoder"), num_threads=1))
    assert max(fakes.GroupDecoder.groups) == 5
    assert sum(fakes.GroupDecoder.groups) == 40


def leave_by_break(loader):
    for _ in loader:
        assert len(fastvid_threads()) == 3
        break


def leave_by_exception(loader):
    def step(batch):
        raise KeyError(batch.start)

    with pytest.raises(KeyError):
        list(map(step, loader))


def leave_by_forgetting(loader):
    iterator = iter(loader)
    next(iterator)
    del iterator


def leave_by_cycle(loader):
    node = SimpleNamespace(iterator=iter(loader))
    node.node = node
    next(node.iterator)
    assert fastvid_threads()
    del node
    gc.collect()


def leave_by_close(loader):
    iterator = iter(loader)
    next(iterator)
    loader.close()
    assert not fastvid_threads()
    with pytest.raises(UsageError, match="this iteration was ended"):
        next(iterator)


LEAVES = [leave_by_break, leave_by_exception, leave_by_forgetting, leave_by_cycle, leave_by_close]


@pytest.mark.parametrize("leave", LEAVES, ids=lambda leave: leave.__name__)
def test_threads_end_and_the_loader_can_continue_however_a_loop_ends(leave):
    loader = make(FakeDataset(64))
    leave(loader)
    assert not fastvid_threads()
    assert [batch.start for batch in loader] == [8, 16, 24, 32, 40, 48, 56]


def test_a_second_iteration_ends_the_first():
    loader = make(FakeDataset(64))
    first = iter(loader)
    next(first)
    second = iter(loader)
    assert next(second).start == 8
    with pytest.raises(UsageError, match="use one loader per concurrent iteration"):
        next(first)
    assert [batch.start for batch in second] == [16, 24, 32, 40, 48, 56]


def test_continuing_an_iteration_in_a_forked_child_is_an_error():
    """Even if a thread held the pipeline's lock at the fork."""
    loader = make(FakeDataset(64))
    iterator = iter(loader)
    next(iterator)
    held, done = threading.Event(), threading.Event()

    def hold():
        with loader._run._lock:
            held.set()
            done.wait(60)

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait(60)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer versions of Python warn about forks with threads
        child = os.fork()
    if not child:
        signal.alarm(30)
        code = 1
        try:
            next(iterator)
        except WorkerError as error:
            code = 42 if "start processes by 'spawn'" in str(error) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 42
    done.set()
    holder.join()
    assert next(iterator).start == 8
    iterator.close()


SCRIPT = """
import signal, sys, threading, time
from fastvid.load.clips.crops import CenterCrop
from fastvid.load.loader import ClipLoader
from fastvid.load.clips.sampling import Segments
from tests.load.fakes import FakeDataset, RgbDecoder, fake
from tests.load.loaders import clip_loader

def announce(main):  # an interrupt in the loop's own body, which the loader cannot see, leaves the iterator open
    inside = lambda frame: frame and (frame.f_code is ClipLoader._iterate.__code__ or inside(frame.f_back))
    while not inside(sys._current_frames()[main]):
        time.sleep(0.001)
    print("waiting for a batch", flush=True)

signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell inherits "ignored"
RgbDecoder.delay = 0.1
loader = clip_loader(FakeDataset(8000), frames=Segments(3), spatial=CenterCrop(16), global_batch_size=8, num_threads=2,
                    decoder=fake())
iterator = iter(loader)
next(iterator)
try:
    print(sum(thread.name.startswith("fastvid-") for thread in threading.enumerate()), flush=True)
    if sys.argv[1] == "interrupt":
        threading.Thread(target=announce, args=(threading.get_ident(),), daemon=True).start()
        for batch in iterator:
            pass
except KeyboardInterrupt:
    print(sum(thread.name.startswith("fastvid-") for thread in threading.enumerate()), flush=True)
    sys.exit(7)
"""


@pytest.mark.parametrize(("way", "code", "rest"), [("exit", 0, ""), ("interrupt", 7, "0\n")])
def test_a_process_exits_at_once_while_an_iteration_is_open(way, code, rest):
    command = [sys.executable, "-W", "error", "-c", SCRIPT, way]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "3\n"
        if way == "interrupt":
            assert process.stdout.readline() == "waiting for a batch\n"
            process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=300)
    assert (process.returncode, out, err) == (code, rest, "")


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
