"""K-step averaging: when ranks communicate, what they send, and what an average contains."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bench.strategies.averaging import efficiency
from fastvid.errors import UsageError
from fastvid.runtime.processes import World
from fastvid.train.loop.strategy import build_strategy
from fastvid.train.ranks import Member
from fastvid.train.strategies.average import Averager, moments, reset_moments
from tests.train import toy
from tests.train.strategies import lab
from tests.train.strategies.conftest import ALONE, Outcome, Outcomes
from tests.train.strategies.kavg.test_kavg_exact import apart, difference

PARAMETERS = sum(parameter.numel() for parameter in toy.net().parameters())
WORDS = 2  # stop and save
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
        # Whatever else is said is small: once before the first step, who has the newest checkpoint; then at the end of
        # an epoch, lineage and evaluation.
        others = [(done, size) for done, size, _ in rank["trace"]["reduced"] if size != PARAMETERS + WORDS]
        assert {done for done, _ in others} <= {0, *ends}
        assert [done for done, _ in others].count(0) == 1
        assert max(size for _, size in others) <= 5
        assert rank["traffic"].keys() == {"average", "control"}


def test_time_with_costly_messages_follows_the_counted_rounds(outcomes: Outcomes) -> None:
    t_step, t_comm = 0.25, 3.0
    for name, k in (("k1-sgd", 1), ("count-k11", 11)):
        rank = outcomes(2, name)[0]
        steps, rounds = len(rank["trace"]["samples"]), len(said(rank, PARAMETERS + WORDS))
        assert t_step * steps / (t_step * steps + t_comm * rounds) == pytest.approx(
            efficiency(t_comm, t_step, k), rel=1e-14
        )


def test_an_epoch_that_k_does_not_divide_ends_with_one_more_average(outcomes: Outcomes) -> None:
    for rank in outcomes(2, "count-k5"):
        rounds = [epoch * lab.STEPS + step for epoch in range(toy.EPOCHS) for step in (4, 9, 11)]
        assert [done for done, _ in said(rank, PARAMETERS + WORDS)] == rounds
        # Local momentum is averaged for the checkpoint of each epoch.
        assert [done for done, _ in said(rank, PARAMETERS)] == [lab.STEPS * end for end in range(1, toy.EPOCHS + 1)]
        assert rank["traffic"]["settle"]["calls"] == toy.EPOCHS


def test_travelling_moments_cost_their_bytes(outcomes: Outcomes) -> None:
    rank = outcomes(2, "count-average")[0]
    assert rank["traffic"]["average"] == {"calls": 5, "bytes": 5 * (2 * PARAMETERS + WORDS) * 8}
    assert "settle" not in rank["traffic"]


def test_halves_carry_differences(outcomes: Outcomes) -> None:
    # K is an epoch, at whose end moments are averaged anyway: so this is the same run in full precision.
    exact = outcomes(2, "count-average")[0]
    errors = []
    for name, dtype in (("fp16", "torch.float16"), ("bf16", "torch.bfloat16")):
        ranks = outcomes(2, f"count-{name}")
        for rank in ranks:
            assert [entry for entry in said(rank, PARAMETERS) if entry[1] == dtype] == [
                (end * lab.STEPS - 1, dtype) for end in range(1, toy.EPOCHS + 1)
            ]
            assert rank["traffic"]["average"]["bytes"] == 5 * PARAMETERS * 2
            assert rank["traffic"]["average_rest"]["bytes"] == 5 * WORDS * 8
        # Rounded, equally on all ranks.
        assert difference(*ranks) == 0
        errors.append(difference(ranks[0], exact))
    # bfloat16 has three bits less.
    assert 0 < 3 * errors[0] < errors[1] < 1e-2


def test_statistics_of_norms_are_the_mean_of_the_ranks(outcomes: Outcomes) -> None:
    first, second = outcomes(2, "k4-norm")
    one, other = first["trace"]["buffers"], second["trace"]["buffers"]
    for step in range(1, lab.STEPS):
        same = bool(torch.equal(one[step - 1], other[step - 1]))
        assert same == (step % 4 == 0)
    for name in ("1.running_mean", "1.running_var"):
        assert torch.equal(first["weights"][name], second["weights"][name])
    assert first["score"] == second["score"]


def test_moments_stay_travel_or_go(outcomes: Outcomes) -> None:
    local, average, reset = (outcomes(2, name) for name in ("k4", "k4-average", "k4-reset"))
    for step in (4, 8):
        mine = [[rank["trace"]["moments"][step - 1] for rank in ranks] for ranks in (local, average, reset)]
        assert not torch.equal(*mine[0])
        assert torch.equal(*mine[1])
        assert mine[1][0].abs().max() > 0
        assert mine[2][0].abs().max() == mine[2][1].abs().max() == 0
    assert difference(local[0], average[0]) > 1e-6


def test_a_reset_makes_the_next_step_the_first_one() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    start = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(1, 3)).square().sum().backward()
        optimizer.step()

    step()
    first = {name: value.clone() for name, value in model.state_dict().items()}
    step()
    assert [tensor.shape for tensor in moments(optimizer)] == [(2, 3), (2, 3), (2,), (2,)]
    reset_moments(optimizer)
    model.load_state_dict(start)
    step()
    assert all(torch.equal(value, first[name]) for name, value in model.state_dict().items())


def test_parameters_stay_where_they_are(outcomes: Outcomes) -> None:
    for name in ("k4", "count-fp16", "k4-block"):
        assert not any(rank["moved"] for rank in outcomes(2, name))


def test_an_average_holds_what_has_no_gradient_and_any_layout() -> None:
    torch.manual_seed(0)
    frozen = nn.Parameter(torch.randn(3), requires_grad=False)
    last = nn.Parameter(torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last))
    scalar = torch.tensor(2.0)
    averager = Averager([frozen, last], [scalar], words=1)
    before = [tensor.detach().clone() for tensor in (frozen, last, scalar)]
    averager.collect()
    averager.buffer.mul_(3)
    averager.spread()
    for tensor, old in zip((frozen, last, scalar), before, strict=True):
        assert torch.equal(tensor, old * 3)
    assert last.is_contiguous(memory_format=torch.channels_last)
    assert len(averager.parameters) == 3 + 120


def test_outer_steps(outcomes: Outcomes) -> None:
    plain, block0, block, slowmo = (outcomes(2, f"k4{name}")[0] for name in ("", "-block0", "-block", "-slowmo"))
    # Momentum 0 and rate 1 give the mean; with a constant learning rate both kinds are equal.
    assert difference(plain, block0) < 1e-13
    assert difference(block, slowmo) < 1e-13
    assert difference(block, plain) > 1e-3


def test_sync_first_local_later(outcomes: Outcomes) -> None:
    ddp, ranks = outcomes(2, "ddp-plain"), outcomes(2, "post-local")
    switch = 2 * lab.STEPS
    for step in range(1, switch + 1):
        assert apart(ranks[0], ddp[0], step) == apart(ranks[1], ddp[0], step) == 0
    met = [step for step in range(switch + 1, STEPS + 1) if apart(ranks[0], ranks[1], step) == 0]
    assert met == [epoch * lab.STEPS + step for epoch in (2, 3, 4) for step in (4, 8)]
    assert difference(ranks[0], ddp[0]) > 1e-6
    assert ranks[0]["lineage"] == ddp[0]["lineage"]


def test_scheduled_rounds(outcomes: Outcomes) -> None:
    ranks = outcomes(2, "scheduled")
    met = [step for step in range(1, STEPS + 1) if apart(ranks[0], ranks[1], step) == 0]
    every = list(range(1, 2 * lab.STEPS + 1))
    third = [epoch * lab.STEPS + step for epoch in (2, 3) for step in (3, 6, 9)]
    assert met == every + third + [STEPS]


def test_adaptive_rounds_get_shorter_alike_on_all_ranks(outcomes: Outcomes) -> None:
    ranks = outcomes(2, "adaptive")
    assert difference(*ranks) == 0
    met = [[done for done, _ in said(rank, PARAMETERS + WORDS)] for rank in ranks]
    assert met[0] == met[1]
    lengths = [
        [after - before for before, after in zip([0, *met[0]], met[0], strict=False) if after // lab.STEPS == epoch]
        for epoch in range(toy.EPOCHS)
    ]
    longest = [max(found) for found in lengths if found]
    assert longest[0] == 7  # 8 steps, the first of which begins at 0
    assert longest[-1] < longest[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"period": 0}, "period is 0"),
        ({"period": "4@1"}, "epochs from 0"),
        ({"period": "4@0,8@0"}, "ascending"),
        ({"period": "often"}, "period is 'often'"),
        ({"adapt": "noise"}, "adapt is 'noise'"),
        ({"adapt_epochs": 0}, "adapt_epochs is 0"),
        ({"moments": "global"}, "moments is 'global'"),
        ({"compress": "int2"}, "compress is 'int2'"),
        ({"outer": "adam"}, "outer is 'adam'"),
        ({"fragments": 2}, "no option 'fragments'"),
        ({"compress": "int8", "group_size": 2}, "group_size cannot be combined"),
        ({"batch": "noise", "compress": "int8"}, "batch=noise does not support"),
        ({"outer": "block", "outer_momentum": 1.0}, "outer_momentum is 1.0"),
        ({"outer_momentum": 0.5}, "no effect with outer=none"),
        ({"outer": "block", "outer_lr": 0}, "outer_lr is 0"),
        ({"group_size": 3}, "world size 4"),
        ({"group_size": "rack"}, "group_size is 'rack'"),
        ({"group_size": 2, "group_period": 0}, "group_period is 0"),
        ({"local_after": -1}, "local_after is -1"),
        ({"k": 8}, "no option 'k'"),
    ],
)
def test_an_invalid_option_names_the_allowed_values(options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        build_strategy("kavg", Member(World(1, 4), torch.device("cpu")), options)


def test_none_on_the_command_line_is_the_name_none() -> None:
    made = build_strategy("kavg", ALONE, {"outer": None, "compress": None, "adapt": None})
    assert made.state_dict() == build_strategy("kavg", ALONE, {}).state_dict()
    with pytest.raises(UsageError, match="moments is None"):
        build_strategy("kavg", ALONE, {"moments": None})


def test_a_node_is_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    build_strategy("kavg", Member(World(0, 8), torch.device("cpu")), {"group_size": "node"})
    with pytest.raises(UsageError, match="world size 6"):
        build_strategy("kavg", Member(World(0, 6), torch.device("cpu")), {"group_size": "node"})
    assert ALONE.world.size == 1
