"""Non-local block: attention over all positions of a clip.

From Wang et al. 2018, "Non-local Neural Networks". Settings are those of the paper and of both public code bases: half
the channels inside, keys and values pooled 2x2 in space, no 1/sqrt(d) scale, and a final batch norm with gamma 0, so
that a new block starts as an identity.

The convolution before that batch norm has no bias, as in mmcv's block; mit-han-lab's has one, which the checkpoint
loader folds into the batch norm.
"""

from __future__ import annotations

from typing import Literal, get_args

from torch import Tensor, nn
from torch.nn import functional

from fastvid.errors import UsageError
from fastvid.models.resnet import ResNet

Mode = Literal["embedded_gaussian", "dot_product"]


class NonLocal(nn.Module):
    """Non-local block on clips [B, C, T, H, W] or frames [B * num_segments, C, H, W]; keeps the shape.

    `num_segments`: frames per clip if the input is folded frames; None if it is clips.
    """

    def __init__(self, channels: int, *, mode: Mode = "embedded_gaussian", num_segments: int | None = None) -> None:
        super().__init__()
        inner = max(1, channels // 2)
        self.mode: Mode = mode
        self.num_segments = num_segments
        self.theta = nn.Conv3d(channels, inner, 1)
        self.phi = nn.Conv3d(channels, inner, 1)
        self.g = nn.Conv3d(channels, inner, 1)
        self.pool = nn.MaxPool3d((1, 2, 2))
        self.out = nn.Conv3d(inner, channels, 1, bias=False)
        self.out_bn = nn.BatchNorm3d(channels)
        for conv in (self.theta, self.phi, self.g):
            nn.init.normal_(conv.weight, std=0.01)  # Wang et al. 2018, section 4.1
        nn.init.zeros_(self.out_bn.weight)

    def forward(self, x: Tensor) -> Tensor:
        if self.num_segments is None:
            return x + self._attend(x)
        clips = x.view(-1, self.num_segments, *x.shape[1:]).transpose(1, 2)
        return x + self._attend(clips).transpose(1, 2).flatten(0, 1)

    def _attend(self, x: Tensor) -> Tensor:
        query, key, value = (
            part.flatten(2).transpose(1, 2).unsqueeze(1)
            for part in (self.theta(x), self.pool(self.phi(x)), self.pool(self.g(x)))
        )
        if self.mode == "embedded_gaussian":
            mixed = functional.scaled_dot_product_attention(query, key, value, scale=1.0)
        else:
            # Without a softmax the matrix products associate. Multiplying keys by values first costs D x D instead of
            # positions squared; published counts of this mode (61.30 G for TSM-R50 with five blocks) use the other
            # order.
            mixed = query @ (key.transpose(2, 3) @ value / key.shape[2])
        mixed = mixed.squeeze(1).transpose(1, 2).reshape(x.shape[0], -1, *x.shape[2:])
        attended: Tensor = self.out_bn(self.out(mixed))
        return attended


def insert_non_local(net: ResNet, mode: Mode, *, first: int, num_segments: int | None) -> None:
    """Add a non-local block after every second residual block of ``layer2`` and ``layer3``.

    In ResNet-50 these are the paper's five blocks. The code bases start at different blocks: mmaction2's I3D at the
    second (``configs/recognition/i3d``, ``non_local=((0, 0, 0), (0, 1, 0, 1), (0, 1, 0, 1, 0, 1), (0, 0, 0))``),
    TSM of mit-han-lab (``ops/non_local.py``) and of mmaction2 at the first. Other depths follow the same rule.

    `num_segments`: frames per clip if ``net`` runs on folded frames, None if it is inflated.
    """
    if mode not in get_args(Mode):
        raise UsageError(f"unknown non-local mode {mode!r}", hint=f"use one of {', '.join(map(repr, get_args(Mode)))}")
    for stage in (net.layer2, net.layer3):
        for block in net.blocks_of(stage)[first::2]:
            channels = block.last_norm().num_features
            assert isinstance(channels, int)
            block.non_local = NonLocal(channels, mode=mode, num_segments=num_segments)
