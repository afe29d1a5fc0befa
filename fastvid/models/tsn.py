"""TSN and TSM: a 2D net on each frame, its logits averaged over the frames of a clip.

TSN (Wang et al. 2016, "Temporal Segment Networks") cannot tell the order of frames. TSM is the same net with temporal
shifts inside (`fastvid.models.shift`), at the same number of parameters and multiplications. Dropout 0.5 and a last
layer of N(0, 0.001) are those of mmaction2's ``configs/_base_/models/tsm_r50.py`` and of the training commands of
mit-han-lab/temporal-shift-module.
"""

from __future__ import annotations

from torch import Tensor, nn

from fastvid.errors import UsageError
from fastvid.models.mobilenet import MobileNetV2
from fastvid.models.non_local import Mode, insert_non_local
from fastvid.models.resnet import ResNet
from fastvid.models.shift import insert_shift
from fastvid.models.shift_ops import Direction

DROPOUT = 0.5
HEAD_STD = 0.001


class FrameAverage(nn.Module):
    """Clips [B, C, T, H, W] to logits [B, num_classes]: the mean over T of the backbone's logits, before any softmax.

    A clip in ``torch.channels_last_3d`` memory reaches the backbone as ``torch.channels_last`` frames without a copy.

    Args:
        backbone: Frames [N, C, H, W] to logits [N, num_classes].
        num_frames: T of training.
        any_length: Accept clips of any T, as a net without temporal shift can.
    """

    input_layout = "BCTHW"

    def __init__(self, backbone: nn.Module, *, num_frames: int, any_length: bool) -> None:
        super().__init__()
        if num_frames < 1:
            raise UsageError(f"num_frames must be at least 1, not {num_frames}")
        self.backbone = backbone
        self.num_frames = num_frames
        self.any_length = any_length

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
    """[B, C, T, H, W] to [B * T, C, H, W], the frames of a clip next to each other; a view where memory allows."""
    return video.transpose(1, 2).flatten(0, 1)


def tsn(
    depth: int,
    *,
    num_classes: int,
    num_frames: int,
    width: int = 64,
    in_channels: int = 3,
    dropout: float = DROPOUT,
    zero_init_residual: bool = False,
    recompute: bool = False,
) -> FrameAverage:
    """TSN on a ResNet; see `fastvid.models.resnet.ResNet` for the options."""
    net = ResNet(
        depth,
        num_classes=num_classes,
        width=width,
        in_channels=in_channels,
        dropout=dropout,
        head_std=HEAD_STD,
        zero_init_residual=zero_init_residual,
        recompute=recompute,
    )
    return FrameAverage(net, num_frames=num_frames, any_length=True)


def tsm(
    depth: int,
    *,
    num_classes: int,
    num_frames: int,
    width: int = 64,
    in_channels: int = 3,
    dropout: float = DROPOUT,
    shift_div: int = 8,
    shift_direction: Direction = "both",
    shift_inplace: bool = False,
    non_local: Mode | None = None,
    zero_init_residual: bool = False,
    recompute: bool = False,
) -> FrameAverage:
    """TSM on a ResNet; see `fastvid.models.shift.insert_shift` for the shift options.

    Args:
        depth: Of the ResNet.
        num_classes: Width of the last layer.
        num_frames: Frames a clip.
        width: Channels of the stem.
        in_channels: Channels of the input.
        dropout: Before the last layer.
        shift_div: One channel in ``shift_div`` moves, in each direction.
        shift_direction: "both", or "past" for streams.
        shift_inplace: Keep no shifted activations for backward.
        non_local: Mode of five non-local blocks (ResNet-50), or None for none; see `fastvid.models.non_local`.
        zero_init_residual: Start each block as an identity.
        recompute: Activation checkpointing of each block.
    """
    model = tsn(
        depth,
        num_classes=num_classes,
        num_frames=num_frames,
        width=width,
        in_channels=in_channels,
        dropout=dropout,
        zero_init_residual=zero_init_residual,
        recompute=recompute,
    )
    assert isinstance(model.backbone, ResNet)
    model.any_length = False
    insert_shift(model.backbone, num_frames, shift_div=shift_div, direction=shift_direction, inplace=shift_inplace)
    if non_local is not None:
        insert_non_local(model.backbone, non_local, first=0, num_segments=num_frames)
    return model


def tsn_mobilenetv2(
    *,
    num_classes: int,
    num_frames: int,
    width_mult: float = 1.0,
    in_channels: int = 3,
    dropout: float = DROPOUT,
    recompute: bool = False,
) -> FrameAverage:
    """TSN on MobileNetV2; see `fastvid.models.mobilenet.MobileNetV2` for the options."""
    net = MobileNetV2(
        num_classes=num_classes,
        width_mult=width_mult,
        in_channels=in_channels,
        dropout=dropout,
        head_std=HEAD_STD,
        recompute=recompute,
    )
    return FrameAverage(net, num_frames=num_frames, any_length=True)


def tsm_mobilenetv2(
    *,
    num_classes: int,
    num_frames: int,
    width_mult: float = 1.0,
    in_channels: int = 3,
    dropout: float = DROPOUT,
    shift_div: int = 8,
    shift_direction: Direction = "both",
    shift_inplace: bool = False,
    recompute: bool = False,
) -> FrameAverage:
    """TSM on MobileNetV2; see `tsm` for the shift options."""
    model = tsn_mobilenetv2(
        num_classes=num_classes,
        num_frames=num_frames,
        width_mult=width_mult,
        in_channels=in_channels,
        dropout=dropout,
        recompute=recompute,
    )
    assert isinstance(model.backbone, MobileNetV2)
    model.any_length = False
    insert_shift(model.backbone, num_frames, shift_div=shift_div, direction=shift_direction, inplace=shift_inplace)
    return model
