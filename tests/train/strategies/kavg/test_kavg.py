"""Averaging every K steps: exact against one process and formulas, rounds and options, resuming."""

import pytest
import torch
from torch import nn

from fastvid.errors import StateError
from fastvid.train.loop.strategy import build_strategy
from fastvid.train.strategies.average import Averager
from fastvid.train.strategies.kavg import OuterMomentum
from tests.train import toy
from tests.train.strategies import lab, scenarios

PARAMETERS = sum(parameter.numel() for parameter in toy.net().parameters())
WORDS = 2  # stop and save


def apart(a, b, step):
    """Return the largest difference of the weights after a step, counted from 1."""
    return float((a["trace"]["weights"][step - 1] - b["trace"]["weights"][step - 1]).abs().max())


@pytest.mark.parametrize("name", ["sgd", "momentum"])
def test_one_step_is_sgd_on_the_whole_batch(outcomes, name):
    whole = outcomes(1, f"ddp-{name}")[0]
    assert whole["trace"]["lr"][0] != whole["trace"]["lr"][-1]
    for rank in outcomes(2, f"k1-{name}"):
        assert max(apart(whole, rank, step) for step in range(1, 2 * lab.STEPS + 1)) < 1e-15
        assert toy.difference(whole, rank) < 1e-15


def test_one_step_is_sgd_also_in_uneven_and_masked_shares(outcomes):
    # Shares of 2, 3 and 3; and an epoch whose last batch has 2 samples for 3 ranks.
    for name in ("momentum", "masked"):
        whole = outcomes(1, f"ddp-{name}")[0]
        for rank in outcomes(3, f"k1-{name}"):
            assert toy.difference(whole, rank) < 1e-15


def test_one_step_of_adam_is_not_adam_on_the_whole_batch(outcomes):
    whole, ranks = outcomes(1, "ddp-adam")[0], outcomes(2, "k1-adam")
    assert toy.difference(*ranks) == 0
    assert toy.difference(whole, ranks[0]) > 5e-3


