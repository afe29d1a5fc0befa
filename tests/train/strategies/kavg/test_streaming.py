"""K-step averaging in integers and with an outer optimizer: exact results and bytes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fastvid.errors import StateError
from fastvid.runtime.processes import World
from fastvid.train.loop.strategy import build_strategy
from fastvid.train.ranks import Member
from fastvid.train.strategies.kavg import OuterMomentum
from tests.train import toy
from tests.train.strategies.conftest import Outcomes
from tests.train.strategies.kavg.test_kavg_exact import difference
from tests.train.strategies.kavg.test_kavg_rounds import PARAMETERS, WORDS


def test_an_outer_step_with_nesterov_momentum_is_that_of_torch() -> None:
    torch.manual_seed(0)
    anchor = torch.randn(7, dtype=torch.float64)
    theirs = nn.Parameter(anchor.clone())
    optimizer = torch.optim.SGD([theirs], lr=0.7, momentum=0.9, nesterov=True)
    outer = OuterMomentum("nesterov")
    for _ in range(5):
        mean = anchor + torch.randn(7, dtype=torch.float64)
        theirs.grad = anchor - mean
        optimizer.step()
        outer.step(anchor, mean, 0.1)
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


def test_a_checkpoint_of_several_fragments_is_refused() -> None:
    here = Member(World(), torch.device("cpu"))
    state = build_strategy("kavg", here, {"period": 4}).state_dict()
    build_strategy("kavg", here, {}).load_state_dict({**state, "outer": state["outer"][0]})
    with pytest.raises(StateError, match="written with 2 fragments, which are gone"):
        build_strategy("kavg", here, {}).load_state_dict({**state, "outer": state["outer"] * 2})
