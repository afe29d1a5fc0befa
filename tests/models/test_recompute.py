"""Activation checkpointing changes only memory use."""

import copy

import pytest
import torch
from torch import Tensor, nn

from fastvid.models.zoo import build


def train(model: nn.Module, video: Tensor) -> dict[str, Tensor]:
    """Return a net's state after two steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(2):
        optimizer.zero_grad()
        model(video).square().sum().backward()
        optimizer.step()
    return model.state_dict()


LEAN = [
    ("tsm-r18", {"recompute": True}),
    ("tsm-r50", {"recompute": True}),
    ("i3d-r18", {"recompute": True}),
]


@pytest.mark.parametrize(("name", "options"), LEAN)
def test_lean_nets_keep_weights_and_running_statistics_bit_equal(name, options):
    frames = 8 if name.startswith("i3d") else 4
    plain = build(name, 3, frames, width=8, dropout=0.0)
    lean = build(name, 3, frames, width=8, dropout=0.0, **options)
    lean.load_state_dict(plain.state_dict())
    video = torch.randn(2, 3, frames, 32, 32)
    after = train(lean, video)
    for key, tensor in train(plain, video).items():
        assert torch.equal(tensor, after[key]), key


def kept_for_backward(name: str, **options: object) -> int:
    """Return the bytes of distinct storages, other than weights, that autograd saves between forward and backward."""
    net = build(name, 3, 4, width=16, **options)
    own = {tensor.untyped_storage().data_ptr() for tensor in (*net.parameters(), *net.buffers())}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = net(torch.randn(2, 3, 4, 64, 64))
    assert out.requires_grad
    return sum(kept.values())


def test_recompute_saves_only_block_inputs():
    plain, unshifted = kept_for_backward("tsm-r50"), kept_for_backward("tsn-r50")
    assert kept_for_backward("tsm-r50", recompute=True) < 0.6 * plain
    assert plain > 1.15 * unshifted  # one more input per block


# The compiler instantiates autograd functions while it traces them, against torch's own advice.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.soak
def test_compiles_as_one_graph_with_the_same_result():
    model = build("tsm-r18", 3, 2, width=8, dropout=0.0, recompute=True)
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
