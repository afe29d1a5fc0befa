"""Orders with shares: the recorded orders of their version, whole laps, and shares that add up."""

from collections import Counter

import numpy as np
import pytest

from fastvid.load.order.draws import GROUPED_VERSION, ORDER_VERSION, GroupedOrder, Permutation, apportion
from fastvid.load.order.epoch import BLOCKS_VERSION, BlockOrder, BlockShuffle, ClassBalanced, EpochOrders, Order
from fastvid.load.order.mixture import Mixture
from tests.load.fakes import FakeDataset

LAST = 2**64 - 1


def grouped(seed, epoch):
    samples = np.concatenate([100 * group + np.arange(size) for group, size in enumerate((3, 1, 9, 4))])
    return GroupedOrder([3, 1, 9, 4], [2, 5, 4, 0], samples, seed, epoch)


def all_ids(order):
    return order.ids(np.arange(order.num_samples)).tolist()


@pytest.mark.parametrize(
    ("seed", "epoch", "expected"),
    [
        (0, 0, [1, 207, 201, 100, 100, 100, 2, 100, 206, 100, 200]),
        (7, 3, [201, 100, 204, 207, 100, 100, 2, 200, 0, 100, 100]),
        (LAST, LAST, [100, 100, 100, 100, 207, 100, 0, 208, 2, 205, 204]),
    ],
)
def test_an_order_with_shares_is_that_of_its_version(seed, epoch, expected):
    order = grouped(seed, epoch)
    assert GROUPED_VERSION == "fastvid-grouped-1"
    assert (order.seed, order.epoch, order.num_samples) == (seed, epoch, 11)
    assert all_ids(order) == expected
    assert [int(order.ids(position)[0]) for position in (10, 0, 3)] == [expected[n] for n in (10, 0, 3)]
    assert order.ids([4, 1]).dtype == np.int64


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (2, [1, 0]),
        (4, [3, 2, 0, 1]),
        # The domain of a group's permutation has exactly its size.
        (16, [6, 8, 14, 4, 10, 2, 12, 15, 9, 11, 1, 13, 7, 5, 0, 3]),
    ],
)
def test_an_order_of_a_power_of_two_is_that_of_its_version(size, expected):
    assert all_ids(GroupedOrder([size], [size], None, 1, 2)) == expected


def test_an_order_of_a_large_group_is_that_of_its_version():
    order = GroupedOrder([70_000], [5], None, 5, 20_000)
    assert all_ids(order) == [37427, 44562, 68820, 47020, 58589]


@pytest.mark.parametrize(
    ("total", "weights", "expected"),
    [
        (7, [1, 1, 1], [3, 2, 2]),
        (10, [0, 3, 1], [0, 8, 2]),
        (5, [0.5, 0.25, 0.25], [3, 1, 1]),
        (8, [1, 1, 1, 1, 1], [2, 2, 2, 1, 1]),
        (10**6, [1, 2, 4], [142_857, 285_714, 571_429]),
        (2, [0.3, 0.3, 0.4], [1, 0, 1]),
        (0, [1, 2], [0, 0]),
        # Floats this large are whole numbers far apart.
        (10**18, [1, 1, 1], [333_333_333_333_333_334, 333_333_333_333_333_333, 333_333_333_333_333_333]),
    ],
)
def test_positions_are_apportioned_by_largest_remainders(total, weights, expected):
    assert apportion(total, weights) == expected


def labelled(labels):
    dataset = FakeDataset(len(labels))
    dataset.labels = np.array(labels)
    return dataset


def test_each_kind_of_order_has_its_class_size_and_fingerprint():
    dataset = FakeDataset(40)
    weighted = Mixture([dataset, FakeDataset(3, dataset_id="other")], weights=[1, 3], num_samples=20)
    grouped = f"shuffle=True {GROUPED_VERSION}"
    blocks, classes = Order(shuffle=BlockShuffle(9)), Order(balance=ClassBalanced(0.5, 30))
    for found, kind, size, text in (
        (EpochOrders(dataset), Permutation, 40, "shuffle=True"),
        (EpochOrders(dataset, Order(shuffle=False)), Permutation, 40, "shuffle=False"),
        (EpochOrders(dataset, blocks), BlockOrder, 40, f"shuffle=BlockShuffle(window=9) {BLOCKS_VERSION}"),
        (EpochOrders(weighted), GroupedOrder, 20, f"{grouped} weights=(1.0, 3.0) num_samples=20"),
        (EpochOrders(dataset, classes), GroupedOrder, 30, f"{grouped} ClassBalanced(power=0.5, num_samples=30)"),
    ):
        order = found.order(3, 4)
        assert type(order) is kind
        assert (order.seed, order.epoch, order.num_samples, found.num_samples) == (3, 4, size, size)
        assert found.text == f"{ORDER_VERSION} {text}"
    unweighted = Mixture([dataset, FakeDataset(3, dataset_id="other")])
    assert EpochOrders(unweighted, Order(shuffle=False)).order(0, 0).ids([0, 42]).tolist() == [0, 42]
    assert EpochOrders(unweighted, Order(shuffle=False)).num_samples == 43


@pytest.mark.parametrize("clips_per_video", [1, 2, 5])
def test_clips_of_a_video_follow_each_other_in_the_plain_order(clips_per_video):
    dataset = FakeDataset(12)
    plain, repeated = EpochOrders(dataset), EpochOrders(dataset, Order(clips_per_video=clips_per_video))
    assert repeated.num_samples == 12 * clips_per_video
    order = repeated.order(5, 6)
    assert (order.seed, order.epoch, order.num_samples) == (5, 6, 12 * clips_per_video)
    assert all_ids(order) == np.repeat(all_ids(plain.order(5, 6)), clips_per_video).tolist()
    assert order.ids(12 * clips_per_video - 1).tolist() == plain.order(5, 6).ids(11).tolist()
    assert repeated.text == plain.text + (f" clips_per_video={clips_per_video}" if clips_per_video > 1 else "")


def test_classes_get_the_samples_of_their_label_only():
    dataset = labelled([2, -1, 0, 2, 2, 7, -1, 0])
    balanced = EpochOrders(dataset, Order(balance=ClassBalanced(num_samples=12)))
    assert balanced.num_samples == 12
    seen = Counter(all_ids(balanced.order(0, 0)))
    # Four positions for each class; the three samples of class 2 have one each, and one of them a second.
    assert (seen[2], seen[7], seen[5], seen[1], seen[6]) == (2, 2, 4, 0, 0)
    assert sorted(seen[n] for n in (0, 3, 4)) == [1, 1, 2]
    # Without a number there is one position for each labelled sample; power 1 keeps the distribution.
    natural = EpochOrders(dataset, Order(balance=ClassBalanced(1)))
    assert sorted(all_ids(natural.order(9, 9))) == [0, 2, 3, 4, 5, 7]
    assert sorted(all_ids(EpochOrders(labelled([0, 1]), Order(balance=ClassBalanced())).order(0, 0))) == [0, 1]
