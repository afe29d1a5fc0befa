"""Packed: whole clips in bins of limited tokens, each once, the same in any world, from any batch on, at equal cost."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastvid.errors import UsageError
from fastvid.load.order.draws import Permutation
from fastvid.load.order.packed import Packed, best_fit, bins_of_rank, cost, in_steps
from fastvid.runtime.processes import World
from tests.load.order import plans

lengths = st.lists(st.integers(1, 100), min_size=1, max_size=120).map(lambda some: np.asarray(some, dtype=np.int64))


@given(lengths, st.integers(100, 150), st.integers(1, 60))
def test_every_clip_is_in_one_bin_with_room_for_it(tokens, capacity, window):
    bins = best_fit(tokens, capacity, window)
    assert sorted(clip for one in bins for clip in one) == list(range(len(tokens)))
    assert all(one and tokens[one].sum() <= capacity for one in bins)


@given(lengths, st.integers(100, 150))
def test_one_window_is_packed_by_best_fit_of_descending_lengths(tokens, capacity):
    expected: list[list[int]] = []
    for clip in sorted(range(len(tokens)), key=lambda one: (-tokens[one], one)):
        fits = [one for one in expected if tokens[one].sum() + tokens[clip] <= capacity]
        if fits:
            max(fits, key=lambda one: tokens[one].sum()).append(clip)
        else:
            expected.append([clip])
    found = best_fit(tokens, capacity, 1000)
    assert sorted(tokens[one].sum() for one in found) == sorted(tokens[one].sum() for one in expected)
    assert tokens[found[-1]].sum() == min(tokens[one].sum() for one in found)


def test_padding_is_far_below_that_of_packing_in_order():
    durations = np.exp(np.random.default_rng(0).normal(np.log(9), 1.0, 20_000))
    tokens = np.clip((durations * 2).astype(np.int64), 4, 250) // 2 * 256
    bins = len(best_fit(tokens, 32_768, 2048))
    assert 1 - tokens.sum() / 32_768 / bins < 0.001
    in_order, room = 0, 0
    for length in tokens.tolist():  # the control: the next clip that does not fit opens a bin
        in_order, room = (in_order, room - length) if length <= room else (in_order + 1, 32_768 - length)
    assert 1 - tokens.sum() / 32_768 / in_order > 0.05


@given(lengths, st.integers(1, 9), st.booleans())
def test_steps_contain_every_bin_and_cost_falls_from_one_to_the_next(tokens, bins, split):
    packed, costs = best_fit(tokens, 128, 50), cost(tokens, 60)
    steps = in_steps(packed, costs, bins, split=split)
    assert [len(step) for step in steps] == [bins] * -(-len(packed) // bins)
    parts = [part for step in steps for part in step]
    assert sorted(clip for part in parts for clip in part) == list(range(len(tokens)))
    assert np.all(np.diff([costs[part].sum() for part in parts]) <= 0)
    assert all(tokens[part].sum() <= 128 for part in parts)
    empty = sum(not len(part) for part in parts)
    if not split:
        assert empty == -len(packed) % bins
    else:  # only bins of a single clip cannot be divided
        assert empty <= -len(packed) % bins
        assert not empty or sum(len(one) > 1 for one in packed) < -len(packed) % bins
    assert all(map(all, steps[:-1]))


@given(st.lists(st.integers(0, 10**9), min_size=7, max_size=40), st.sampled_from(plans.WORLDS))
def test_ranks_share_the_bins_of_a_step_in_equal_numbers(costs, world):
    shares = [bins_of_rank(costs, World(rank, world)) for rank in range(world)]
    assert sorted(number for share in shares for number in share) == list(range(len(costs)))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_ranks_get_about_equal_costs():
    # Dealt in order, the first rank would get 8 + 7.
    shares = [bins_of_rank([8, 7, 6, 5, 4, 3, 2, 1], World(rank, 4)) for rank in range(4)]
    assert shares == [[0, 7], [1, 6], [2, 5], [3, 4]]


@st.composite
def datasets(draw, *, spread=40):
    """Draw (packed, sizes, last, seed) of an epoch of several blocks."""
    count = draw(st.integers(1, 150))
    frames = draw(st.lists(st.integers(1, spread), min_size=count, max_size=count))
    tokens, patch = draw(st.integers(48, 90)), (draw(st.integers(1, 2)), 8, 8)
    bins, window = draw(st.integers(7, 9)), draw(st.integers(1, 40))
    packed = Packed(tokens, patch, bins=bins, window=window, unfit="skip")
    return packed, plans.sizes(frames, 8, 8), draw(st.sampled_from(["drop", "mask", "keep"])), draw(st.integers(0, 99))


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch):
    """Let a small epoch have several blocks."""
    monkeypatch.setattr("fastvid.load.order.packed._STEPS_OF_BLOCK", 1)


def epoch_of(case, world):
    packed, sizes, last, seed = case
    return plans.ranks(packed, sizes, world, last=last, seed=seed)


def epochs(spread=40):
    def has_batch(case):
        try:
            return not epoch_of(case, 1)[0].is_over(0)
        except UsageError:  # no clip fits into a bin
            return False

    return datasets(spread=spread).filter(has_batch)


@given(epochs())
@settings(max_examples=40)
def test_every_world_sees_the_same_batches_and_each_sample_once(case):
    packed, sizes, last, seed = case
    whole = plans.steps(epoch_of(case, 1))
    for world in plans.WORLDS[1:]:
        assert plans.without_ranks(plans.steps(epoch_of(case, world))) == plans.without_ranks(whole)
    delivered = plans.samples(whole)
    assert len(set(delivered)) == len(delivered)
    tokens = sizes.tokens(packed.patch)[Permutation(len(sizes), seed, 0).ids(np.arange(len(sizes)))]
    for start, stop, _, bins, _ in whole:
        assert stop - start == sum(map(len, bins))
        assert len(bins) == packed.bins
        assert all(tokens[list(one)].sum() <= packed.tokens for one in bins)
    missing = sorted(set(range(len(sizes))) - set(delivered))
    if last == "drop":  # at the epoch's end less than one batch
        assert tokens[missing].sum() < packed.bins * packed.tokens
    else:
        assert not missing
    starts, stops = ([one[n] for one in whole] for n in (0, 1))
    assert [0, *stops[:-1]] == starts


@given(epochs(spread=99))
@settings(max_examples=20)
def test_clips_larger_than_a_bin_are_skipped_and_all_others_delivered(case):
    packed, sizes, last, seed = case
    tokens = sizes.tokens(packed.patch)[Permutation(len(sizes), seed, 0).ids(np.arange(len(sizes)))]
    whole = plans.steps(epoch_of(case, 3))
    delivered = set(plans.samples(whole))
    assert delivered <= set(np.flatnonzero(tokens <= packed.tokens).tolist())
    if last != "drop":
        assert delivered == set(np.flatnonzero(tokens <= packed.tokens).tolist())
    for number, (start, *_) in enumerate(whole):
        assert plans.without_ranks(plans.steps(epoch_of(case, 2), start)) == plans.without_ranks(whole[number:])


def test_a_resume_plans_one_block(monkeypatch):
    calls = []
    monkeypatch.setattr("fastvid.load.order.packed.best_fit", lambda *given: calls.append(1) or best_fit(*given))
    case = (Packed(64, (1, 8, 8), bins=7, window=16), plans.sizes([9, 5, 7, 3] * 500, 8, 8), "mask", 3)
    whole = plans.steps(epoch_of(case, 1))
    assert len(calls) > 20
    calls.clear()
    (epoch,) = epoch_of(case, 1)
    calls.clear()
    assert next(epoch.shares(whole[20][0])).start == whole[20][0]
    assert len(calls) == 1


def test_the_batches_of_a_block_are_not_sorted_by_cost(monkeypatch):
    monkeypatch.setattr("fastvid.load.order.packed._STEPS_OF_BLOCK", 64)
    sizes = plans.sizes(np.random.default_rng(1).integers(1, 60, 3000), 8, 8)
    whole = plans.steps(plans.ranks(Packed(64, (1, 8, 8), bins=7, window=500), sizes, 1))
    counts = [stop - start for start, stop, *_ in whole]
    assert counts != sorted(counts)
    assert counts != sorted(counts, reverse=True)


def test_costs_of_ranks_differ_by_little_where_dealing_bins_in_order_does_not(monkeypatch):
    monkeypatch.setattr("fastvid.load.order.packed._STEPS_OF_BLOCK", 256)
    durations = np.exp(np.random.default_rng(0).normal(np.log(9), 1.0, 40_000))
    sizes = plans.sizes(np.clip((durations * 2).astype(np.int64), 4, 240), 224, 224)
    packed = Packed(32_768, bins=16)
    tokens = sizes.tokens(packed.patch)[Permutation(len(sizes), 0, 0).ids(np.arange(len(sizes)))]
    costs = cost(tokens, packed.quadratic_from)
    steps = zip(*(epoch.shares(0) for epoch in plans.ranks(packed, sizes, 8, last="drop")), strict=True)
    loads = np.asarray([[costs[share.positions].sum() for share in shares] for shares in steps])
    assert (loads.max(axis=1) / loads.mean(axis=1)).mean() < 1.01
    bins = best_fit(sizes.tokens(packed.patch), packed.tokens, packed.window)
    dealt = np.asarray([costs[one].sum() for one in bins])[: len(bins) // 16 * 16].reshape(-1, 8, 2).sum(axis=2)
    assert (dealt.max(axis=1) / dealt.mean(axis=1)).mean() > 1.05


def test_bins_default_to_the_world_and_are_part_of_the_fingerprint():
    sizes = plans.sizes([4, 5], 8, 8)
    two = Packed(16, (1, 8, 8)).plan(sizes, World(0, 2), "mask", plans.key)
    assert "bins=2" in two.text
    assert two.text != Packed(16, (1, 8, 8)).plan(sizes, World(0, 3), "mask", plans.key).text
    assert two.text == Packed(16, (1, 8, 8), bins=2).plan(sizes, World(0, 1), "mask", plans.key).text
    assert two.text != Packed(16, (1, 8, 8), bins=2).plan(plans.sizes([5, 4], 8, 8), World(), "mask", plans.key).text
    with pytest.raises(UsageError, match="2 bins, fewer than the world of 3"):
        Packed(16, (1, 8, 8), bins=2).plan(sizes, World(0, 3), "mask", plans.key)


def test_clips_larger_than_a_bin_are_refused_by_name(caplog):
    sizes = plans.sizes([4, 17, 16], 9, 8)
    with pytest.raises(UsageError, match=r"1 of 3 samples have more than 32 patches .*: clip-1 \(17 frames of 9x8\)"):
        Packed(32, (1, 8, 8)).plan(sizes, World(), "mask", plans.key)
    Packed(32, (1, 8, 8), unfit="skip").plan(sizes, World(), "mask", plans.key)
    assert "clip-1" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tokens": 0}, "tokens is 0"),
        ({"tokens": 2**24 + 1}, "tokens is 16777217"),
        ({"tokens": 8, "bins": 0}, "bins is 0"),
        ({"tokens": 8, "window": 0}, "window is 0"),
        ({"tokens": 8, "patch": (1, 2)}, "patch is"),
        ({"tokens": 8, "unfit": "mask"}, "unfit is 'mask'"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments, message):
    with pytest.raises(UsageError, match=message):
        Packed(**arguments)
