"""Activation checkpointing changes only memory use."""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from fastvid.models.zoo import build

NETS = [("tsm-r18", 4, {"width": 8}), ("tsm-r50", 4, {"width": 8, "shift_inplace": True}), ("i3d-r18", 8, {"width": 8})]


def train(model: nn.Module, video: Tensor, steps: int = 2) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        model(video).square().sum().backward()
        optimizer.step()


@pytest.mark.parametrize(("name", "frames", "options"), NETS)
def test_recompute_keeps_weights_and_running_statistics_bit_equal(name, frames, options):
    plain = build(name, 3, frames, dropout=0.0, **options)
    lean = build(name, 3, frames, dropout=0.0, recompute=True, **options)
    lean.load_state_dict(plain.state_dict())
    video = torch.randn(2, 3, frames, 32, 32)
    train(plain, video)
    train(lean, video)
    after = lean.state_dict()
    for key, tensor in plain.state_dict().items():
        assert torch.equal(tensor, after[key]), key


def test_plain_checkpointing_updates_running_statistics_twice(monkeypatch):
    monkeypatch.setattr("fastvid.models.resnet._copied_buffers", lambda block: nullcontext())
    plain = build("tsm-r18", 3, 4, width=8, dropout=0.0)
    harmed = build("tsm-r18", 3, 4, width=8, dropout=0.0, recompute=True)
    harmed.load_state_dict(plain.state_dict())
    video = torch.randn(2, 3, 4, 32, 32)
    train(plain, video, steps=1)
    train(harmed, video, steps=1)
    counters = [model.backbone.layer1[0].bn1.num_batches_tracked.item() for model in (plain, harmed)]
    assert counters == [1, 2]


def test_recompute_saves_only_block_inputs():
    kept: list[int] = []

    def bytes_kept(**options: object) -> int:
        kept.clear()
        model = build("tsm-r50", 3, 4, width=16, **options)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
            model(torch.randn(1, 3, 4, 64, 64))
        return sum(kept)

    assert bytes_kept(recompute=True) < 0.6 * bytes_kept()


# The compiler instantiates autograd functions while it traces them, against torch's own advice.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.soak
def test_compiles_as_one_graph_with_the_same_result():
    model = build("tsm-r18", 3, 2, width=8, dropout=0.0, shift_inplace=True, recompute=True)
    eager = copy.deepcopy(model)
    video = torch.randn(2, 3, 2, 32, 32)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for one in (compiled, eager):
        one(video).square().sum().backward()
    for (key, parameter), expected in zip(model.named_parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad, msg=key)
    after = eager.state_dict()
    for key, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, after[key], msg=key)
