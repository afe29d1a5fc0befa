"""Buckets: every sample once in a shape that it can fill, the same batches in any world, from any batch on."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fastvid
from fastvid.errors import StateError, UsageError
from fastvid.load.order.buckets import Buckets, patches
from fastvid.load.order.draws import Permutation
from fastvid.runtime.processes import World
from tests.load.fakes import FakeDataset
from tests.load.order import plans
from tests.load.tools import make

SHAPES = [(t, h, w) for t in (1, 8, 16) for h, w in ((256, 448), (448, 256), (320, 320))]


@st.composite
def datasets(draw):
    """Draw (buckets, sizes, last, seed) of a small epoch."""
    count = draw(st.integers(1, 90))
    frames = draw(st.lists(st.integers(1, 40), min_size=count, max_size=count))
    sides = st.sampled_from([90, 180, 256, 320, 448, 720, 1280])
    heights, widths = (draw(st.lists(sides, min_size=count, max_size=count)) for _ in range(2))
    shapes = draw(st.lists(st.sampled_from(SHAPES), min_size=1, max_size=5, unique=True))
    shapes = [(1, 320, 320), *(shape for shape in shapes if shape != (1, 320, 320))]
    clips = draw(st.lists(st.integers(7, 12), min_size=len(shapes), max_size=len(shapes)))
    last = draw(st.sampled_from(["drop", "mask", "keep"]))
    return Buckets(shapes, clips), plans.sizes(frames, heights, widths), last, draw(st.integers(0, 2**64 - 1))


def epoch_of(case, world):
    buckets, sizes, last, seed = case
    return plans.ranks(buckets, sizes, world, last=last, seed=seed)


def has_batch(case):
    buckets, sizes, last, _ = case
    counts = np.bincount(buckets.assign(sizes), minlength=len(buckets.shapes))
    return last != "drop" or bool(np.any(counts >= np.asarray(buckets.clips)))


@given(datasets().filter(has_batch))
def test_every_world_sees_the_same_batches_and_each_sample_once(case):
    buckets, sizes, last, _ = case
    whole = plans.steps(epoch_of(case, 1))
    for world in plans.WORLDS[1:]:
        assert plans.without_ranks(plans.steps(epoch_of(case, world))) == plans.without_ranks(whole)
    delivered = plans.samples(whole)
    assert len(set(delivered)) == len(delivered)
    counts = np.bincount(buckets.assign(sizes), minlength=len(buckets.shapes))
    dropped = sum(counts % np.asarray(buckets.clips)) if last == "drop" else 0
    assert len(delivered) == len(sizes) - dropped
    # Without gaps: the state after each batch is the beginning of the next.
    edges = [0, *itertools.chain.from_iterable((start, stop) for start, stop, *_ in whole)]
    assert all(edges[n] == edges[n + 1] for n in range(0, len(edges) - 1, 2))
    assert edges[-1] == len(delivered)


@given(datasets().filter(has_batch))
def test_each_batch_has_one_shape_and_the_clips_of_its_bucket(case):
    buckets, sizes, last, seed = case
    assigned, ids = buckets.assign(sizes), Permutation(len(sizes), seed, 0).ids(np.arange(len(sizes)))
    for world in plans.WORLDS:
        seen_smaller = False
        for start, stop, shape, (rows,), of_ranks in plans.steps(epoch_of(case, world)):
            number = buckets.shapes.index(shape)
            assert {int(assigned[ids[place]]) for place in rows} == {number}
            assert len(rows) == stop - start
            is_whole = len(rows) == buckets.clips[number]
            assert is_whole or last != "drop"
            seen_smaller |= not is_whole
            assert not (is_whole and seen_smaller)  # incomplete batches come last
            if last != "keep":
                assert sum(of_ranks) == buckets.clips[number]
            assert max(of_ranks) - min(of_ranks) <= 1


@given(datasets().filter(has_batch), st.data())
@settings(max_examples=30)
def test_a_resume_at_any_batch_in_another_world_delivers_the_rest(case, data):
    whole = plans.without_ranks(plans.steps(epoch_of(case, data.draw(st.sampled_from(plans.WORLDS)))))
    for number in range(len(whole) + 1):
        position = whole[number][0] if number < len(whole) else whole[-1][1]
        world = plans.WORLDS[number % len(plans.WORLDS)]
        assert plans.without_ranks(plans.steps(epoch_of(case, world), position)) == whole[number:]


def test_a_position_inside_a_batch_is_refused():
    (epoch,) = plans.ranks(Buckets([(1, 8, 8)], 4), plans.sizes([1] * 10), 1)
    assert epoch.count(4) == 2
    with pytest.raises(StateError, match="position 5 is inside the batch of positions 4 to 7"):
        epoch.count(5)
    with pytest.raises(StateError, match="between two batches"):
        next(epoch.shares(9))


def test_a_batch_is_due_when_its_last_sample_is():
    # As a streaming bucketer with unlimited room would emit them.
    rng = np.random.default_rng(5)
    sizes, buckets = plans.sizes(rng.integers(1, 40, 200)), Buckets([(1, 8, 8), (8, 8, 8), (16, 8, 8)], [3, 5, 2])
    assigned, ids = buckets.assign(sizes), Permutation(200, 9, 4).ids(np.arange(200))
    waiting, emitted = {0: [], 1: [], 2: []}, []
    for place in range(200):
        held = waiting[int(assigned[ids[place]])]
        held.append(place)
        if len(held) == buckets.clips[int(assigned[ids[place]])]:
            emitted.append(list(held))
            held.clear()
    (epoch,) = plans.ranks(buckets, sizes, 1, last="drop", seed=9, epoch=4)
    assert [share.positions.tolist() for share in epoch.shares(0)] == emitted


@pytest.mark.parametrize(
    ("frames", "height", "width", "expected"),
    [
        (16, 720, 1280, (16, 256, 448)),
        (40, 1280, 720, (16, 448, 256)),
        (15, 1080, 1080, (8, 320, 320)),
        (8, 720, 1280, (8, 256, 448)),
        (7, 720, 1280, (1, 256, 448)),
        (1, 480, 640, (1, 256, 448)),  # the ratios 1.75 and 1.33 are nearer to each other than 1.33 and 1
        (1, 500, 640, (1, 320, 320)),
    ],
)
def test_a_sample_goes_to_the_longest_shape_it_fills_with_the_nearest_aspect(frames, height, width, expected):
    buckets = Buckets(SHAPES, 8)
    assert buckets.shapes[int(buckets.assign(plans.sizes([frames], height, width))[0])] == expected


@given(st.lists(st.tuples(st.integers(1, 60), st.integers(2, 60)), min_size=1, max_size=6, unique=True), st.data())
def test_ties_go_to_the_wider_shape_and_then_by_size_as_documented(pairs, data):
    shapes = [(4, height, width) for height, width in pairs]
    height, width = data.draw(st.integers(1, 90)), data.draw(st.integers(1, 90))
    buckets = Buckets(shapes, 1)
    found = shapes[int(buckets.assign(plans.sizes([4], height, width))[0])]

    def distance(shape):
        return abs(math.log(shape[1] / shape[2]) - math.log(height / width))

    least = min(map(distance, shapes))
    assert distance(found) <= least + 1e-8
    widest = min(shape[1] / shape[2] for shape in shapes if distance(shape) <= least + 1e-12)
    assert found[1] / found[2] <= widest + 1e-6
    alike = [shape for shape in shapes if math.isclose(shape[1] * found[2], shape[2] * found[1])]
    kept = [shape for shape in alike if shape[1] <= height and shape[2] <= width]
    area = max(h * w for _, h, w in kept) if kept else min(h * w for _, h, w in alike)
    assert found[1] * found[2] == area


def test_tokens_decide_the_clips_of_a_batch_rounded_down_to_a_multiple():
    buckets = Buckets([(16, 256, 256), (16, 250, 500), (1, 512, 512)], tokens=75_000, patch=(4, 16, 16), multiple=8)
    assert [patches(shape, buckets.patch) for shape in buckets.shapes] == [1024, 4 * 16 * 32, 1024]
    assert buckets.clips == (72, 32, 72)
    assert Buckets([(16, 256, 256)], tokens=75_000, patch=(4, 16, 16)).clips == (73,)
    with pytest.raises(UsageError, match=r"shape \(16, 256, 256\) has 1024 patches .* 8000 tokens contain fewer .* 8"):
        Buckets([(16, 256, 256)], tokens=8_000, patch=(4, 16, 16), multiple=8)


def test_a_batch_smaller_than_the_world_is_refused_and_names_the_shape():
    buckets = Buckets([(1, 8, 8), (2, 8, 8)], {(2, 8, 8): 3, (1, 8, 8): 5})
    assert buckets.clips == (5, 3)
    buckets.plan(plans.sizes([1]), World(0, 3), "mask", plans.key)
    with pytest.raises(UsageError, match=r"shape \(2, 8, 8\) has 3 clips, fewer than the world of 4"):
        buckets.plan(plans.sizes([1]), World(0, 4), "mask", plans.key)


def test_samples_that_fit_no_shape_are_refused_before_the_epoch_or_skipped_by_name(caplog):
    sizes = plans.sizes([9, 3, 9, 9, 2, 9], 90, 160)
    message = r"2 of 6 samples have fewer frames .* 8: clip-1 \(3 frames of 90x160\); clip-4"
    with pytest.raises(UsageError, match=message):
        Buckets([(8, 90, 160)], 2).plan(sizes, World(), "mask", plans.key)
    (epoch,) = plans.ranks(Buckets([(8, 90, 160)], 2, unfit="skip"), sizes, 1, order=Permutation(6, shuffle=False))
    assert "clip-1 (3 frames" in caplog.text
    assert [share.positions.tolist() for share in epoch.shares(0)] == [[0, 2], [3, 5]]
    assert [(share.start, share.stop) for share in epoch.shares(0)] == [(2, 4), (4, 6)]
    assert epoch.count(0) == epoch.count(2) == 2
    with pytest.raises(UsageError, match="6 of 6 samples"):
        Buckets([(10, 90, 160)], 2, unfit="skip").plan(sizes, World(), "mask", plans.key)


def test_the_fingerprint_changes_with_the_arguments_and_with_any_bucket():
    def text(buckets, frames):
        return buckets.plan(plans.sizes(frames), World(), "mask", plans.key).text

    buckets = Buckets([(1, 8, 8), (4, 8, 8)], 2)
    own = text(buckets, [1, 4, 4])
    assert own == text(buckets, [3, 4, 9])  # the same buckets, so the same batches
    assert own != text(buckets, [4, 1, 4])
    assert own != text(Buckets([(1, 8, 8), (4, 8, 8)], 3), [1, 4, 4])
    assert text(Buckets([[1, 8, 8]], {(1, 8, 8): 2}), [1]) == text(Buckets([(1, 8, 8)], [2]), [1])


def test_an_epoch_without_a_whole_batch_is_refused():
    with pytest.raises(UsageError, match="3 samples do not fill one batch of Buckets"):
        make(FakeDataset(3), spatial=fastvid.CenterCrop(None), global_batch_size=Buckets([(3, 8, 8)], 4))
    (epoch,) = plans.ranks(Buckets([(1, 8, 8)], 4), plans.sizes([1, 1, 1]), 1, last="drop")
    assert (list(epoch.shares(0)), epoch.count(0)) == ([], 0)
    (epoch,) = plans.ranks(Buckets([(1, 8, 8)], 4), plans.sizes([1]), 1)
    assert [share.positions.tolist() for share in epoch.shares(0)] == [[0, -1, -1, -1]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"shapes": [], "per_batch": 1}, "shapes are"),
        ({"shapes": [(1, 8, 8), (1, 8, 8)], "per_batch": 1}, "different shapes"),
        ({"shapes": [(1, 8)], "per_batch": 1}, "expected .frames, height, width."),
        ({"shapes": 5, "per_batch": 1}, "shapes is 5, expected Sequence"),
        ({"shapes": [(1, 8, 8)], "per_batch": {64: 4}}, "a shape of per_batch is 64"),
        ({"shapes": [(0, 8, 8)], "per_batch": 1}, "expected at least 1"),
        ({"shapes": [(1, 8, 8)]}, "per_batch=None and tokens=None"),
        ({"shapes": [(1, 8, 8)], "per_batch": 1, "tokens": 5}, "give the one or the other"),
        ({"shapes": [(1, 8, 8)], "per_batch": [1, 2]}, "2 numbers for 1 shapes"),
        ({"shapes": [(1, 8, 8)], "per_batch": {(2, 8, 8): 1}}, "per_batch has the shapes"),
        ({"shapes": [(1, 8, 8)], "per_batch": 0}, "per_batch is 0"),
        ({"shapes": [(1, 8, 8)], "per_batch": 1, "unfit": "drop"}, "unfit is 'drop'"),
        ({"shapes": [(1, 8, 8)], "per_batch": 1, "patch": (1, 0, 1)}, "patch is 0"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments, message):
    with pytest.raises(UsageError, match=message):
        Buckets(**arguments)
