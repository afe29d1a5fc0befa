"""Parameters and multiply-adds against mmaction2's published numbers, each with the rules of its counter.

Sources: open-mmlab/mmaction2, ``configs/recognition/*/metafile.yml`` of 0.x (tsm at 0483d0b, i3d at 0717b3e, slowonly
at 0dee6be), whose numbers are exact; READMEs of 1.x (tsm, i3d, slowonly, tsn), rounded. Their counters: mmcv
``cnn/utils/flops_counter.py`` at 0956a5b for 0.x; mmengine ``analysis/jit_handles.py`` at 176756c, run by
``tools/analysis_tools/get_flops.py`` at a86c84e on the features without the last layer, for 1.x.
"""

from collections import Counter

import pytest
import torch
from torch import nn

from fastvid.models.zoo import build, model_cost


def on_meta(name: str, num_classes: int, num_frames: int, **options: object) -> nn.Module:
    with torch.device("meta"):
        return build(name, num_classes, num_frames, **options).eval()


def other_counts(model: nn.Module, num_frames: int, size: int) -> Counter[str]:
    """Number of multiply-adds or elements that other counters include, by kind."""
    counts: Counter[str] = Counter()

    def see(module: nn.Module, inputs: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
        if isinstance(module, nn.Conv2d | nn.Conv3d):
            counts["conv"] += out.numel() * module.weight[0].numel()
            counts["conv bias"] += 0 if module.bias is None else out.numel()
        elif isinstance(module, nn.Linear):
            counts["last layer"] += out.numel() * module.in_features
        elif isinstance(module, nn.BatchNorm2d | nn.BatchNorm3d):
            counts["norm"] += out.numel()
        elif isinstance(module, nn.ReLU | nn.ReLU6):
            counts["relu"] += out.numel()
        elif isinstance(module, nn.MaxPool2d | nn.MaxPool3d | nn.AdaptiveAvgPool2d | nn.AdaptiveAvgPool3d):
            counts["pool"] += inputs[0].numel()

    handles = [module.register_forward_hook(see) for module in model.modules()]
    with torch.no_grad():
        model(torch.empty(1, 3, num_frames, size, size, device="meta"))
    for handle in handles:
        handle.remove()
    return counts


# name, classes, frames, crop, parameters, mmaction2 0.x multiply-adds
EXACT = [
    ("tsm-r50", 400, 8, 224, 24_327_632, 32_965_562_368),
    ("tsm-r50", 400, 16, 224, 24_327_632, 65_931_124_736),
    ("tsm-r50", 48, 8, 224, 23_606_384, 32_959_795_200),
    ("i3d-r50-3x1x1", 400, 32, 256, 28_043_472, 43_564_040_192),
    ("slowonly-r50", 400, 4, 256, 32_454_096, None),
    ("slowonly-r50", 700, 8, 256, 33_068_796, None),
    ("tsm-r50", 174, 8, 224, 23_864_558, None),  # "23.87M", also printed in the rows of 400 classes
    ("tsm-r101", 174, 8, 224, 42_856_686, None),  # "42.86M"
]


@pytest.mark.parametrize(("name", "classes", "frames", "crop", "parameters", "flops"), EXACT)
def test_counts_equal_exact_numbers_of_mmaction2(name, classes, frames, crop, parameters, flops):
    model = on_meta(name, classes, frames)
    assert model_cost(model, (1, 3, frames, crop, crop)).parameters == parameters
    if flops is not None:
        counts = other_counts(model, frames, crop)
        assert sum(counts.values()) + counts["norm"] == flops


def test_shift_adds_no_cost_and_cost_is_linear_in_frames():
    shifted = model_cost(on_meta("tsm-r50", 400, 8), (1, 3, 8, 224, 224))
    plain = model_cost(on_meta("tsn-r50", 400, 8), (1, 3, 8, 224, 224))
    one = model_cost(on_meta("tsn-r50", 400, 1), (1, 3, 1, 224, 224))
    assert shifted.parameters == plain.parameters == 24_327_632
    assert shifted.macs == plain.macs == 8 * one.macs == 32_703_643_648


def test_model_cost_does_not_change_the_model():
    model = build("tsm-r18", 5, 4, width=8).train()
    for parameter in model.backbone.conv1.parameters():
        parameter.requires_grad_(False)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    counted = model_cost(model, (2, 3, 4, 32, 32))
    assert model.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    counts = other_counts(model.to("meta"), 4, 32)
    assert counted.macs == 2 * (counts["conv"] + counts["last layer"])
    assert counted.parameters - counted.trainable == 8 * 3 * 7 * 7
    assert counted.training_flops == 6 * counted.macs
    assert str(counted) == f"0.18 M parameters, {counted.macs / 1e9:.2f} G multiply-adds at 2x3x4x32x32"


def test_model_cost_works_with_one_value_per_channel_and_keeps_modes():
    model = build("tsn-r18", 2, 1, width=4).train()
    model.backbone.bn1.eval()
    assert model_cost(model, (1, 3, 1, 32, 32)).macs > 0
    assert model.backbone.layer1.training
    assert not model.backbone.bn1.training
