"""I3D and SlowOnly: the zoo's ResNet with some of its 2D convolutions inflated in time.

The choice of inflated kernels and all strides follow open-mmlab/mmaction2, which follows Wang et al. 2018, "Non-local
Neural Networks" (``configs/_base_/models/i3d_r50.py`` at 38099c7, ``slowonly_r50.py`` at 23b9d16,
``mmaction/models/backbones/resnet3d.py`` at 01436f0, ``resnet3d_slowonly.py`` at 147c29d):

=================  ============  ===========  ====================================  ======================
name               stem, stride  pool stride  inflated blocks                       inflated kernel
=================  ============  ===========  ====================================  ======================
i3d-*-3x1x1        5x7x7, 2      2, 2         all of stage 1; in stages 2 and 3     first 1x1 to 3x1x1
                                              every second from the first; in
                                              stage 4 every second from the second
i3d-*              5x7x7, 2      2, 2         the same                              the 3x3 to 3x3x3
i3d-*-heavy        5x7x7, 1      1, 2         all                                   first 1x1 to 3x1x1
slowonly-*         1x7x7, 1      1, none      all of stages 3 and 4                 first 1x1 to 3x1x1
=================  ============  ===========  ====================================  ======================

Strides are temporal; "2, 2" are those of the pool after the stem and of a second pool, 2x1x1, after stage 1. mmaction2
calls the 3x1x1 net "I3D-R50" and reports 28.0 M parameters and 43.5 G multiply-adds for it at 32x256x256. Dropout 0.5
and a last layer initialised from N(0, 0.01) are taken from mmaction2's ``I3DHead``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, Unpack

from torch import Tensor, nn

from fastvid.errors import UsageError
from fastvid.models.resnet import BasicBlock, ResNet, ResNetOptions, init_weights

DROPOUT = 0.5
HEAD_STD = 0.01


@dataclass(frozen=True)
class Inflation:
    """Which convolutions become 3D, and the temporal strides."""

    kernel: Literal["3x3x3", "3x1x1"]
    # Which blocks are inflated: "alternate" is the first row of the table above, "late" is stages 3 and 4.
    blocks: Literal["alternate", "all", "late"] = "alternate"
    stem_kernel: int = 5
    stem_stride: int = 2
    pool_stride: int = 2
    second_pool: bool = True  # whether a pool halves the number of frames after stage 1

    @property
    def temporal_stride(self) -> int:
        """Number of input frames per frame of the last stage."""
        return self.stem_stride * self.pool_stride * (2 if self.second_pool else 1)

    def inflates(self, stage: int, block: int) -> bool:
        """Return whether block ``block`` of stage ``stage`` is inflated; both count from 0."""
        if self.blocks == "alternate":
            return stage == 0 or block % 2 == (1 if stage == 3 else 0)
        return self.blocks == "all" or stage >= 2


I3D_3X3X3 = Inflation("3x3x3")
I3D_3X1X1 = Inflation("3x1x1")
I3D_HEAVY = replace(I3D_3X1X1, blocks="all", stem_stride=1, pool_stride=1)
SLOW_ONLY = Inflation("3x1x1", blocks="late", stem_kernel=1, stem_stride=1, pool_stride=1, second_pool=False)


class ClipNet(nn.Module):
    """A 3D backbone that maps clips [B, C, T, H, W] to logits [B, num_classes].

    `backbone`: maps clips [B, C, T, H, W] to logits [B, num_classes]. `num_frames`: T in training.
    `temporal_stride`: number of input frames per frame of the backbone's last stage, which is also the smallest T that
    works.
    """

    input_layout = "BCTHW"

    def __init__(self, backbone: nn.Module, *, num_frames: int, temporal_stride: int) -> None:
        super().__init__()
        self.backbone = backbone
        self.num_frames = num_frames
        self.temporal_stride = temporal_stride
        self._check_frames(num_frames)

    def forward(self, video: Tensor) -> Tensor:
        if video.dim() != 5:
            raise UsageError(f"a clip is [B, C, T, H, W], not {list(video.shape)}")
        self._check_frames(video.shape[2])
        logits: Tensor = self.backbone(video)
        return logits

    def _check_frames(self, num_frames: int) -> None:
        if num_frames < self.temporal_stride:
            raise UsageError(
                f"a clip of {num_frames} frames is too short: this net needs at least {self.temporal_stride}"
            )


def inflate(net: ResNet, plan: Inflation) -> ResNet:
    """Turn a 2D ResNet into a 3D one, in place; state-dict keys stay the same.

    Weights are repeated along the new kernel axis and divided by its length (Carreira and Zisserman 2017, "Quo Vadis,
    Action Recognition?"), so on a clip that repeats one frame the 3D convolution returns what the 2D one returns for
    that frame, except near the zero padding at both ends of the clip.

    `net`: takes [N, C, H, W] before, [B, C, T, H, W] after. Returns ``net``.
    """
    deep = _kernels_to_inflate(net, plan)
    for name, module in list(net.named_modules()):
        if isinstance(module, nn.Conv2d):
            stem = name == "conv1"
            kernel = plan.stem_kernel if stem else 3 if name in deep else 1
            _replace(net, name, _inflated_conv(module, kernel, plan.stem_stride if stem else 1))
        elif isinstance(module, nn.BatchNorm2d):
            _replace(net, name, _norm_3d(module))
    net.maxpool = nn.MaxPool3d((1, 3, 3), stride=(plan.pool_stride, 2, 2), padding=(0, 1, 1))
    net.avgpool = nn.AdaptiveAvgPool3d(1)
    if plan.second_pool:
        # Appended to the first stage: a pool has no parameters, so no state-dict key changes.
        net.layer1.append(nn.MaxPool3d((2, 1, 1), stride=(2, 1, 1)))
    return net


def inflated_weight(weight: Tensor, depth: int) -> Tensor:
    """Inflate a kernel [O, I, H, W] to [O, I, depth, H, W] with the same response to a repeated frame."""
    return weight.unsqueeze(2).repeat(1, 1, depth, 1, 1) / depth


def i3d(
    depth: int,
    plan: Inflation,
    *,
    num_classes: int,
    num_frames: int,
    dropout: float = DROPOUT,
    **options: Unpack[ResNetOptions],
) -> ClipNet:
    """Build an inflated ResNet with random weights.

    `fastvid.models.weights.load_weights` inflates 2D checkpoints into it.

    `num_frames`: frames per clip, at least ``plan.temporal_stride``.
    """
    net = ResNet(depth, num_classes=num_classes, dropout=dropout, head_std=HEAD_STD, **options)
    inflate(net, plan)
    # Initialise again: inflated random 2D weights are equal along the temporal axis.
    init_weights(net, zero_init_residual=options.get("zero_init_residual", False))
    return ClipNet(net, num_frames=num_frames, temporal_stride=plan.temporal_stride)


def _kernels_to_inflate(net: ResNet, plan: Inflation) -> set[str]:
    names: set[str] = set()
    for s, stage in enumerate(net.stages()):
        for b, block in enumerate(net.blocks_of(stage)):
            if not plan.inflates(s, b):
                continue
            if not isinstance(block, BasicBlock):
                convs = ["conv2" if plan.kernel == "3x3x3" else "conv1"]
            elif plan.kernel == "3x3x3":
                convs = ["conv1", "conv2"]
            else:
                raise UsageError(
                    f"ResNet-{net.depth} has no 1x1 convolution to inflate to 3x1x1",
                    hint="use depth 50 or 101, or 3x3x3",
                )
            names.update(f"layer{s + 1}.{b}.{conv}" for conv in convs)
    return names


def _inflated_conv(conv: nn.Conv2d, depth: int, stride: int) -> nn.Conv3d:
    assert isinstance(conv.padding, tuple)
    assert conv.bias is None
    kernel_h, kernel_w = conv.kernel_size
    stride_h, stride_w = conv.stride
    pad_h, pad_w = conv.padding
    new = nn.Conv3d(
        conv.in_channels,
        conv.out_channels,
        (depth, kernel_h, kernel_w),
        stride=(stride, stride_h, stride_w),
        padding=(depth // 2, pad_h, pad_w),
        bias=False,
        device="meta",
    )
    new.weight = nn.Parameter(inflated_weight(conv.weight.detach(), depth))
    return new


def _norm_3d(norm: nn.BatchNorm2d) -> nn.BatchNorm3d:
    # A batch norm's parameters and statistics do not depend on the number of dimensions, so reuse them.
    new = nn.BatchNorm3d(norm.num_features, eps=norm.eps, momentum=norm.momentum, device="meta")
    for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked"):
        setattr(new, name, getattr(norm, name))
    return new.train(norm.training)


def _replace(net: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(net.get_submodule(parent), child, module)
