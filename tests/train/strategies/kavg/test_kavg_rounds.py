"""K-step averaging: when ranks communicate, what they send, and what an average contains."""

import pytest
import torch
from torch import nn

from fastvid.errors import UsageError
from fastvid.runtime.processes import World
from fastvid.train.loop.strategy import build_strategy
from fastvid.train.ranks import Member
from fastvid.train.strategies.average import Averager
from tests.train import toy
from tests.train.strategies import lab
from tests.train.strategies.conftest import ALONE, Outcome, Outcomes
from tests.train.strategies.kavg.test_kavg_exact import PARAMETERS, WORDS, apart, difference

STEPS = toy.EPOCHS * lab.STEPS


def said(rank: Outcome, numbers: int) -> list[tuple[int, str]]:
    """Return the steps done before each all-reduce of that many elements, and its dtype."""
    return [(done, dtype) for done, size, dtype in rank["trace"]["reduced"] if size == numbers]


def test_ranks_average_after_k_steps_and_never_before(outcomes: Outcomes) -> None:
    first, second = outcomes(2, "k4")
    met = [step for step in range(1, STEPS + 1) if apart(first, second, step) == 0]
    assert met == [epoch * lab.STEPS + step for epoch in range(toy.EPOCHS) for step in (4, 8)]
    # The last round of each epoch ends with the epoch.
    assert difference(first, second) == 0


def test_there_is_one_all_reduce_per_round(outcomes: Outcomes) -> None:
    for rank in outcomes(2, "count-k11"):
        # floor(steps / K) messages of the model's size.
        ends = [epoch * lab.STEPS for epoch in range(1, toy.EPOCHS + 1)]
        assert said(rank, PARAMETERS + WORDS) == [(end - 1, "torch.float64") for end in ends]
        assert len(ends) == STEPS // 11
        assert rank["traffic"]["average"] == {"calls": STEPS // 11, "bytes": STEPS // 11 * (PARAMETERS + WORDS) * 8}
        # Whatever else is summed is small: at the end of an epoch, lineage and evaluation.
        others = [(done, size) for done, size, _ in rank["trace"]["reduced"] if size != PARAMETERS + WORDS]
        assert {done for done, _ in others} <= set(ends)
        assert max(size for _, size in others) <= 5
        assert rank["traffic"].keys() == {"average", "control"}


def test_an_epoch_that_k_does_not_divide_ends_with_one_more_average(outcomes: Outcomes) -> None:
    for rank in outcomes(2, "count-k5"):
        rounds = [epoch * lab.STEPS + step for epoch in range(toy.EPOCHS) for step in (4, 9, 11)]
        assert [done for done, _ in said(rank, PARAMETERS + WORDS)] == rounds
        # Local momentum is averaged for the checkpoint of each epoch.
        assert [done for done, _ in said(rank, PARAMETERS)] == [lab.STEPS * end for end in range(1, toy.EPOCHS + 1)]
        assert rank["traffic"]["settle"]["calls"] == toy.EPOCHS


def test_statistics_of_norms_are_the_mean_of_the_ranks(outcomes: Outcomes) -> None:
    first, second = outcomes(2, "k4-norm")
    one, other = first["trace"]["buffers"], second["trace"]["buffers"]
    for step in range(1, lab.STEPS):
        same = bool(torch.equal(one[step - 1], other[step - 1]))
        assert same == (step % 4 == 0)
    for name in ("1.running_mean", "1.running_var"):
        assert torch.equal(first["weights"][name], second["weights"][name])
    assert first["score"] == second["score"]


def test_moments_stay_local(outcomes: Outcomes) -> None:
    for step in (4, 8):
        first, second = (rank["trace"]["moments"][step - 1] for rank in outcomes(2, "k4"))
        assert not torch.equal(first, second)


def test_parameters_stay_where_they_are(outcomes: Outcomes) -> None:
    for name in ("k4", "count-int8", "k4-nesterov"):
        assert not any(rank["moved"] for rank in outcomes(2, name))


def test_an_average_holds_what_has_no_gradient_and_any_layout() -> None:
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


def test_sync_first_local_later(outcomes: Outcomes) -> None:
    ddp, ranks = outcomes(2, "ddp-plain"), outcomes(2, "post-local")
    switch = 2 * lab.STEPS
    for step in range(1, switch + 1):
        assert apart(ranks[0], ddp[0], step) == apart(ranks[1], ddp[0], step) == 0
    met = [step for step in range(switch + 1, STEPS + 1) if apart(ranks[0], ranks[1], step) == 0]
    assert met == [epoch * lab.STEPS + step for epoch in (2, 3, 4) for step in (4, 8)]
    assert difference(ranks[0], ddp[0]) > 1e-6
    assert ranks[0]["lineage"] == ddp[0]["lineage"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"period": 0}, "period is 0"),
        ({"period": "4@0,8@2"}, "period is '4@0,8@2', expected an integer"),
        ({"compress": "fp16"}, "compress is 'fp16'"),
        ({"outer": "adam"}, "outer is 'adam'"),
        ({"fragments": 2}, "no option 'fragments'"),
        ({"batch": "noise", "compress": "int8"}, "batch=noise does not support"),
        ({"outer": "nesterov", "outer_momentum": 1.0}, "outer_momentum is 1.0"),
        ({"outer_momentum": 0.5}, "no effect with outer=none"),
        ({"outer": "nesterov", "outer_lr": 0}, "outer_lr is 0"),
        ({"local_after": -1}, "local_after is -1"),
        ({"k": 8}, "no option 'k'"),
    ],
)
def test_an_invalid_option_names_the_allowed_values(options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        build_strategy("kavg", Member(World(1, 4), torch.device("cpu")), options)


def test_none_on_the_command_line_is_the_name_none() -> None:
    made = build_strategy("kavg", ALONE, {"outer": None, "compress": None})
    assert made.state_dict() == build_strategy("kavg", ALONE, {}).state_dict()
