"""Two-stream nets: one that sees pictures, one that sees motion, and how their answers become one.

Simonyan and Zisserman 2014 ("Two-Stream Convolutional Networks for Action Recognition in Videos") with ResNets: the
spatial net is TSN on pictures, the temporal net TSN on stacks of L flows, 2L channels. The temporal net starts from
ImageNet weights by cross-modality initialisation (Wang et al. 2016, section 3.1; see
`fastvid.models.weights.cross_modality_weight`).

Two ways to fuse:

- "scores": the weighted mean of both nets' probabilities. Nets trained apart can be fused so; trained together, the
  loss is that of the mean. It adds evidence up: it cannot tell a class that only the *combination* of picture and
  motion shows.
- "joint": a head with one hidden layer on the pooled features of both. It can, and has to be trained with both streams.
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

Fusion = Literal["scores", "joint"]

FLOW_STACK = 10
"""Flows for each frame, of Simonyan and Zisserman 2014, section 3.1; TSN takes 5."""

FLOW_SCALE = 1 / (2 * 20 * 0.226)
"""Pixels a frame to what a net is fed. The TSN code feeds flow of -20 to 20 pixels as 0 to 1, less its middle, over the
mean of ImageNet's standard deviations, 0.226: the range that first layers trained on pictures know."""

# Width of the joint head's hidden layer, as a share of the features of both nets.
_HIDDEN = 4


class FlowAverage(FrameAverage):
    """TSN on flow: [B, 2L, T, H, W] in pixels a frame to logits [B, num_classes].

    Args:
        backbone: Flow stacks [N, 2L, H, W] to logits [N, num_classes].
        num_frames: T of training.
        flow_stack: L.
    """

    streams = ("flow",)

    def __init__(self, backbone: nn.Module, *, num_frames: int, flow_stack: int) -> None:
        super().__init__(backbone, num_frames=num_frames, any_length=True)
        self.flow_stack = flow_stack

    def forward(self, flow: Tensor) -> Tensor:
        return super().forward(flow * FLOW_SCALE)


class TwoStream(nn.Module):
    """Pictures [B, 3, T, H, W] and flow [B, 2L, T, H, W] to logits [B, num_classes].

    Args:
        spatial: The net on pictures.
        temporal: The net on flow.
        num_classes: Width of the last layer.
        fusion: "scores" or "joint"; the logits of "scores" are logarithms of mean probabilities.
        flow_weight: Weight of the temporal net's scores against 1 of the spatial net's; 1 to 1.5 is customary. Of
            "scores" only.
        dropout: Before the joint head.

    Raises:
        UsageError: The fusion is not known, or the weight is not positive.
    """

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
        if fusion not in get_args(Fusion):
            raise UsageError(f"fusion {fusion!r} is not known", hint=f"known are {', '.join(get_args(Fusion))}")
        if not 0 < flow_weight < math.inf:
            raise UsageError(f"flow_weight is {flow_weight}, expected a positive number")
        self.spatial, self.temporal = spatial, temporal
        self.num_frames, self.flow_stack = spatial.num_frames, temporal.flow_stack
        self.fusion, self.flow_weight = fusion, flow_weight
        self.head: nn.Module | None = None
        if fusion == "joint":
            features = sum(_backbone(net).num_features for net in (spatial, temporal))
            hidden = max(num_classes, features // _HIDDEN)
            self.head = nn.Sequential(
                nn.Dropout(dropout), nn.Linear(features, hidden), nn.ReLU(inplace=True), nn.Linear(hidden, num_classes)
            )
            # The nets' own last layers give way to the joint head.
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
    """Late fusion: the logarithm of the weighted mean of each net's probabilities.

    Args:
        logits: Of each net, [B, num_classes].
        weights: Of each net, positive.

    Returns:
        [B, num_classes]; its softmax is the weighted mean.
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
    """The temporal net alone; see `fastvid.models.resnet.ResNet` for the options."""
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
    """Both nets of one depth and width; see `TwoStream` for the options of fusion."""
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
    """Fills both nets: from one file each (spatial, temporal), or both from one, such as ImageNet's or its own.

    Raises:
        UsageError: There are more than two files.
        StorageError: A file cannot be read.
        FormatError: A file fits neither net.
    """
    if len(files) > 2:
        raise UsageError(f"{len(files)} files of weights for two nets", hint="SPATIAL,TEMPORAL or one file for both")
    if len(files) == 1:
        state = read_state_dict(files[0])
        if any(key.startswith(("spatial.", "temporal.")) for key in state):
            return [load_weights(model, state)]
        return [load_weights(net, state) for net in (model.spatial, model.temporal)]
    return [load_weights(net, file) for net, file in zip((model.spatial, model.temporal), files, strict=True)]


def _backbone(net: FrameAverage) -> ResNet:
    assert isinstance(net.backbone, ResNet)
    return net.backbone
