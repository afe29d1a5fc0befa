"""Block shuffle, mixtures, balanced classes, clips per video: exact, resumable, and how well they mix."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastvid.errors import UsageError
from fastvid.load.order.draws import GroupedOrder, Permutation, apportion
from fastvid.load.order.epoch import BlockOrder, BlockShuffle, ClassBalanced, EpochOrders, Order
from fastvid.load.order.mixture import Mixture
from tests.load.fakes import FakeDataset
from tests.load.tools import make, rows, walk

SEEDS = st.integers(0, 2**64 - 1)


def all_ids(order):
    return order.ids(np.arange(order.num_samples))


def test_the_default_window_is_part_of_what_an_order_is():
    assert "window=16384" in EpochOrders(FakeDataset(9), Order(shuffle=BlockShuffle())).text


@given(st.lists(st.integers(0, 30), min_size=1, max_size=20), st.integers(1, 100), SEEDS, SEEDS, st.data())
def test_block_shuffle_visits_every_sample_once_window_by_window(sizes, window, seed, epoch, data):
    sizes = np.array(sizes, dtype=np.int64)
    total = int(sizes.sum())
    order = BlockOrder(sizes, window, seed, epoch)
    ids = all_ids(order)
    assert sorted(ids.tolist()) == list(range(total))
    if not total:
        return
    some = data.draw(st.lists(st.integers(0, total - 1), max_size=8))
    assert BlockOrder(sizes, window, seed, epoch).ids(some).tolist() == ids[some].tolist()
    # In the shard layout each window is a range, so a window's samples are close together.
    shards = np.repeat(np.arange(len(sizes)), sizes)
    count = -(-total // window)
    done = Counter()
    for number in range(count):
        inside = Counter(shards[ids[number * total // count : (number + 1) * total // count]].tolist())
        assert 1 <= sum(inside.values()) <= window
        done += inside
        # After a window at most one shard is partly visited.
        assert sum(done[shard] < sizes[shard] for shard in done) <= 1


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 60)), min_size=1, max_size=8).filter(
        lambda groups: any(count for _, count in groups)
    ),
    SEEDS,
    st.integers(0, 2**64 - 20),
)
def test_groups_get_exact_shares_and_visit_their_samples_in_laps(groups, seed, first):
    sizes, counts = [size for size, _ in groups], [count for _, count in groups]
    samples, seen = np.concatenate([100 * group + np.arange(size) for group, size in enumerate(sizes)]), Counter()
    for epoch in range(first, first + 4):
        ids = all_ids(GroupedOrder(sizes, counts, samples, seed, epoch))
        assert [int((ids // 100 == group).sum()) for group in range(len(sizes))] == counts
        seen.update(ids.tolist())
    for group, (size, count) in enumerate(groups):
        visits = [seen[group * 100 + index] for index in range(size)]
        # Four epochs may start and end within a lap: whole laps, and a part of a lap at each end.
        assert sum(visits) == 4 * count
        assert max(visits) - min(visits) <= 2
        if first * count % size == 0:
            assert max(visits) - min(visits) <= 1


def test_laps_and_groups_have_independent_orders():
    by_slot = np.empty(1500, dtype=np.int64)
    by_slot[all_ids(Permutation(1500, 3, 0))] = all_ids(GroupedOrder([500, 500], [1000, 500], None, 3, 0))
    first, second, other = by_slot[:500], by_slot[500:1000], by_slot[1000:] - 500
    for one, two in ((first, second), (first, other), (first, np.arange(500))):
        assert sorted(one.tolist()) == list(range(500))
        # Two independent orders agree at one position on average.
        assert np.count_nonzero(one == two) < 10


@given(st.integers(0, 10**9), st.lists(st.floats(0, 1e6), min_size=1, max_size=20).filter(lambda w: sum(w) > 1e-300))
def test_apportioned_positions_add_up_and_stay_within_one_of_their_share(total, weights):
    counts = apportion(total, weights)
    assert sum(counts) == total
    for count, weight in zip(counts, weights, strict=True):
        assert abs(count - total * weight / sum(weights)) <= 1 + total * 1e-12


def kinds(size):
    """Return datasets with loader options, for every kind of epoch order."""
    dataset, other = FakeDataset(size), FakeDataset(2 * size + 1, dataset_id="other")
    return {
        "plain": (dataset, {}),
        "as they lie": (dataset, {"shuffle": False}),
        "blocks": (dataset, {"shuffle": BlockShuffle(24)}),
        "concatenated": (Mixture([dataset, other]), {}),
        "concatenated in blocks": (Mixture([dataset, other]), {"shuffle": BlockShuffle(40)}),
        "weighted": (Mixture([dataset, other], weights=[3, 1], num_samples=2 * size + 3), {}),
        "balanced": (dataset, {"balance": ClassBalanced()}),
        "several clips": (dataset, {"clips_per_video": 3}),
        "several clips, balanced": (dataset, {"balance": ClassBalanced(0.5, size + 7), "clips_per_video": 2}),
        "several clips in blocks": (dataset, {"shuffle": BlockShuffle(20), "clips_per_video": 2}),
    }


@pytest.mark.parametrize("kind", list(kinds(1)))
@settings(max_examples=8, deadline=None)
@given(
    size=st.integers(3, 50),
    seed=SEEDS,
    epoch=st.integers(0, 5),
    legs=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 30), st.integers(0, 4)), min_size=2, max_size=4),
)
def test_an_epoch_is_exact_when_world_and_batch_size_change_at_every_checkpoint(kind, size, seed, epoch, legs):
    dataset, visits = kinds(size)[kind]
    options, clips = {"seed": seed, "last": "keep", **visits}, visits.get("clips_per_video", 1)
    alone = make(dataset, global_batch_size=12, **options)
    alone.set_epoch(epoch)
    undisturbed = [row for batch in alone for row in rows(batch)]
    assert len(undisturbed) == EpochOrders(dataset, Order(**visits)).num_samples
    assert walk(dataset, legs, epoch=epoch, unit=clips, **options) == undisturbed


def test_a_mixture_without_weights_visits_every_sample():
    first, second = FakeDataset(21), FakeDataset(40, classes=("c", "d", "a"))
    mixture = Mixture([first, second])
    batches = list(make(mixture, shuffle=False, last="keep", fields=("note",)))
    keys = [key for batch in batches for key in batch.key]
    assert keys == [f"key{n}" for n in range(21)] + [f"key{n}" for n in range(40)]
    assert [value for batch in batches for value in batch.fields["note"]][21:23] == ["note-0", "note-1"]
    assert mixture.classes == ("a", "b", "c", "d")
    labels = [int(label) for batch in batches for label in batch.label]
    assert labels == [n % 3 for n in range(21)] + [(2, 3, 0)[n % 3] for n in range(40)]


def test_a_mixture_keeps_its_shares_over_epochs():
    small, large = FakeDataset(10), FakeDataset(100)
    loader = make(Mixture([small, large], weights=[1, 1], num_samples=50), global_batch_size=5)
    seen = Counter()
    for _ in range(4):
        samples = [int(sample) for batch in loader for sample in batch.sample]
        assert sum(sample < 10 for sample in samples) == 25
        seen.update(samples)
    assert {seen[sample] for sample in range(10)} == {10}  # 100 positions in ten laps
    assert {seen[sample] for sample in range(10, 110)} == {1}  # 100 positions in one lap, over four epochs


def test_balanced_classes_get_equal_shares_and_unlabelled_samples_are_dropped():
    dataset = FakeDataset(100)
    dataset.labels = np.array([-1] * 10 + [0] * 80 + [2] * 9 + [5])
    loader = make(dataset, balance=ClassBalanced(), global_batch_size=9)
    assert Counter(int(label) for batch in loader for label in batch.label) == {0: 30, 2: 30, 5: 30}
    root = make(dataset, balance=ClassBalanced(0.5, num_samples=130), global_batch_size=10)
    # The roots are 8.94, 3 and 1, of 12.94.
    assert Counter(int(label) for batch in root for label in batch.label) == {0: 90, 2: 30, 5: 10}
    dataset.labels = np.full(100, -1)
    with pytest.raises(UsageError, match="no sample has a label"):
        make(dataset, balance=ClassBalanced())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda d: Mixture([]), "at least one dataset"),
        (lambda d: Mixture([d, d], weights=[1]), "1 weights for 2 datasets"),
        (lambda d: Mixture([d], weights=[0]), "expected positive numbers"),
        (lambda d: Mixture([d], num_samples=5), "without weights visits every sample once"),
        (lambda d: Mixture([d], weights=[1], num_samples=0), "num_samples is 0"),
        (lambda d: Mixture([d], weights=[1], num_samples=8.5), "num_samples is 8.5, expected an integer"),
        (lambda d: Mixture([d], weights=3), "weights are 3, expected a list of numbers"),
        (lambda d: Mixture([d, FakeDataset(3, classes=())]), "labels cannot be merged"),
        (lambda d: make(Mixture([d, type("Robot", (FakeDataset,), {"streams": ("top",)})(3)])), "common: .*rgb.*top"),
        (lambda d: BlockShuffle(0), "window is 0"),
        (lambda d: ClassBalanced(1.5), "power is 1.5"),
        (lambda d: ClassBalanced(num_samples=0), "num_samples is 0"),
        (lambda d: make(d, clips_per_video=0), "clips_per_video is 0"),
        (lambda d: make(d, balance=ClassBalanced(), shuffle=False), "cannot be combined with balance="),
        (lambda d: make(Mixture([d], weights=[1]), shuffle=BlockShuffle()), "combined with a weighted mixture"),
        (lambda d: make(Mixture([d], weights=[1]), balance=ClassBalanced()), "given for a weighted mixture"),
    ],
)
def test_invalid_or_contradictory_arguments_are_refused(call, message):
    with pytest.raises(UsageError, match=message):
        call(FakeDataset(40))


def mixing(order, shards, classes, batch):
    """Measure how well an order mixes."""
    ids = all_ids(order)
    whole = ids[: len(ids) // batch * batch].reshape(-1, batch)
    distance = np.abs(np.diff(ids)).mean() / (len(ids) / 3)
    # Without replacement the variance is hypergeometric, 1/4 a sample times (N - B) / (N - 1).
    spread = classes[whole].mean(1).var() * batch * 4 * (len(ids) - 1) / (len(ids) - batch)
    touched = np.mean([len(np.unique(shards[row])) for row in whole])
    return float(distance), float(spread), float(touched)


def test_shuffle_quality_is_as_documented():
    sizes = np.full(400, 250)
    shards = np.repeat(np.arange(400), 250)
    mixed = np.arange(100_000) % 2  # every shard contains both classes, as `fastvid shard` writes them
    by_shard = shards % 2  # every shard contains one class: the worst case
    uniform = Permutation(100_000, 1, 0)
    distance, spread, touched = mixing(uniform, shards, mixed, 100)
    assert distance == pytest.approx(1, abs=0.02)
    assert spread == pytest.approx(1, abs=0.15)
    assert touched == pytest.approx(400 * (1 - (1 - 1 / 400) ** 100), rel=0.02)
    assert mixing(uniform, shards, by_shard, 100)[1] == pytest.approx(1, abs=0.15)
    blocks = BlockOrder(sizes, 5_000, 1, 0)
    distance, spread, touched = mixing(blocks, shards, mixed, 100)
    assert spread == pytest.approx(1, abs=0.15)
    assert distance > 0.9
    assert 19 < touched < 21  # 20 shards per window
    # With 20 shards of one class each, classes vary more between batches, by at most 1 + 99 / 20.
    assert 3 < mixing(blocks, shards, by_shard, 100)[1] < 8
    # The control: a window of one shard mixes badly.
    assert mixing(BlockOrder(sizes, 250, 1, 0), shards, by_shard, 100)[1] > 50
