"""Batches that grow while a run trains: when, by how much, and the same samples as with fixed ones."""

import math
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastvid.runtime.processes import World
from fastvid.train.loop.strategy import Strategy, build_strategy
from fastvid.train.ranks import Member
from fastvid.train.strategies.adaptive_batch import Noise, Scheduled, make_policy
from fastvid.train.strategies.average import NoiseMeter
from tests.train import toy
from tests.train.strategies import lab

EPOCH = lab.STEPS * toy.BATCH


def sizes(rank):
    """Return the samples of each step."""
    samples = [*rank["trace"]["samples"], rank["samples"]]
    return [after - before for before, after in pairwise(samples)]


def expected(milestones, largest=10**9):
    """Return the sizes of a run whose batch doubles at epochs; the rest of an epoch is a multiple of the first."""
    found, samples = [], 0
    while samples < toy.EPOCHS * EPOCH:
        wanted = toy.BATCH
        for epoch in milestones:
            if samples >= round(epoch * EPOCH) and wanted * 2 <= largest:
                wanted *= 2
        left = EPOCH - samples % EPOCH
        found.append(min(wanted, left))
        samples += found[-1]
    return found


@pytest.mark.parametrize(("world", "name"), [(1, "ddp"), (2, "ddp"), (3, "ddp"), (2, "kavg")])
def test_the_batch_doubles_where_the_rate_would_have_halved(outcomes, world, name):
    plain = outcomes(2, "k4")[0]
    for rank in outcomes(world, f"batch-{name}"):
        assert sizes(rank) == expected((1.0, 2.5))
        assert set(sizes(rank)) >= {8, 16, 32}
        # The same samples at the same positions of each epoch as with a fixed batch.
        assert rank["samples"] == plain["samples"]
        assert rank["lineage"] == plain["lineage"]
        warm = round(0.5 * EPOCH)
        for samples, rate in zip(rank["trace"]["samples"], rank["trace"]["lr"], strict=True):
            # The ratio of rate to batch size follows the schedule, so the rate itself is constant after warm-up.
            assert rate == pytest.approx(0.05 if samples >= warm else 0.05 * (0.1 + 0.9 * samples / warm), rel=1e-14)


def test_growing_batches_give_the_same_result_for_any_world_size(outcomes):
    one = outcomes(1, "batch-ddp")[0]
    for world in (2, 3):
        for rank in outcomes(world, "batch-ddp"):
            assert toy.difference(one, rank) < 1e-9


@pytest.mark.parametrize("name", ["whole-noise", "again-noise"])
def test_noise_grows_the_batch_equally_on_all_ranks(outcomes, name):
    first, second = outcomes(2, name)
    assert sizes(first) == sizes(second)
    assert max(sizes(first)) == 32
    assert toy.difference(first, second) == 0
    assert first["lineage"] == outcomes(2, "k4")[0]["lineage"]


def truth():
    """Return the noise scale of the quadratic at the start, for clips drawn from all samples of the toy."""
    clips = torch.stack([toy.clip(sample).flatten()[: lab.DIMENSIONS] for sample in range(toy.NUM_SAMPLES)])
    signal = (lab.CURVATURE * lab.START + clips.mean(0)).square().sum()
    return float(clips.var(0).sum() / signal)


@pytest.mark.parametrize("name", ["ddp", "k1", "k5"])
def test_the_measured_noise_scale_matches_the_known_one(outcomes, name):
    scales = [rank["noise_scale"] for rank in outcomes(2, f"meter-{name}")]
    assert scales[0] == scales[1]
    # Samples are drawn without replacement, so the mean over an epoch differs from that of independent draws.
    assert scales[0] == pytest.approx(truth(), rel=0.15)


@given(st.integers(0, 2**32 - 1), st.lists(st.integers(1, 9), min_size=2, max_size=5))
def test_the_noise_estimate_is_unbiased_for_uneven_shares(seed, shares):
    # For every gradient G and noise S the expectation is known, so S and G2 are put in without drawing anything.
    generator = torch.Generator().manual_seed(seed)
    signal, noise = (0.1 + torch.rand(2, generator=generator, dtype=torch.float64)).tolist()
    batch, ranks = sum(shares), len(shares)
    meter = NoiseMeter(ranks, torch.device("cpu"), lambda values: lambda: values)
    for share in shares:
        part = torch.tensor(share / batch, dtype=torch.float64)
        own = torch.tensor(signal + noise / share, dtype=torch.float64) * (ranks * part) ** 2
        meter.add(own, torch.tensor(signal + noise / batch, dtype=torch.float64), part, batch)
    assert meter.scale() == pytest.approx(noise / signal, rel=1e-9)


def test_steps_are_counted_and_gathered_once_and_one_rank_measures_nothing():
    totals, one = [], torch.tensor(1.0)

    def total(values):
        totals.append(values)
        return lambda: values

    meter, alone = (NoiseMeter(ranks, torch.device("cpu"), total) for ranks in (2, 1))
    meter.gather()
    assert (meter.count, totals) == (0, [])
    for made in (meter, alone):
        made.add(one, one, torch.tensor(0.5), 8)
        made.gather()
        made.gather()
    assert (meter.count, alone.count, len(totals)) == (1, 0, 1)


def test_the_noise_scale_is_zero_infinite_or_nan_without_noise_or_signal():
    def scale(*steps):
        meter = NoiseMeter(2, torch.device("cpu"), lambda values: lambda: values)
        for own, mean in steps:
            meter.add(torch.tensor(own), torch.tensor(mean), torch.tensor(0.5), 8)
        return meter.scale()

    assert scale((1.0, 1.0), (1.0, 1.0)) == 0
    assert math.isnan(scale((0.0, 0.0)))
    assert math.isinf(scale((1.0, 0.5)))
    # Overflowed steps are not measured.
    assert 0 < scale((1.0, 0.9)) == scale((1.0, 0.9), (math.inf, math.inf), (1.0, math.nan)) < math.inf


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=20), st.integers(2, 4), st.integers(8, 600))
def test_sizes_never_decrease_or_exceed_the_maximum(scales, growth, largest):
    policy = Noise(growth, largest)
    policy.begin(8, EPOCH, ())
    found = [policy.size(0)]
    for step, scale in enumerate(scales):
        policy.observe_noise(scale, step)
        found.append(policy.size(step))
    assert found[0] == 8
    assert found == sorted(found)
    assert found[-1] <= largest
    assert set(found) <= {8 * growth**times for times in range(8)}


def test_batch_at_is_parsed_as_epochs():
    policy = Scheduled(2, None, at="1,2.5")
    policy.begin(8, 88, (7,))
    assert [policy.size(samples) for samples in (0, 87, 88, 219, 220)] == [8, 8, 16, 16, 32]


class Unmeasured(Strategy):
    """Neither wraps a model nor measures anything."""

    def prepare(self, replica):
        pass


def test_conflicting_options_are_refused():
    two = Member(World(0, 2), torch.device("cpu"))
    unmeasured = build_strategy(f"{__name__}:Unmeasured", two, {"batch": "noise"})
    with toy.refused("does not measure the gradient noise"):
        unmeasured.prepare(SimpleNamespace(forward=None))
    with toy.refused("no epochs to grow at"):
        make_policy("schedule").begin(8, EPOCH, ())
    with toy.refused("batch_max is 4"):
        make_policy("noise", largest=4).begin(8, EPOCH, ())
