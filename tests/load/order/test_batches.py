"""Epochs are split into global batches and ranks without loss or duplicates, for any world size."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastvid.errors import UsageError
from fastvid.load.order.epoch import MASKED, Batches, Order, rank_slice
from fastvid.runtime.processes import World


@given(st.integers(0, 100), st.integers(1, 40), st.integers(1, 5))
def test_rank_slices_cover_a_batch_in_order_and_keep_groups_whole(groups, world, group):
    slices = [rank_slice(groups * group, rank, world, group) for rank in range(world)]
    assert [row for start, stop in slices for row in range(start, stop)] == list(range(groups * group))
    sizes = [stop - start for start, stop in slices]
    assert max(sizes) - min(sizes) <= group
    assert all(start % group == stop % group == 0 for start, stop in slices)


@st.composite
def epochs(draw):
    """Draw (samples, batch size, last, world size, position) that a loader accepts."""
    samples, world = draw(st.integers(1, 120)), draw(st.integers(1, 7))
    last = draw(st.sampled_from(["drop", "mask", "keep"]))
    largest = max(world, samples) if last == "drop" else 130
    size = draw(st.integers(world, largest))
    if last == "drop" and size > samples:
        last = "mask"
    return samples, size, last, world, draw(st.integers(0, samples))


@given(epochs())
def test_ranks_together_deliver_the_rest_of_an_epoch(epoch):
    samples, size, last, world, position = epoch
    ranks = [Batches(samples, size, last, World(rank, world)) for rank in range(world)]
    counts = {rank.count(position) for rank in ranks}
    assert len(counts) == 1  # all ranks take the same number of steps
    delivered = []
    for number in range(counts.pop()):
        shares = [rank.share(position + number * size) for rank in ranks]
        together = np.concatenate([share.positions for share in shares])
        valid = together[together != MASKED]
        assert {(share.start, share.stop) for share in shares} == {(valid[0], valid[-1] + 1)}
        rows = [len(share.positions) for share in shares]
        assert min(rows) >= 1
        assert max(rows) - min(rows) <= 1
        if last == "keep":  # without the rows of "mask", each rank has its part of the samples that are left
            samples_of = [int(np.count_nonzero(share.positions != MASKED)) for share in shares]
            assert max(samples_of) - min(samples_of) <= 1
        if last != "keep":
            assert sum(rows) == size
        rows = sum(np.count_nonzero(share.positions != MASKED) for share in shares)
        assert {share.stop - share.start for share in shares} == {rows}
        delivered += valid.tolist()
    left = samples - position
    expected = left // size * size if last == "drop" else left
    assert delivered == list(range(position, position + expected))


def test_groups_stay_on_one_rank_in_every_batch():
    shares = [Batches(23, 10, "drop", World(rank, 3), group=2).share(10) for rank in range(3)]
    assert [share.positions.tolist() for share in shares] == [[10, 11], [12, 13, 14, 15], [16, 17, 18, 19]]
    assert [share.stop - share.start for share in shares] == [10] * 3


@pytest.mark.parametrize(("size", "group", "last"), [(10, 3, "drop"), (10, 2, "mask"), (10, 2, "keep"), (3, 2, "drop")])
def test_groups_that_would_be_split_are_refused(size, group, last):
    with pytest.raises(UsageError, match=f"group_size is {group} with global_batch_size {size} and last='{last}'"):
        Batches(100, size, last, World(), group=group)


@pytest.mark.parametrize(
    ("group", "message"),
    [
        (1, "6 is smaller than the world of 7\n.*at least one clip of each batch"),
        (2, "6 in groups of 2 is smaller than the world of 7\n.*at least one group of each batch"),
    ],
)
def test_too_large_a_world_is_told_what_every_rank_needs(group, message):
    with pytest.raises(UsageError, match=message):
        Batches(100, 6, "drop", World(0, 7), group=group)


@pytest.mark.parametrize("value", [0, -1, 1.5, "4"])
def test_sizes_that_are_no_positive_integers_are_refused(value):
    with pytest.raises(UsageError, match="global_batch_size"):
        Batches(100, value, "mask", World())
    with pytest.raises(UsageError, match="group_size"):
        Order(group_size=value)
    assert Batches(100, np.int64(4), "mask", World()).size == 4


def test_batches_of_any_size_may_continue_an_epoch():
    assert {Batches(8, size, "drop", World()).text for size in (1, 4, 8)} == {""}


def test_there_is_no_share_at_the_end_of_an_epoch():
    for position in (-1, 8, 9):
        with pytest.raises(AssertionError):
            Batches(8, 4, "drop", World()).share(position)


def test_an_epoch_without_a_batch_is_refused():
    with pytest.raises(UsageError, match="5 samples do not fill one batch of 8"):
        Batches(5, 8, "drop", World())
    assert Batches(5, 8, "mask", World()).count(0) == 1


def test_an_unknown_rule_for_the_last_batch_is_refused():
    with pytest.raises(UsageError, match=r"last is 'pad'\n.*use one of drop, mask, keep"):
        Order(last="pad")


@pytest.fixture
def environment(monkeypatch):
    """An environment without torchrun's variables."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_the_world_comes_from_arguments_else_torchrun_else_defaults_to_one_rank(environment):
    assert World.resolve(None, None) == World(0, 1)
    environment.setenv("RANK", "2")
    environment.setenv("WORLD_SIZE", "3")
    assert World.resolve(None, None) == World(2, 3)
    assert World.resolve(0, 5) == World(0, 5)


def test_the_process_group_overrides_the_environment(environment, tmp_path):
    import torch.distributed as dist

    environment.setenv("RANK", "2")
    environment.setenv("WORLD_SIZE", "3")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        assert World.resolve(None, None) == World(0, 1)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(("rank", "size"), [(1, None), (None, 2), (2, 2), (-1, 2)])
def test_invalid_ranks_and_world_sizes_are_refused(environment, rank, size):
    with pytest.raises(UsageError, match="rank"):
        World.resolve(rank, size)


def test_an_environment_with_rank_but_no_world_size_is_refused(environment):
    environment.setenv("RANK", "0")
    with pytest.raises(UsageError, match="WORLD_SIZE=None"):
        World.resolve(None, None)
