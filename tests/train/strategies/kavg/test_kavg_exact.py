"""K-step averaging in cases with a known exact result: K = 1, quadratics, groups."""

from __future__ import annotations

import pytest
import torch

from tests.train import toy
from tests.train.strategies import lab
from tests.train.strategies.conftest import Outcome, Outcomes


def difference(a: Outcome, b: Outcome) -> float:
    """Return the largest difference of the final weights."""
    return max(float((a["weights"][name] - b["weights"][name]).abs().max()) for name in a["weights"])


def apart(a: Outcome, b: Outcome, step: int) -> float:
    """Return the largest difference of the weights after a step, counted from 1."""
    return float((a["trace"]["weights"][step - 1] - b["trace"]["weights"][step - 1]).abs().max())


@pytest.mark.parametrize("name", ["sgd", "momentum"])
def test_one_step_is_sgd_on_the_whole_batch(outcomes: Outcomes, name: str) -> None:
    whole = outcomes(1, f"ddp-{name}")[0]
    assert whole["trace"]["lr"][0] != whole["trace"]["lr"][-1]
    for rank in outcomes(2, f"k1-{name}"):
        assert max(apart(whole, rank, step) for step in range(1, 2 * lab.STEPS + 1)) < 1e-15
        assert difference(whole, rank) < 1e-15


def test_one_step_is_sgd_also_in_uneven_and_masked_shares(outcomes: Outcomes) -> None:
    # Shares of 2, 3 and 3; and an epoch whose last batch has 2 samples for 3 ranks.
    for name in ("momentum", "masked"):
        whole = outcomes(1, f"ddp-{name}")[0]
        for rank in outcomes(3, f"k1-{name}"):
            assert difference(whole, rank) < 1e-15


def test_one_step_of_adam_is_not_adam_on_the_whole_batch(outcomes: Outcomes) -> None:
    whole, ranks = outcomes(1, "ddp-adam")[0], outcomes(2, "k1-adam")
    assert difference(*ranks) == 0
    assert difference(whole, ranks[0]) > 5e-3


def test_momentum_may_stay_local_or_travel_at_k_1(outcomes: Outcomes) -> None:
    local, average = outcomes(2, "k1-momentum")[0], outcomes(2, "k1-average")[0]
    assert difference(local, average) < 1e-15


@pytest.mark.parametrize("k", [3, 7, 11])
def test_with_additive_noise_every_average_is_synchronous_sgd(outcomes: Outcomes, k: int) -> None:
    whole, ranks = outcomes(1, "ddp-noise")[0], outcomes(4, f"noise-k{k}")
    steps = range(1, toy.EPOCHS * lab.STEPS + 1)
    averaged = [step for step in steps if (step - 1) % lab.STEPS % k == k - 1]
    assert len(averaged) == toy.EPOCHS * (lab.STEPS // k)
    for rank in ranks:
        assert max(apart(whole, rank, step) for step in averaged) < 1e-14
        # Each epoch ends with an average, so the run does too.
        assert difference(whole, rank) < 1e-14
    # Between averages the ranks differ, so the test can fail.
    between = [step for step in steps if (step - 1) % lab.STEPS % k == k - 2]
    assert min(apart(whole, rank, step) for step in between for rank in ranks) > 1e-3


def test_iterates_match_the_closed_form_without_noise(outcomes: Outcomes) -> None:
    for rank in outcomes(4, "still-k11"):
        for step, weights in enumerate(rank["trace"]["weights"], start=1):
            known = (1 - lab.RATE * lab.CURVATURE) ** step * lab.START
            assert float((weights - known).abs().max()) < 1e-14


def test_block_momentum_matches_the_closed_form_of_a_quadratic(outcomes: Outcomes) -> None:
    shrink = (1 - lab.RATE * lab.CURVATURE) ** lab.STEPS
    w, velocity = torch.full_like(shrink, lab.START), torch.zeros_like(shrink)
    for epoch in range(toy.EPOCHS):
        velocity = 0.4 * velocity + (shrink * w - w)
        w = w + 0.7 * velocity
        for rank in outcomes(2, "still-block"):
            assert float((rank["trace"]["weights"][(epoch + 1) * lab.STEPS - 1] - w).abs().max()) < 1e-14


@pytest.mark.parametrize(("name", "plain"), [("groups-equal", "k4"), ("groups-of-1", "k4"), ("groups-of-4", "k2")])
def test_groups_that_change_nothing_equal_kavg(outcomes: Outcomes, name: str, plain: str) -> None:
    """Groups that average as often as all ranks, of one rank, and one group of all with its period."""
    for mine, other in zip(outcomes(4, name), outcomes(4, plain), strict=True):
        assert difference(mine, other) == 0


def test_weights_agree_within_groups_and_differ_between_them(outcomes: Outcomes) -> None:
    ranks = outcomes(4, "groups-of-2")
    for step in (2, 6, 13):
        assert apart(ranks[0], ranks[1], step) == apart(ranks[2], ranks[3], step) == 0
        assert apart(ranks[0], ranks[2], step) > 1e-6
    for step in (4, 8, 15):
        assert apart(ranks[0], ranks[1], step) == apart(ranks[0], ranks[3], step) == 0
    for step in (1, 3, 5, 12):
        assert apart(ranks[0], ranks[1], step) > 1e-6
    # The result also differs from K-AVG with either of the two periods.
    assert difference(ranks[0], outcomes(4, "k4")[0]) > 1e-6
    assert difference(ranks[0], outcomes(4, "k2")[0]) > 1e-6
