"""One client exactly equals plain training, for any optimizer, number of shards and lease size."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam

from fastvid.train.strategies.asgd.client import GradientPusher
from fastvid.train.strategies.asgd.weights import OptimizerFactory, WeightRange
from tests.train.strategies.asgd.kit import SGD_RULE, client_of, serving, weights_of

RULES: dict[str, OptimizerFactory] = {
    "sgd": SGD_RULE,
    "momentum": functools.partial(SGD, lr=0.0, momentum=0.9, nesterov=True),
    "adagrad": functools.partial(Adagrad, lr=0.0),
    "adam": functools.partial(Adam, lr=0.0, amsgrad=True),
}
SECTIONS = (WeightRange(0, 12, 1.0, 0.01), WeightRange(12, 17, 2.0, 0.0), WeightRange(17, 37, 1.0, 0.01))
SIZE, STEPS = 37, 30


def net(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [
        torch.randn(section.stop - section.start, generator=generator, dtype=torch.float64).to(dtype)
        for section in SECTIONS
    ]


def gradient(weights: Tensor, step: int) -> Tensor:
    """Return the gradient of a noisy function that is not quadratic."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(8, SIZE, generator=generator, dtype=torch.float64).to(weights.dtype)
    leaf = weights.clone().requires_grad_()
    (found,) = torch.autograd.grad(torch.log1p((x @ leaf - 1).square()).mean(), leaf)
    return found


def rate(step: int) -> float:
    return 0.1 / (1 + step / 7)


def plain(rule: OptimizerFactory, steps: int = STEPS, dtype: torch.dtype = torch.float64) -> Tensor:
    """Train with a plain PyTorch optimizer, with one tensor per section."""
    parameters = [nn.Parameter(part) for part in net(dtype)]
    optimizer = rule(
        [
            {"params": [parameter], "weight_decay": section.weight_decay}
            for parameter, section in zip(parameters, SECTIONS, strict=True)
        ]
    )
    for step in range(steps):
        flat = torch.cat([parameter.detach() for parameter in parameters])
        for group, section in zip(optimizer.param_groups, SECTIONS, strict=True):
            group["lr"] = rate(step) * section.lr_mult
        parts = torch.split(gradient(flat, step), [parameter.numel() for parameter in parameters])
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.grad = part.clone()
        optimizer.step()
    return torch.cat([parameter.detach() for parameter in parameters])


def served(rule: OptimizerFactory, shards: int, *, dtype: torch.dtype = torch.float64, **loop: Any) -> Tensor:
    with serving(SIZE, shards=shards, rule=rule, sections=SECTIONS, dtype=dtype) as server:
        with client_of(server, SIZE) as client:
            weights = torch.cat(net(dtype))
            client.join(weights)
            worker = GradientPusher(client, weights, **loop)
            for step in range(STEPS):
                worker.step(gradient(weights, step), rate(step))
            worker.settle()
            assert set(worker.staleness) <= ({0, 1} if loop.get("overlap") else {0})
        return weights_of(server)


@pytest.mark.parametrize("rule", RULES)
# 37 = 3 * 9 + 10: the last of four shards is longer, and shards end inside sections.
@pytest.mark.parametrize("shards", [1, 4])
def test_one_client_equals_plain_training_bit_for_bit(rule: str, shards: int) -> None:
    assert torch.equal(served(RULES[rule], shards), plain(RULES[rule]))


def test_one_client_equals_plain_training_in_single_precision() -> None:
    assert torch.equal(served(SGD_RULE, 2, dtype=torch.float32), plain(SGD_RULE, dtype=torch.float32))


def test_overlapping_transfers_neither_lose_nor_change_gradients() -> None:
    """The server's weights are the initial ones minus every gradient of the client, in order."""
    given = []
    with serving(SIZE, shards=3) as server:
        with client_of(server, SIZE) as client:
            weights = torch.cat(net())
            client.join(weights)
            worker = GradientPusher(client, weights, overlap=True)
            reused = torch.empty(SIZE, dtype=torch.float64)
            for step in range(STEPS):
                # The caller overwrites its buffer while the push of the previous contents is in flight.
                reused.copy_(gradient(weights, step))
                given.append(reused.clone())
                worker.step(reused, 0.1)
            worker.settle()
        final = weights_of(server)
    expected = torch.cat(net())
    for each in given:
        expected.add_(each, alpha=-0.1)
    assert torch.equal(final, expected)
    assert sum(worker.staleness.values()) == STEPS
    # A gradient is computed while the previous push is in flight: one version stale, except the first.
    assert worker.staleness == {0: 1, 1: STEPS - 1}