@pytest.mark.parametrize("k", [3, 7, 11])
def test_with_additive_noise_every_average_is_synchronous_sgd(outcomes, k):
    whole, ranks = outcomes(1, "ddp-noise")[0], outcomes(4, f"noise-k{k}")
    steps = range(1, toy.EPOCHS * lab.STEPS + 1)
    averaged = [step for step in steps if (step - 1) % lab.STEPS % k == k - 1]
    assert len(averaged) == toy.EPOCHS * (lab.STEPS // k)
    for rank in ranks:
        assert max(apart(whole, rank, step) for step in averaged) < 1e-14
        # Each epoch ends with an average, so the run does too.
        assert toy.difference(whole, rank) < 1e-14
    # Between averages the ranks differ, so the test can fail.
    between = [step for step in steps if (step - 1) % lab.STEPS % k == k - 2]
    assert min(apart(whole, rank, step) for step in between for rank in ranks) > 1e-3


def test_iterates_match_the_closed_form_without_noise(outcomes):
    for rank in outcomes(4, "still-k11"):
        for step, weights in enumerate(rank["trace"]["weights"], start=1):
            known = (1 - lab.RATE * lab.CURVATURE) ** step * lab.START
            assert float((weights - known).abs().max()) < 1e-14


def test_an_outer_step_with_nesterov_momentum_is_that_of_torch():
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
def test_integers_take_a_byte_or_half_a_byte_and_ranks_agree(outcomes, name, share):
    ranks, exact = outcomes(2, f"count-{name}"), outcomes(2, "count-k11")
    blocks = 1  # the toy net has one, so the first rank owns nothing and the second one all of it
    for rank in ranks:
        sent = -(-int(PARAMETERS * 2 * share) // 2) + 4 * blocks
        # The levels, then their means to every rank.
        assert rank["trace"]["exchanged"][::2] == [sent] * toy.EPOCHS
        assert len(said(rank, WORDS)) >= toy.EPOCHS
        assert not said(rank, PARAMETERS + WORDS)
    assert toy.difference(*ranks) == 0
    assert 0 < toy.difference(ranks[0], exact[0]) < 0.05


def test_what_compression_withheld_is_in_every_checkpoint(outcomes):
    # K is an epoch; the average at its end is followed by what it withheld, in full precision: nothing is lost.
    for name in ("count-int8", "count-int4"):
        for rank in outcomes(2, name):
            assert len(said(rank, PARAMETERS)) == toy.EPOCHS
            assert toy.difference(rank, outcomes(2, "count-k11")[0]) < 1e-12


def test_states_of_earlier_versions_load_and_those_of_several_fragments_are_refused():
    made = build_strategy("kavg", toy.ALONE, {"outer": "nesterov"})
    velocity = torch.arange(3.0)
    former = {"period": {"first": None, "factor": 1.0, "looked": 0.0}, "loss": {"gathered": [0.0, 0.0]}}
    made.load_state_dict({**former, "outer": [{"velocity": velocity, "inner_lr": 0.1}]})
    assert torch.equal(made.state_dict()["outer"][0]["velocity"], velocity)
    with pytest.raises(StateError, match="written with 2 fragments, which are gone"):
        made.load_state_dict({"outer": made.state_dict()["outer"] * 2})


STEPS = toy.EPOCHS * lab.STEPS


def said(rank, numbers):
    """Return the steps done before each all-reduce of that many elements, and its dtype."""
    return [(done, dtype) for done, size, dtype in rank["trace"]["reduced"] if size == numbers]


def test_ranks_average_after_k_steps_and_never_before(outcomes):
    first, second = outcomes(2, "k4")
    met = [step for step in range(1, STEPS + 1) if apart(first, second, step) == 0]
    assert met == [epoch * lab.STEPS + step for epoch in range(toy.EPOCHS) for step in (4, 8)]
    # The last round of each epoch ends with the epoch.
    assert toy.difference(first, second) == 0


def test_there_is_one_all_reduce_per_round(outcomes):
    for rank in outcomes(2, "count-k11"):
        # floor(steps / K) messages of the model's size.
        ends = [epoch * lab.STEPS for epoch in range(1, toy.EPOCHS + 1)]
        assert said(rank, PARAMETERS + WORDS) == [(end - 1, "torch.float64") for end in ends]
        assert len(ends) == STEPS // 11
        # Whatever else is summed is small: at the end of an epoch, lineage and evaluation.
        others = [(done, size) for done, size, _ in rank["trace"]["reduced"] if size != PARAMETERS + WORDS]
        assert {done for done, _ in others} <= set(ends)
        assert max(size for _, size in others) <= 5


def test_an_epoch_that_k_does_not_divide_ends_with_one_more_average(outcomes):
    for rank in outcomes(2, "count-k5"):
        rounds = [epoch * lab.STEPS + step for epoch in range(toy.EPOCHS) for step in (4, 9, 11)]
        assert [done for done, _ in said(rank, PARAMETERS + WORDS)] == rounds
        # Local momentum is averaged for the checkpoint of each epoch.
        assert [done for done, _ in said(rank, PARAMETERS)] == [lab.STEPS * end for end in range(1, toy.EPOCHS + 1)]


def test_statistics_of_norms_are_the_mean_of_the_ranks(outcomes):
    first, second = outcomes(2, "k4-norm")
    one, other = first["trace"]["buffers"], second["trace"]["buffers"]
    for step in range(1, lab.STEPS):
        same = bool(torch.equal(one[step - 1], other[step - 1]))
        assert same == (step % 4 == 0)
    for name in ("1.running_mean", "1.running_var"):
        assert torch.equal(first["weights"][name], second["weights"][name])
    assert first["score"] == second["score"]


def test_moments_stay_local(outcomes):
    for step in (4, 8):
        first, second = (rank["trace"]["moments"][step - 1] for rank in outcomes(2, "k4"))
        assert not torch.equal(first, second)


def test_parameters_stay_where_they_are(outcomes):
    for name in ("k4", "count-int8", "k4-nesterov"):
        assert not any(rank["moved"] for rank in outcomes(2, name))


def test_an_average_holds_what_has_no_gradient_and_any_layout():
    torch.manual_seed(0)
    frozen = nn.Parameter(torch.randn(3), requires_grad=False)
    last = nn.Parameter(torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last))
    scalar = torch.tensor(2.0)
    averager = Averager([frozen, last], [scalar], 1, words=1)
    before = [tensor.detach().clone() for tensor in (frozen, last, scalar)]
    averager.collect()
    averager.buffer.mul_(3)
    averager.spread()
    for tensor, old in zip((frozen, last, scalar), before, strict=True):
        assert torch.equal(tensor, old * 3)
    assert last.is_contiguous(memory_format=torch.channels_last)
    assert len(averager.parameters) == 3 + 120


def test_sync_first_local_later(outcomes):
    ddp, ranks = outcomes(2, "ddp-plain"), outcomes(2, "post-local")
    switch = 2 * lab.STEPS
    for step in range(1, switch + 1):
        assert apart(ranks[0], ddp[0], step) == apart(ranks[1], ddp[0], step) == 0
    met = [step for step in range(switch + 1, STEPS + 1) if apart(ranks[0], ranks[1], step) == 0]
    assert met == [epoch * lab.STEPS + step for epoch in (2, 3, 4) for step in (4, 8)]
    assert toy.difference(ranks[0], ddp[0]) > 1e-6
    assert ranks[0]["lineage"] == ddp[0]["lineage"]


def test_none_on_the_command_line_is_the_name_none():
    made = build_strategy("kavg", toy.ALONE, {"outer": None, "compress": None})
    assert made.state_dict() == build_strategy("kavg", toy.ALONE, {}).state_dict()


@pytest.mark.parametrize("name", scenarios.STATEFUL)
def test_a_resumed_run_equals_an_uninterrupted_run(outcomes, name):
    whole, again = outcomes(2, f"whole-{name}"), outcomes(2, f"again-{name}")
    for mine, undisturbed in zip(again, whole, strict=True):
        # It stopped inside an epoch.
        assert mine["stopped_at"] % 88
        assert toy.difference(mine, undisturbed) == 0
        assert mine["lineage"] == undisturbed["lineage"]
        assert mine["samples"] == undisturbed["samples"]
        assert mine["score"] == undisturbed["score"]
        # The steps after the stop, one by one.
        steps = len(mine["trace"]["samples"])
        assert steps < len(undisturbed["trace"]["samples"])
        assert mine["trace"]["samples"] == undisturbed["trace"]["samples"][-steps:]
        assert mine["trace"]["lr"] == undisturbed["trace"]["lr"][-steps:]


def test_a_stop_takes_effect_at_the_next_average(outcomes):
    # Requested after 12 steps; K is 4 and an epoch has 11 steps, so the next average is after 11 + 4.
    for rank in outcomes(2, "again-k4"):
        assert rank["stopped_at"] == 15 * toy.BATCH


def test_checkpoints_are_written_only_at_averages(outcomes):
    rank = outcomes(2, "whole-k4")[0]
    # Local momentum is averaged right before each.
    saved = [
        done for done, size, _ in rank["trace"]["reduced"] if size == sum(p.numel() for p in toy.net().parameters())
    ]
    assert saved == [epoch * lab.STEPS + step for epoch in range(toy.EPOCHS) for step in (4, 8, 11)]


@pytest.mark.parametrize("world", [1, 3])
def test_another_world_resumes_with_the_same_samples_after_a_kill(outcomes, world):
    undisturbed, ranks = outcomes(2, "batch-kavg")[0], outcomes(world, "resumed")
    fixed = outcomes(2, "k4")[0]
    for rank in ranks:
        assert rank["lineage"] == undisturbed["lineage"] == fixed["lineage"]
        assert rank["samples"] == undisturbed["samples"] == toy.EPOCHS * 88
        assert toy.difference(rank, ranks[0]) == 0
        # Batches and learning rates of the remaining steps equal those of the uninterrupted run.
        steps = len(rank["trace"]["samples"])
        assert rank["trace"]["samples"] == undisturbed["trace"]["samples"][-steps:]
        assert rank["trace"]["lr"] == undisturbed["trace"]["lr"][-steps:]
    # The last average before the kill, in the second epoch.
    assert 88 < ranks[0]["trace"]["samples"][0] < 2 * 88
