"""A replica on several devices computes what it computes on one."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from fastvid.errors import UsageError
from fastvid.models import zoo
from fastvid.models.pipeline import local_devices, spread

CPU = torch.device("cpu")
CLASSES, FRAMES, BATCH, PARTS = 5, 4, 6, 3


def net() -> nn.Module:
    torch.manual_seed(0)
    return zoo.build("tsm-r18", CLASSES, FRAMES, width=8, dropout=0.0).double()


def clips() -> Tensor:
    return torch.randn(BATCH, 3, FRAMES, 32, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def gradients(model: nn.Module, parts: int) -> tuple[Tensor, list[Tensor]]:
    """Logits and gradients of the sum of squared logits, for so many parts one after the other."""
    logits = [model(part) for part in clips().chunk(parts)]
    whole = torch.cat(logits)
    whole.square().sum().backward()  # type: ignore[no-untyped-call]
    return whole.detach(), [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def check(devices: list[torch.device], tolerance: float) -> None:
    plain, row = net(), net()
    names = list(row.state_dict())
    spread(row, devices, PARTS)
    assert list(row.state_dict()) == names
    # A micro-batch is what norm layers see, so the plain net is given the same ones.
    expected, found = gradients(plain, PARTS), gradients(row, 1)
    assert found[0].device == devices[0]
    assert torch.allclose(found[0], expected[0], atol=tolerance)
    assert len(found[1]) == len(expected[1]) > 0
    for mine, theirs in zip(found[1], expected[1], strict=True):
        assert torch.allclose(mine.cpu(), theirs, atol=tolerance)
    plain.eval()
    row.eval()
    assert torch.allclose(row(clips()), plain(clips()), atol=tolerance)


def test_micro_batches_in_a_row_change_no_number() -> None:
    check([CPU, CPU, CPU], 1e-12)


def test_micro_batches_matter_to_norm_layers_so_equality_is_no_accident() -> None:
    assert not torch.allclose(gradients(net(), PARTS)[0], gradients(net(), 1)[0], atol=1e-3)


def test_blocks_lie_in_order_and_their_inputs_come_to_them() -> None:
    model = net()
    meta = torch.device("meta")
    spread(model, [CPU, meta], 1)
    places = [parameter.device.type for parameter in model.parameters()]
    assert places == sorted(places)
    assert {"cpu", "meta"} == set(places)
    came = []
    model.get_submodule("backbone.fc").register_forward_pre_hook(lambda _, inputs: came.append(inputs[0].device.type))
    with pytest.raises(NotImplementedError, match="meta"):
        # Logits of a device without memory cannot come back.
        model(clips())
    assert came == ["meta"]


@pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a CUDA device")
def test_a_cpu_and_a_gpu_share_a_replica() -> None:
    check([CPU, torch.device("cuda", 0)], 1e-9)


def test_more_devices_than_blocks_are_refused() -> None:
    with pytest.raises(UsageError, match="blocks for 2 devices"):
        spread(copy.deepcopy(nn.Sequential(nn.Linear(2, 2))), [CPU, CPU], 1)
    assert local_devices(CPU, 3) == [CPU] * 3
