"""Stochastic depth: residual branches that are skipped at random for single clips in training.

Huang et al. 2016, "Deep Networks with Stochastic Depth". A branch that stays is divided by its probability to stay, so
evaluation needs no other scale.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fastvid.errors import UsageError


class DropPath(nn.Module):
    """Drops a residual branch for random clips, in training alone.

    The numbers are those of torch's generator, which the training loop seeds in each step.

    `frames`: consecutive rows of the input that belong to one clip and are dropped together.
    """

    def __init__(self, rate: float, frames: int = 1) -> None:
        super().__init__()
        self.rate, self.frames = rate, frames

    def forward(self, branch: Tensor) -> Tensor:
        """Return a branch [N, ...], zero for the dropped clips."""
        if not self.training or self.rate == 0:
            return branch
        rows = branch.shape[0]
        # A clip of another length than in training, or frames of no clip, are dropped one by one.
        frames = self.frames if rows % self.frames == 0 else 1
        stays = torch.rand(rows // frames, device=branch.device) >= self.rate
        scale = stays.repeat_interleave(frames).view(-1, *[1] * (branch.dim() - 1)).to(branch.dtype)
        return branch * scale / (1 - self.rate)

    def extra_repr(self) -> str:
        return f"rate={self.rate:g}, frames={self.frames}"


def rates(rate: float, blocks: int) -> list[float]:
    """Return the rates of a net's blocks: they rise linearly from 0 in the first to `rate` in the last."""
    if not 0 <= rate < 1:
        raise UsageError(f"drop_path is {rate}, expected 0 <= x < 1")
    return [rate * block / max(1, blocks - 1) for block in range(blocks)]


def after_dropouts(layers: Sequence[Sequence[nn.Module]], rate: float) -> None:
    """Drop paths of a transformer whose branches end with a dropout: each gets a `DropPath` after it."""
    for branches, one in zip(layers, rates(rate, len(layers)), strict=True):
        for branch in branches:
            if one:
                branch.add_module("dropout", nn.Sequential(branch.get_submodule("dropout"), DropPath(one)))
