"""K-step averaging in cases with a known exact result: K = 1, quadratics, integers, the outer optimizer."""

import pytest
import torch
from torch import nn

from fastvid.errors import StateError
from fastvid.train.loop.strategy import build_strategy
from fastvid.train.strategies.kavg import OuterMomentum
from tests.train import toy
from tests.train.strategies import lab
from tests.train.strategies.conftest import ALONE, Outcome, Outcomes

PARAMETERS = sum(parameter.numel() for parameter in toy.net().parameters())
WORDS = 2  # stop and save


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


def test_an_outer_step_with_nesterov_momentum_is_that_of_torch() -> None:
    torch.manual_seed(0)
    anchor = torch.randn(7, dtype=torch.float64)
    theirs = nn.Parameter(anchor.clone())
    optimizer = torch.optim.SGD([theirs], lr=0.7, momentum=0.9, nesterov=True)
    outer = OuterMomentum()
    for _ in range(5):
        mean = anchor + torch.randn(7, dtype=torch.float64)
        theirs.grad = anchor - mean
        optimizer.step()
        outer.step(anchor, mean)
        anchor = mean
        assert torch.equal(anchor, theirs.detach())


@pytest.mark.parametrize(("name", "share"), [("int8", 1.0), ("int4", 0.5)])
def test_integers_take_a_byte_or_half_a_byte_and_ranks_agree(outcomes: Outcomes, name: str, share: float) -> None:
    ranks, exact = outcomes(2, f"count-{name}"), outcomes(2, "count-k11")
    blocks = 1  # the toy net has one, so the first rank owns nothing and the second one all of it
    for rank in ranks:
        sent = -(-int(PARAMETERS * 2 * share) // 2) + 4 * blocks
        assert rank["traffic"]["average"] == {"calls": toy.EPOCHS, "bytes": toy.EPOCHS * sent}
        assert rank["traffic"]["average_rest"]["bytes"] == toy.EPOCHS * WORDS * 8
    assert difference(*ranks) == 0
    assert 0 < difference(ranks[0], exact[0]) < 0.05


def test_what_compression_withheld_is_in_every_checkpoint(outcomes: Outcomes) -> None:
    # K is an epoch; the average at its end is followed by what it withheld, in full precision: nothing is lost.
    for name in ("count-int8", "count-int4"):
        for rank in outcomes(2, name):
            assert rank["traffic"]["settle"] == {"calls": toy.EPOCHS, "bytes": toy.EPOCHS * PARAMETERS * 8}
            assert difference(rank, outcomes(2, "count-k11")[0]) < 1e-12


def test_states_of_earlier_versions_load_and_those_of_several_fragments_are_refused() -> None:
    made = build_strategy("kavg", ALONE, {"outer": "nesterov"})
    velocity = torch.arange(3.0)
    former = {"period": {"first": None, "factor": 1.0, "looked": 0.0}, "loss": {"gathered": [0.0, 0.0]}}
    for outer in ({"velocity": velocity, "inner_lr": 0.1}, [{"velocity": velocity, "inner_lr": 0.1}]):
        made.load_state_dict({**former, "outer": outer})
        assert torch.equal(made.state_dict()["outer"][0]["velocity"], velocity)
    with pytest.raises(StateError, match="written with 2 fragments, which are gone"):
        made.load_state_dict({"outer": made.state_dict()["outer"] * 2})
