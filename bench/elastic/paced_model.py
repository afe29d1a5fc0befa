"""Model of `bench.elastic.elastic`: float64, without batch norm and dropout, with a pause in each step."""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn


class Paced(nn.Module):
    """Map clips [B, 3, T, H, W] to logits [B, classes].

    `pause_s`: seconds to sleep in each training forward, so that a run takes long without using the CPU.
    """

    def __init__(self, num_classes: int, pause_s: float) -> None:
        super().__init__()
        self.pause_s = pause_s
        self.net = nn.Sequential(
            nn.Conv3d(3, 8, (2, 5, 5), stride=(1, 3, 3)), nn.ReLU(), nn.AdaptiveAvgPool3d((1, 3, 3)), nn.Flatten(),
            nn.Linear(72, num_classes),
        ).double()  # fmt: skip

    def forward(self, video: Tensor) -> Tensor:
        if self.training:
            time.sleep(self.pause_s)
        logits: Tensor = self.net(video.double())
        return logits


def net(*, num_classes: int, num_frames: int, pause_s: float = 0.0) -> nn.Module:
    """The model for `fastvid.models.zoo.build`."""
    del num_frames
    torch.set_num_threads(1)
    return Paced(num_classes, pause_s)
