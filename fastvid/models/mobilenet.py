"""MobileNetV2 over frames (Sandler et al. 2018), with torchvision's module names (``mobilenetv2.py``)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypedDict

import torch
from torch import Tensor, nn

from fastvid.errors import UsageError
from fastvid.models.resnet import recomputed

# Expansion, channels, blocks, stride of the first block; Sandler et al. 2018, table 2.
STAGES = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
STEM_CHANNELS = 32
LAST_CHANNELS = 1280


class InvertedResidual(nn.Module):
    """1x1 expansion, depthwise 3x3, 1x1 projection: [N, C, H, W] to [N, C', H / stride, W / stride]."""

    def __init__(self, in_channels: int, channels: int, stride: int, expansion: int) -> None:
        super().__init__()
        hidden = in_channels * expansion
        self.expands = expansion != 1
        self.skips = stride == 1 and in_channels == channels
        self.recompute = False
        expand = [_conv_norm(in_channels, hidden, 1)] if self.expands else []
        self.conv = nn.Sequential(
            *expand,
            _conv_norm(hidden, hidden, 3, stride=stride, groups=hidden),
            nn.Conv2d(hidden, channels, 1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        if self.recompute and torch.is_grad_enabled():
            return recomputed(self, self._run, x)
        return self._run(x)

    def _run(self, x: Tensor) -> Tensor:
        out: Tensor = self.conv(x)
        return x + out if self.skips else out


class MobileNetV2Options(TypedDict, total=False):
    """Options of `MobileNetV2` that nets built on it take."""

    width_mult: float
    in_channels: int
    recompute: bool


class MobileNetV2(nn.Module):
    """MobileNetV2: frames [N, in_channels, H, W] to logits [N, num_classes].

    `width_mult`: factor on the channels of every layer, rounded to multiples of 8; the last convolution keeps at
    least 1280.
    """

    head_name = "classifier.1"

    def __init__(
        self,
        *,
        num_classes: int = 1000,
        width_mult: float = 1.0,
        in_channels: int = 3,
        dropout: float = 0.2,
        head_std: float = 0.01,
        recompute: bool = False,
    ) -> None:
        super().__init__()
        for name, value in (("num_classes", num_classes), ("width_mult", width_mult), ("in_channels", in_channels)):
            if value <= 0:
                raise UsageError(f"{name} must be positive, not {value}")
        channels = _rounded(STEM_CHANNELS * width_mult)
        layers: list[nn.Module] = [_conv_norm(in_channels, channels, 3, stride=2)]
        for expansion, base_channels, blocks, stride in STAGES:
            for i in range(blocks):
                out_channels = _rounded(base_channels * width_mult)
                layers.append(InvertedResidual(channels, out_channels, stride if i == 0 else 1, expansion))
                channels = out_channels
        self.num_features = _rounded(LAST_CHANNELS * max(1.0, width_mult))
        layers.append(_conv_norm(channels, self.num_features, 1))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(nn.Dropout(dropout), nn.Linear(self.num_features, num_classes))
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out")
            elif isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=head_std)
                nn.init.zeros_(module.bias)
            elif isinstance(module, InvertedResidual):
                module.recompute = recompute

    def expanding_skip_blocks(self) -> Iterator[InvertedResidual]:
        """Yield the blocks that TSM shifts: those with a skip connection and an expansion."""
        for module in self.features:
            if isinstance(module, InvertedResidual) and module.skips and module.expands:
                yield module

    def forward(self, x: Tensor) -> Tensor:
        pooled = self.features(x).mean((2, 3))
        logits: Tensor = self.classifier(pooled)
        return logits


def _conv_norm(in_channels: int, channels: int, kernel: int, *, stride: int = 1, groups: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(in_channels, channels, kernel, stride=stride, padding=kernel // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(channels), nn.ReLU6(inplace=True))


def _rounded(channels: float, multiple: int = 8) -> int:
    """Round to a multiple of 8, never down by more than 10 %, like torchvision's ``_make_divisible``."""
    rounded = max(multiple, int(channels + multiple / 2) // multiple * multiple)
    return rounded + multiple if rounded < 0.9 * channels else rounded
