"""TSN and TSM: a 2D net on each frame, with the logits averaged over the frames of a clip.

TSN (Wang et al. 2016, "Temporal Segment Networks") ignores the order of frames. TSM is the same net with temporal
shifts inside (`fastvid.models.shift`), with the same number of parameters and multiplications. Dropout 0.5 and a last
layer initialised from N(0, 0.001) are taken from mmaction2's ``configs/_base_/models/tsm_r50.py`` and the training
commands of mit-han-lab/temporal-shift-module.
"""

from __future__ import annotations

from typing import Unpack

from torch import Tensor, nn

from fastvid.errors import UsageError
from fastvid.models.resnet import DropPath, ResNet, ResNetOptions
from fastvid.models.shift import Direction, insert_shift

DROPOUT = 0.5
HEAD_STD = 0.001


class FrameAverage(nn.Module):
    """A 2D backbone on each frame: clips [B, C, T, H, W] to logits [B, num_classes].

    The result is the mean over T of the backbone's logits, before any softmax. A clip in ``torch.channels_last_3d``
    memory format reaches the backbone as ``torch.channels_last`` frames without a copy.

    `backbone`: maps frames [N, C, H, W] to logits [N, num_classes]. `any_length`: whether clips may have another number
    of frames than `num_frames`.
    """

    input_layout = "BCTHW"

    def __init__(self, backbone: nn.Module, *, num_frames: int, any_length: bool) -> None:
        super().__init__()
        if num_frames < 1:
            raise UsageError(f"num_frames must be at least 1, not {num_frames}")
        self.backbone = backbone
        self.num_frames = num_frames
        self.any_length = any_length
        for module in backbone.modules():
            if isinstance(module, DropPath):
                module.frames = num_frames  # all frames of a clip drop a branch together

    def forward(self, video: Tensor) -> Tensor:
        if video.dim() != 5:
            raise UsageError(f"a clip is [B, C, T, H, W], not {list(video.shape)}")
        if video.shape[2] != self.num_frames and not self.any_length:
            raise UsageError(
                f"this net was built for clips of {self.num_frames} frames, not {video.shape[2]}",
                hint=f"build it with num_frames={video.shape[2]}; the weights fit any number of frames",
            )
        logits: Tensor = self.backbone(fold_frames(video))
        return logits.view(video.shape[0], -1, logits.shape[1]).mean(1)


def fold_frames(video: Tensor) -> Tensor:
    """Reshape [B, C, T, H, W] to [B * T, C, H, W], ordered by clip, then frame; a view if strides allow."""
    return video.transpose(1, 2).flatten(0, 1)


def tsn(
    depth: int,
    *,
    num_classes: int,
    num_frames: int,
    dropout: float = DROPOUT,
    **options: Unpack[ResNetOptions],
) -> FrameAverage:
    """Build TSN on a ResNet; see `fastvid.models.resnet.ResNet` for the options."""
    net = ResNet(depth, num_classes=num_classes, dropout=dropout, head_std=HEAD_STD, **options)
    return FrameAverage(net, num_frames=num_frames, any_length=True)


def tsm(
    depth: int,
    *,
    num_classes: int,
    num_frames: int,
    shift_div: int = 8,
    shift_direction: Direction = "both",
    dropout: float = DROPOUT,
    **options: Unpack[ResNetOptions],
) -> FrameAverage:
    """Build TSM on a ResNet; see `fastvid.models.shift.insert_shift` for the shift options.

    `num_frames`: frames per clip.
    """
    model = tsn(depth, num_classes=num_classes, num_frames=num_frames, dropout=dropout, **options)
    assert isinstance(model.backbone, ResNet)
    model.any_length = False
    insert_shift(model.backbone, num_frames, shift_div=shift_div, direction=shift_direction)
    return model
