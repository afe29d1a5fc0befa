"""A replica on several devices computes the same as on one device."""

import copy

import pytest
import torch
from torch import Tensor, nn

from fastvid.errors import UsageError
from fastvid.models import zoo
from fastvid.models.pipeline import local_devices, place_on_devices

CPU = torch.device("cpu")
CLASSES, FRAMES, BATCH, PARTS = 5, 4, 6, 3


def net() -> nn.Module:
    torch.manual_seed(0)
    return zoo.build("tsm-r18", CLASSES, FRAMES, width=8, dropout=0.0).double()


def clips() -> Tensor:
    return torch.randn(BATCH, 3, FRAMES, 32, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def gradients(model: nn.Module, parts: int) -> tuple[Tensor, list[Tensor]]:
    """Return logits and gradients of the sum of squared logits, computed in `parts` micro-batches."""
    logits = [model(part) for part in clips().chunk(parts)]
    whole = torch.cat(logits)
    whole.square().sum().backward()  # type: ignore[no-untyped-call]
    return whole.detach(), [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def check(devices: list[torch.device], tolerance: float) -> None:
    plain, row = net(), net()
    names = list(row.state_dict())
    place_on_devices(row, devices, PARTS)
    assert list(row.state_dict()) == names
    # Norm layers see one micro-batch at a time, so pass the same ones to the plain net.
    expected, found = gradients(plain, PARTS), gradients(row, 1)
    assert found[0].device == devices[0]
    assert torch.allclose(found[0], expected[0], atol=tolerance)
    assert len(found[1]) == len(expected[1]) > 0
    for mine, theirs in zip(found[1], expected[1], strict=True):
        assert torch.allclose(mine.cpu(), theirs, atol=tolerance)
    plain.eval()
    row.eval()
    assert torch.allclose(row(clips()), plain(clips()), atol=tolerance)


def test_pipeline_equals_plain_micro_batches_on_cpus() -> None:
    check([CPU, CPU, CPU], 1e-12)


def test_blocks_are_placed_in_order_and_inputs_are_moved() -> None:
    model = net()
    meta = torch.device("meta")
    place_on_devices(model, [CPU, meta], 1)
    places = [parameter.device.type for parameter in model.parameters()]
    assert places == sorted(places)
    assert {"cpu", "meta"} == set(places)
    came = []
    model.get_submodule("backbone.fc").register_forward_pre_hook(lambda _, inputs: came.append(inputs[0].device.type))
    with pytest.raises(NotImplementedError, match="meta"):
        # Logits cannot be copied from the meta device.
        model(clips())
    assert came == ["meta"]


@pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a CUDA device")
def test_pipelining_works_across_cpu_and_gpu() -> None:
    check([CPU, torch.device("cuda", 0)], 1e-9)


def test_more_devices_than_blocks_raise() -> None:
    with pytest.raises(UsageError, match="blocks for 2 devices"):
        place_on_devices(copy.deepcopy(nn.Sequential(nn.Linear(2, 2))), [CPU, CPU], 1)
    assert local_devices(CPU, 3) == [CPU] * 3
