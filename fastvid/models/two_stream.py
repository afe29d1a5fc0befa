"""Two-stream models: one net on RGB frames, one on optical flow, and the fusion of their predictions.

Simonyan and Zisserman 2014 ("Two-Stream Convolutional Networks for Action Recognition in Videos") with ResNets: the
spatial net is TSN on RGB, the temporal net is TSN on stacks of L flow fields, 2L channels. The temporal net starts from
ImageNet weights by cross-modality initialisation (Wang et al. 2016, section 3.1; see
`fastvid.models.weights.cross_modality_weight`).

There are two kinds of fusion:

- "scores": the weighted mean of both nets' probabilities. It can combine nets that were trained separately; in joint
  training the loss is taken on the mean. It cannot recognise a class that only the *combination* of RGB and flow
  reveals.
- "joint": a head with one hidden layer on the pooled features of both nets. It can recognise such a class, but must be
  trained with both streams.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, Unpack, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional

from fastvid.errors import UsageError
from fastvid.models.resnet import ResNet, StreamOptions
from fastvid.models.tsn import DROPOUT, HEAD_STD, FrameAverage, fold_frames, tsn
from fastvid.models.weights import LoadReport, load_weights, read_state_dict
from fastvid.runtime.values import check_choice

Fusion = Literal["scores", "joint"]

FLOW_STACK = 10
"""Flow fields per frame, from Simonyan and Zisserman 2014, section 3.1; TSN uses 5."""

FLOW_SCALE = 1 / (2 * 20 * 0.226)
"""Factor from pixels per frame to the net's input. The TSN code maps flow of -20 to 20 pixels to 0 to 1, subtracts 0.5
and divides by 0.226, the mean of ImageNet's standard deviations: the input range of layers trained on RGB."""

# Width of the joint head's hidden layer: number of features of both nets, divided by this.
_HIDDEN_DIVISOR = 4


class FlowAverage(FrameAverage):
    """TSN on flow: [B, 2L, T, H, W] in pixels per frame to logits [B, num_classes].

    `backbone`: maps flow stacks [N, 2L, H, W] to logits [N, num_classes].
    """

    streams = ("flow",)

    def __init__(self, backbone: nn.Module, *, num_frames: int, flow_stack: int) -> None:
        super().__init__(backbone, num_frames=num_frames, any_length=True)
        self.flow_stack = flow_stack

    def forward(self, flow: Tensor) -> Tensor:
        return super().forward(flow * FLOW_SCALE)


class TwoStream(nn.Module):
    """Two fused nets: RGB [B, 3, T, H, W] and flow [B, 2L, T, H, W] to logits [B, num_classes]."""

    input_layout = "BCTHW"
    streams = ("rgb", "flow")

    def __init__(
        self,
        spatial: FrameAverage,
        temporal: FlowAverage,
        *,
        num_classes: int,
        fusion: Fusion,
        flow_weight: float,
        dropout: float,
    ) -> None:
        super().__init__()
        check_choice("unknown fusion {}", fusion, get_args(Fusion))
        if not 0 < flow_weight < math.inf:
            raise UsageError(f"flow_weight is {flow_weight}, expected a positive number")
        self.spatial, self.temporal = spatial, temporal
        self.num_frames, self.flow_stack = spatial.num_frames, temporal.flow_stack
        self.fusion, self.flow_weight = fusion, flow_weight
        self.head: nn.Module | None = None
        if fusion == "joint":
            features = sum(_backbone(net).num_features for net in (spatial, temporal))
            hidden = max(num_classes, features // _HIDDEN_DIVISOR)
            self.head = nn.Sequential(
                nn.Dropout(dropout), nn.Linear(features, hidden), nn.ReLU(inplace=True), nn.Linear(hidden, num_classes)
            )
            # The joint head replaces the last layers of both nets.
            for net in (spatial, temporal):
                _backbone(net).add_module("fc", nn.Identity())

    def forward(self, video: Tensor, flow: Tensor) -> Tensor:
        if self.head is None:
            return fuse_scores([self.spatial(video), self.temporal(flow)], [1.0, self.flow_weight])
        features = [
            _backbone(net).features(fold_frames(clips)).view(clips.shape[0], clips.shape[2], -1).mean(1)
            for net, clips in ((self.spatial, video), (self.temporal, flow * FLOW_SCALE))
        ]
        logits: Tensor = self.head(torch.cat(features, 1))
        return logits


def fuse_scores(logits: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Return the logarithm of the weighted mean of the nets' probabilities (late fusion).

    `logits`: [B, num_classes] of each net. Returns [B, num_classes], whose softmax is the weighted mean.
    """
    total = sum(weights)
    scores = [functional.log_softmax(one, 1) + math.log(w / total) for one, w in zip(logits, weights, strict=True)]
    return torch.logsumexp(torch.stack(scores), 0)


def temporal(
    depth: int,
    *,
    num_classes: int,
    num_frames: int,
    flow_stack: int = FLOW_STACK,
    dropout: float = DROPOUT,
    **options: Unpack[StreamOptions],
) -> FlowAverage:
    """Build the temporal net alone; see `fastvid.models.resnet.ResNet` for the options."""
    if flow_stack < 1:
        raise UsageError(f"flow_stack must be at least 1, not {flow_stack}")
    net = ResNet(
        depth, num_classes=num_classes, in_channels=2 * flow_stack, dropout=dropout, head_std=HEAD_STD, **options
    )
    return FlowAverage(net, num_frames=num_frames, flow_stack=flow_stack)


def two_stream(
    depth: int,
    *,
    num_classes: int,
    num_frames: int,
    fusion: Fusion = "scores",
    flow_weight: float = 1.5,
    flow_stack: int = FLOW_STACK,
    dropout: float = DROPOUT,
    **options: Unpack[StreamOptions],
) -> TwoStream:
    """Build both nets with the same depth and width; see `TwoStream` for the fusion options."""
    return TwoStream(
        tsn(depth, num_classes=num_classes, num_frames=num_frames, dropout=dropout, **options),
        temporal(
            depth, num_classes=num_classes, num_frames=num_frames, flow_stack=flow_stack, dropout=dropout, **options
        ),
        num_classes=num_classes,
        fusion=fusion,
        flow_weight=flow_weight,
        dropout=dropout,
    )


def load_stream_weights(model: TwoStream, files: Sequence[str]) -> list[LoadReport]:
    """Load both nets: from one file each (spatial, temporal), or from one file for both.

    A single file is either a checkpoint of a two-stream model or one that fits each net, such as ImageNet weights.
    """
    if len(files) > 2:
        raise UsageError(f"{len(files)} weight files for two nets", hint="pass SPATIAL,TEMPORAL or one file for both")
    if len(files) == 1:
        state = read_state_dict(files[0])
        if any(key.startswith(("spatial.", "temporal.")) for key in state):
            return [load_weights(model, state)]
        return [load_weights(net, state) for net in (model.spatial, model.temporal)]
    return [load_weights(net, file) for net, file in zip((model.spatial, model.temporal), files, strict=True)]


def _backbone(net: FrameAverage) -> ResNet:
    assert isinstance(net.backbone, ResNet)
    return net.backbone
