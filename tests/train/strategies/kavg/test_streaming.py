"""K-step averaging in fragments, with a delay, in integers, and with an outer optimizer: exact results and bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fastvid.errors import StateError
from fastvid.runtime.processes import World
from fastvid.train.loop.strategy import build_strategy
from fastvid.train.parts.optim import Schedule
from fastvid.train.parts.replica import Replica
from fastvid.train.ranks import Member
from fastvid.train.strategies.kavg.fragments import Fragment, split
from fastvid.train.strategies.kavg.outer import OuterMomentum
from fastvid.train.strategies.kavg.strategy import Kavg
from fastvid.train.strategies.shared import wire
from fastvid.train.strategies.shared.wire import Traffic
from tests.train import toy
from tests.train.strategies import lab
from tests.train.strategies.conftest import Outcomes
from tests.train.strategies.kavg.test_kavg_exact import apart, difference
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


def test_the_mean_of_late_averages_follows_its_recurrence(outcomes: Outcomes) -> None:
    whole, ranks = outcomes(1, "ddp-still")[0]["trace"]["weights"], outcomes(2, "late-noise")
    steps = len(whole)
    # Gradients are linear in the weights, so the noise of a step does not depend on the strategy.
    before = [torch.full_like(whole[0], lab.START), *whole[:-1]]
    noise = [(w - v) / lab.RATE - lab.CURVATURE * w for w, v in zip(before, whole, strict=True)]
    mean, sent, due = before[0], None, None
    expected: list[Tensor] = []
    for step in range(steps):
        mean = mean - lab.RATE * (lab.CURVATURE * mean + noise[step])
        of_epoch = step % lab.STEPS + 1
        if due == step:
            assert sent is not None
            mean, due = 0.25 * mean + 0.75 * sent, None
        if of_epoch in (5, 10):
            sent, due = mean, step + 2
        expected.append(mean)
        if of_epoch == lab.STEPS:  # what is in flight is adopted
            assert due == step + 1
            assert sent is not None
            mean, due = 0.25 * mean + 0.75 * sent, None
    found = [(one + other) / 2 for one, other in zip(*(rank["trace"]["weights"] for rank in ranks), strict=True)]
    assert max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True)) < 1e-14
    # The ranks have no common model within an epoch, but one at its end.
    assert min(apart(*ranks, step) for step in (5, 7, 10, 11)) > 1e-3
    assert difference(*ranks) == 0
    assert float((torch.cat([w.flatten() for w in ranks[0]["weights"].values()]) - mean).abs().max()) < 1e-14


def test_fragments_are_sent_at_their_own_steps_in_their_own_bytes(outcomes: Outcomes) -> None:
    sizes = [sum(p.numel() for p in part) for part in split(list(toy.net().parameters()), 2)]
    assert sum(sizes) == PARAMETERS
    assert min(sizes) > 0
    for rank in outcomes(2, "count-parts"):
        sent = [(done, size) for done, size, _ in rank["trace"]["reduced"] if size in (sizes[0], sizes[1] + WORDS)]
        of_epoch = [(2, 0), (4, 1), (7, 0), (9, 1)]  # steps done before the third, the fifth and so on
        plan = [
            (epoch * lab.STEPS + done, sizes[part] + WORDS * part)
            for epoch in range(toy.EPOCHS)
            for done, part in (*of_epoch, (lab.STEPS, 0), (lab.STEPS, 1))
        ]
        assert sent == plan
        assert rank["traffic"]["average"]["bytes"] == 8 * sum(size for _, size in plan)
    assert difference(*outcomes(2, "count-parts")) == 0


def test_no_part_exceeds_its_share_by_more_than_a_parameter() -> None:
    for sizes in ([5, 5, 5, 5], [100, 1, 1, 1], [1, 2, 3, 4, 5, 6, 7], [3]):
        parameters = [torch.zeros(size) for size in sizes]
        for count in range(1, 6):
            parts = split(parameters, count)
            assert [id(p) for part in parts for p in part] == [id(p) for p in parameters]
            assert len(parts) == count
            assert all(sum(p.numel() for p in part) <= sum(sizes) / count + max(sizes) for part in parts)
    even = split([torch.zeros(10) for _ in range(8)], 4)
    assert [sum(p.numel() for p in part) for part in even] == [20] * 4  # a fourth


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


class Held:
    """A message that arrives only when it is released."""

    def __init__(self, log: list[str]) -> None:
        self._log = log

    def wait(self) -> None:
        self._log.append("waited for")


def test_steps_go_on_while_an_average_travels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []

    def all_reduce(message: Tensor, group: object = None, *, async_op: bool = False) -> Held:
        assert async_op
        log.append("sent")
        return Held(log)

    monkeypatch.setattr(wire.dist, "all_reduce", all_reduce)
    monkeypatch.setattr("fastvid.train.loop.strategy.broadcast_tensors", lambda _: None)
    model = nn.Linear(2, 1)
    config = toy.toy_config(tmp_path)
    schedule = Schedule.of(config.optim, epochs=8, samples_per_epoch=80, global_batch_size=8)
    replica = Replica(model, torch.optim.SGD(model.parameters(), lr=0.1), schedule)
    strategy = build_strategy("kavg", Member(World(0, 2), torch.device("cpu")), {"period": 4, "delay": 3})
    assert isinstance(strategy, Kavg)
    strategy.prepare(replica)
    strategy._steps = 4
    for step in range(1, 9):
        log.append(f"step {step}")
        strategy.agree(torch.zeros(2, dtype=torch.int64))
        strategy.maybe_sync(replica, torch.zeros(4, dtype=torch.float64))
    assert log == [
        "step 1", "step 2", "step 3", "step 4", "sent", "step 5", "step 6", "step 7", "waited for", "step 8", "sent",
    ]  # fmt: skip


def test_a_checkpoint_of_other_fragments_is_refused() -> None:
    here = Member(World(), torch.device("cpu"))
    state = build_strategy("kavg", here, {"fragments": 2, "period": 4}).state_dict()
    with pytest.raises(StateError, match="written with 2 fragments, this run has 1") as error:
        build_strategy("kavg", here, {}).load_state_dict(state)
    assert error.value.hint == "set sync_options.fragments=2"


def test_a_fragment_without_compression_withholds_nothing() -> None:
    part = Fragment([torch.ones(3)], OuterMomentum("none"), "none", Traffic(), anchored=True)
    part.release(2)  # no message, which would fail without a process group
    assert part.anchor is not None
    assert part.anchor.tolist() == [1, 1, 1]
