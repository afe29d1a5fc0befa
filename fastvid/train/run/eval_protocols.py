"""Evaluation protocols by name: the clips of a video and the crops of a clip to average over.

    1x1         one clip, one crop, as in the recipe's evaluation
    10x3        ten clips, three crops along the longer side, as for I3D, SlowFast and dense TSM
    1x10        one clip; four corners, center and their mirror images, the "10-crop" of TSN and TSM
    twice       two clips, one crop: TSM's "twice sample", at the middle and at the start of each segment
    twicex3     the same with three crops, TSM's protocol for Something-Something

The general form is ``CLIPSxCROPS`` with 1, 3, 5 or 10 crops, the arguments of `fastvid.Views`, which documents where
clips and crops are taken.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Final

from fastvid.errors import UsageError
from fastvid.load.clips.augment import CenterCrop, HorizontalFlip, Spatial
from fastvid.load.clips.views import Views, check_views
from fastvid.train.config.data import DataConfig

_NAME: Final = re.compile(r"(\d+|twice)(?:x(\d+))?")
_TWICE: Final = (0.5, 0.0)
"""TSM's positions in each segment (mit-han-lab/temporal-shift-module ops/dataset.py at 1f6a834, _get_test_indices)."""


def views(protocol: str) -> Views:
    """Return the views that a protocol averages over.

    Raises:
        UsageError: If the name is not a protocol.
    """
    match = _NAME.fullmatch(protocol)
    if match is None:
        raise UsageError(f"unknown protocol {protocol!r}", hint="use for example 1x1, 10x3, 1x10, twice or twicex3")
    clips, crops = match[1], int(match[2] or 1)
    return Views(len(_TWICE), crops, _TWICE) if clips == "twice" else Views(int(clips), crops)


def with_views(data: DataConfig, asked: Views, size: int | None = None) -> DataConfig:
    """Return a recipe's data section with the evaluation crop adjusted to the views.

    Args:
        data: The recipe's data section.
        asked: The views.
        size: Side of the crops in pixels, for example 256 for "full resolution"; None keeps the recipe's.

    Raises:
        UsageError: If the recipe's sampler or crop does not support the views.
    """
    crop = next(transform for transform in data.eval_spatial if not isinstance(transform, HorizontalFlip))
    if size is not None:
        data = replace(data, eval_spatial=(CenterCrop(size, getattr(crop, "short_side", None)),))
    elif asked.num_crops > 1:
        data = replace(data, eval_spatial=(crop,))
    check_views(asked, data.eval_frames, Spatial.of(data.eval_spatial))
    return data
