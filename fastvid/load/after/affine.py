"""Rotate, shear and shift whole clips: one sampling grid per clip, for all of its frames."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from fastvid.load.memory.device import upload

Motion = Literal["rotate", "shear_x", "shear_y", "translate_x", "translate_y"]


def warp(clips: Tensor, motions: Sequence[tuple[Motion, float]]) -> Tensor:
    """Move the pixels of each clip, bilinear; what comes from outside the picture is black.

    `clips`: float32 [N, 3, T, H, W], contiguous. `motions`: for each clip a motion and its size: degrees
    counter-clockwise for "rotate", pixels of shear per pixel for "shear_x" and "shear_y", a share of the width or
    height for "translate_x" and "translate_y". Returns float32 [N, 3, T, H, W].
    """
    height, width = clips.shape[-2:]
    matrices = torch.tensor([_inverse(*motion, height, width) for motion in motions], dtype=torch.float32)
    terms = upload(matrices, clips.device).view(-1, 2, 3, 1, 1).unbind(2)
    # Pixel centres of the output relative to the centre of the picture.
    x = torch.arange(width, device=clips.device, dtype=torch.float32).add_(0.5 - width / 2)
    y = torch.arange(height, device=clips.device, dtype=torch.float32).add_(0.5 - height / 2)
    # Not affine_grid: the order of the sums in its matrix product may depend on the number of clips.
    source = (terms[0] * x).add(terms[1] * y[:, None]).add_(terms[2])
    source[:, 0].mul_(2 / width)
    source[:, 1].mul_(2 / height)
    pictures = clips.reshape(len(clips), -1, height, width)
    moved = functional.grid_sample(
        pictures, source.permute(0, 2, 3, 1), mode="bilinear", padding_mode="zeros", align_corners=False
    )
    return moved.view(clips.shape)


def _inverse(motion: Motion, size: float, height: int, width: int) -> tuple[float, ...]:
    """Return the map from output to source, rows of x and y, about the centre of the picture.

    Source:
        torchvision.transforms.functional: `rotate` about the centre; `affine` as RandAugment calls it, with shears
        about the top left corner and whole pixels of translation.
    """
    if motion == "rotate":
        cos, sin = math.cos(math.radians(size)), math.sin(math.radians(size))
        return cos, -sin, 0.0, sin, cos, 0.0
    if motion == "shear_x":
        return 1.0, size, size * height / 2, 0.0, 1.0, 0.0
    if motion == "shear_y":
        return 1.0, 0.0, 0.0, size, 1.0, size * width / 2
    if motion == "translate_x":
        return 1.0, 0.0, -float(int(size * width)), 0.0, 1.0, 0.0
    return 1.0, 0.0, 0.0, 0.0, 1.0, -float(int(size * height))
