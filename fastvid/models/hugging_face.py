"""Video classifiers of the library transformers, with the interface of fastvid's models. For example:

model.name=fastvid.models.hugging_face:videomae model.options.pretrained=MCG-NJU/videomae-base
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from torch import Tensor, nn

from fastvid.errors import MissingDependency, UsageError
from fastvid.models.resnet import after_dropouts


class Classifier(nn.Module):
    """A classifier of transformers: clips [B, T, C, H, W] to logits [B, num_classes]."""

    input_layout = "BTCHW"
    head_name = "net.classifier"

    def __init__(self, net: nn.Module, num_frames: int) -> None:
        super().__init__()
        self.net, self.num_frames = net, num_frames

    def forward(self, video: Tensor) -> Tensor:
        logits: Tensor = self.net(video).logits
        return logits


def videomae(
    num_classes: int, num_frames: int, *, pretrained: str | None = None, drop_path: float = 0.0, **config: Any
) -> Classifier:
    """Return a VideoMAE vision transformer (Tong et al. 2022) for classification.

    `num_frames`: frames per clip. `pretrained`: name on the Hugging Face Hub or a folder; None for random weights.
    `drop_path`: rate of stochastic depth in the last layer. `config`: fields of `transformers.VideoMAEConfig`.
    """
    try:
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        raise MissingDependency("videomae needs transformers", hint="run `pip install transformers`") from error
    kind, net_kind = transformers.VideoMAEConfig, transformers.VideoMAEForVideoClassification
    known = {*inspect.signature(kind).parameters, *vars(kind()).keys()}
    if unknown := sorted(config.keys() - known):
        raise UsageError(
            f"transformers.VideoMAEConfig has no {', '.join(map(repr, unknown))}",
            hint=f"use some of {', '.join(sorted(name for name in known if not name.startswith('_')))}",
        )
    values = {"num_labels": num_classes, "num_frames": num_frames, **config}
    try:
        if pretrained is None:
            net = net_kind(kind(**values))
        else:
            net = net_kind.from_pretrained(pretrained, ignore_mismatched_sizes=True, **values)
    except (OSError, ValueError) as error:
        raise UsageError(f"transformers cannot build VideoMAE: {error}", hint="check model.options") from error
    layers = net.videomae.encoder.layer
    after_dropouts([(layer.attention.output, layer.output) for layer in layers], drop_path)
    return Classifier(net, num_frames)
