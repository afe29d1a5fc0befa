"""The averager computes means over ranks, of exactly the tensors it was given; ranks are threads here."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastvid.train.strategies import average as wire
from fastvid.train.strategies.average import CODECS, Averager, Traffic, moments, reset_moments, statistics

RANKS = 4


class Sums:
    """Replaces `dist.all_reduce`: adds the messages of all threads in the dtype in which they were sent."""

    def __init__(self, ranks: int) -> None:
        self.barrier = threading.Barrier(ranks)
        self.messages: list[tuple[Tensor, Any]] = []
        self.sent: list[torch.dtype] = []
        self._lock = threading.Lock()

    def all_reduce(self, message: Tensor, group: Any = None) -> None:
        with self._lock:
            self.messages.append((message.clone(), group))
            self.sent.append(message.dtype)
        self.barrier.wait(30)
        total = sum(other for other, _ in self.messages)
        assert len({group for _, group in self.messages}) == 1
        self.barrier.wait(30)
        message.copy_(total)
        self.messages.clear()
        self.barrier.wait(30)


@pytest.fixture
def sums(monkeypatch: pytest.MonkeyPatch) -> Sums:
    replacement = Sums(RANKS)
    monkeypatch.setattr(wire.dist, "all_reduce", replacement.all_reduce)
    return replacement


HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def reduce(
    values: list[list[Tensor]], *, anchor: Tensor | None = None, group: Any = None, codec: str | None = None
) -> Any:
    """Average the tensors of each rank: a matrix that may be sent in halves, a vector that may not, one word."""
    ranks = [
        Averager(own[:1], own[1:2], words=1, traffic=Traffic(), codec=None if codec is None else CODECS[codec]())
        for own in values
    ]

    def run(number: int) -> None:
        rank, own = ranks[number], values[number]
        rank.collect()
        rank.words.copy_(own[-1])
        rank.reduce(len(ranks), group, "average", anchor)
        rank.spread()

    with ThreadPoolExecutor(len(ranks)) as pool:
        list(pool.map(run, range(len(ranks))))
    return ranks


def drawn() -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        [torch.randn(2, 3, generator=generator), torch.randn(4, generator=generator), torch.randn(1)]
        for _ in range(RANKS)
    ]


def test_every_tensor_and_word_becomes_the_mean_in_place_in_one_message(sums: Sums) -> None:
    values = drawn()
    means = [torch.stack(tensors).mean(0) for tensors in zip(*values, strict=True)]
    addresses = [tensor.data_ptr() for own in values for tensor in own]
    ranks = reduce(values)
    assert [tensor.data_ptr() for own in values for tensor in own] == addresses
    for rank, own in zip(ranks, values, strict=True):
        torch.testing.assert_close(own[0], means[0])
        torch.testing.assert_close(own[1], means[1])
        torch.testing.assert_close(rank.words, means[2])
        assert torch.equal(rank.parameters, own[0].flatten())
        assert rank._traffic.as_dict() == {"average": {"calls": 1, "bytes": 11 * 4}}


@pytest.mark.parametrize("name", HALVES)
def test_halves_send_differences_of_parameters_and_everything_else_whole(sums: Sums, name: str) -> None:
    anchor = 1000 + torch.arange(6.0)
    values = drawn()
    for own in values:
        own[0] += anchor.view(2, 3)
    means = [torch.stack(tensors).mean(0) for tensors in zip(*values, strict=True)]
    ranks = reduce(values, anchor=anchor, codec=name)
    # As differences, values near 1 are sent; a half itself has steps of 0.5 to 8 near 1000.
    torch.testing.assert_close(values[0][0], means[0], rtol=0, atol=0.02)
    for rank, own in zip(ranks, values, strict=True):
        assert torch.equal(own[0], values[0][0])
        torch.testing.assert_close(own[1], means[1])
        torch.testing.assert_close(rank.words, means[2])
        counted = rank._traffic.as_dict()
        assert counted == {"average": {"calls": 1, "bytes": 6 * 2}, "average_rest": {"calls": 1, "bytes": 5 * 4}}
    assert sums.sent == [HALVES[name]] * RANKS + [torch.float32] * RANKS
    assert torch.equal(anchor, 1000 + torch.arange(6.0))


def test_halves_do_not_overflow_in_the_sum(sums: Sums) -> None:
    values = [[torch.full((2, 3), 40_000.0), torch.zeros(4), torch.zeros(1)] for _ in range(RANKS)]
    reduce(values, anchor=torch.zeros(6), codec="fp16")
    assert all(torch.equal(own[0], torch.full((2, 3), 40_000.0)) for own in values)


def test_parameters_alone_make_one_message_in_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = []

    def all_reduce(message: Tensor, group: Any) -> None:
        sent.append((message.clone(), group))

    monkeypatch.setattr(wire.dist, "all_reduce", all_reduce)
    one = Averager([torch.ones(3)], [], codec=CODECS["bf16"]())
    one.collect()
    one.reduce(2, "a group", "average", torch.zeros(3))  # type: ignore[arg-type]
    assert [(message.tolist(), message.dtype, group) for message, group in sent] == [
        ([0.5] * 3, torch.bfloat16, "a group")
    ]


def test_one_rank_sends_nothing_and_keeps_its_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire.dist, "all_reduce", lambda *_, **__: pytest.fail("a message was sent"))
    alone = Averager([torch.arange(3.0)], [torch.ones(2)], words=1)
    alone.collect()
    alone.reduce(1, None, "average")
    assert alone.buffer.tolist() == [0, 1, 2, 1, 1, 0]
    assert not alone._traffic.as_dict()


def test_averaging_leaves_no_gradient_history(sums: Sums) -> None:
    values = [[nn.Parameter(torch.ones(2, 3)), torch.ones(4), torch.ones(1)] for _ in range(RANKS)]
    reduce(values)  # a parameter that requires a gradient cannot be changed in place otherwise
    assert all(own[0].grad_fn is None for own in values)
    learnable = nn.Parameter(torch.zeros(6))
    ranks = reduce(values, anchor=learnable, codec="fp16")
    assert not any(rank.buffer.requires_grad for rank in ranks)


def test_statistics_are_the_floating_point_buffers() -> None:
    norm = nn.BatchNorm1d(2)
    assert [id(buffer) for buffer in statistics(nn.Sequential(norm))] == [id(norm.running_mean), id(norm.running_var)]


@pytest.mark.parametrize(
    ("kind", "each"), [(torch.optim.Adam, 2), (torch.optim.SGD, 0), (torch.optim.Adagrad, 1), (torch.optim.Adadelta, 2)]
)
def test_moments_have_the_shape_of_their_parameter_and_are_no_counters(kind: Any, each: int) -> None:
    # The scalar parameter has the shape of a step counter.
    parameters = [nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.ones(4))]
    optimizer = kind(parameters[:2], lr=0.1)
    optimizer.add_param_group({"params": parameters[2:]})
    sum(parameter.sum() for parameter in parameters).backward()
    optimizer.step()
    optimizer.state[parameters[0]]["note"] = torch.ones(7)
    optimizer.state[parameters[0]]["text"] = "plain"
    found = moments(optimizer)
    assert [tensor.shape for tensor in found] == [p.shape for p in parameters for _ in range(each)]
    steps = {id(state.get("step")) for state in optimizer.state.values()}
    assert not [tensor for tensor in found if id(tensor) in steps]


def test_a_parameter_without_a_step_has_no_moments() -> None:
    optimizer = torch.optim.Adam([nn.Parameter(torch.ones(2))])
    assert moments(optimizer) == []


def test_a_reset_zeroes_moments_and_counters_in_place() -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([parameter])
    parameter.sum().backward()
    optimizer.step()
    state = optimizer.state[parameter]
    state["text"] = "plain"
    before = {name: id(value) for name, value in state.items()}
    assert float(state["step"]) == 1
    reset_moments(optimizer)
    assert {name: id(value) for name, value in state.items()} == before
    assert float(state["step"]) == 0
    assert all(not value.any() for value in moments(optimizer))
    assert len(moments(optimizer)) == 2
