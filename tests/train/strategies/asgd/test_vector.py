"""A model as a flat vector: what is copied where, on the CPU and from a GPU."""

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from fastvid.train.strategies.asgd.weights import Vector
from fastvid.train.strategies.average import statistics

CUDA = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"))
DEVICES = pytest.mark.parametrize("device", ["cpu", CUDA])


def made(device: str) -> tuple[nn.Module, Vector]:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Conv3d(3, 8, 3), nn.BatchNorm3d(8), nn.Flatten(), nn.Linear(8, 5))
    # Strides that are not those of the vector, and half precision.
    net = layers.to(memory_format=torch.channels_last_3d)
    net[3].bfloat16()
    net.to(device)
    groups = [{"params": [*net[0].parameters(), net[3].weight], "weight_decay": 0.1, "lr_mult": 2.0}]
    groups += [{"params": [*net[1].parameters(), net[3].bias], "weight_decay": 0.0}]
    return net, Vector(SGD(groups, lr=0.1), net)


def in_order(net: nn.Module, *, gradients: bool = False) -> Tensor:
    """Return parameters or gradients by group, then statistics, element by element."""
    order = [*net[0].parameters(), net[3].weight, *net[1].parameters(), net[3].bias]  # type: ignore[index]
    values = [parameter.grad if gradients else parameter.detach() for parameter in order]
    parts = [torch.zeros_like(p) if value is None else value for p, value in zip(order, values, strict=True)]
    return torch.cat([part.float().cpu().contiguous().reshape(-1) for part in [*parts, *statistics(net)]])


@DEVICES
def test_a_model_and_its_vector_are_copies_of_each_other(device: str) -> None:
    net, vector = made(device)
    values = vector.collect(vector.buffer())
    assert torch.equal(values, in_order(net))
    assert [(part.stop - part.start, part.lr_mult, part.averaged) for part in vector.sections] == [
        (8 * 3 * 27 + 8 + 40, 2.0, False), (8 + 8 + 5, 1.0, False), (16, 1.0, True)
    ]  # fmt: skip
    other = (torch.arange(vector.size) % 64).float()  # exact in bfloat16
    vector.spread(other, statistics=False)
    assert torch.equal(in_order(net)[:-16], other[:-16])
    assert torch.equal(in_order(net)[-16:], values[-16:])
    vector.spread(other)
    assert torch.equal(in_order(net), other)


@DEVICES
def test_gradients_are_copied_with_zeros_where_there_are_none(device: str) -> None:
    net, vector = made(device)
    for parameter in [*net[0].parameters(), *net[1].parameters()]:  # type: ignore[index]
        parameter.grad = torch.randn_like(parameter)
    into = vector.buffer().fill_(7)
    assert torch.equal(vector.gradients(into), in_order(net, gradients=True))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_vectors_of_a_gpu_are_pinned() -> None:
    _, vector = made("cuda")
    assert vector.buffer().is_pinned()
    assert vector.collect(vector.buffer()).device.type == "cpu"
