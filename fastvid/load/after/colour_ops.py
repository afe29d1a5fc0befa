"""Colour operations on batches of clips, by the definitions of torchvision.

Each takes clips, float32 [N, 3, T, H, W] in 0 to 1, which it may change, and one number per clip, and returns clips of
the same shape. Statistics of a picture (the mean of `contrast`, the extremes of `autocontrast`, the histogram of
`equalize`) are those of each frame, as torchvision computes them for a video.

Source:
    torchvision 0.29, torchvision/transforms/v2/functional/_color.py; results differ from it by at most 1e-6.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from fastvid.load.after.transform import column

# Weights of R, G and B, torchvision's rounding of ITU-R BT.601.
_LUMA: Final = (0.2989, 0.587, 0.114)
_UNIT: Final = 2.0**24  # grey is summed in whole units of 1 / 2**24, half the spacing of float32 below 1
_LEVELS: Final = 256


def brightness(clips: Tensor, factors: Sequence[float]) -> Tensor:
    """Multiply by a factor >= 0: 0 is black, 1 changes nothing."""
    return clips.mul_(column(clips, factors)).clamp_(0, 1)


def contrast(clips: Tensor, factors: Sequence[float]) -> Tensor:
    """Blend with the mean grey of each frame: a factor of 0 is that grey, 1 changes nothing."""
    return _blend(clips, _frame_mean(grey(clips)), factors)


def saturation(clips: Tensor, factors: Sequence[float]) -> Tensor:
    """Blend with the grey picture: a factor of 0 is grey, 1 changes nothing."""
    return _blend(clips, grey(clips), factors)


def hue(clips: Tensor, turns: Sequence[float]) -> Tensor:
    """Rotate hues by a number of turns, -0.5 to 0.5, keeping HSV saturation and value."""
    red, green, blue = (clips[:, channel : channel + 1] for channel in range(3))
    high = torch.maximum(torch.maximum(red, green), blue)
    chroma = high - torch.minimum(torch.minimum(red, green), blue)
    divisor = torch.where(chroma == 0, 1.0, chroma)
    sixths = torch.where(
        high == red,
        (green - blue) / divisor,
        torch.where(high == green, (blue - red) / divisor + 2, (red - green) / divisor + 4),
    )
    angle = sixths.div_(6).add_(column(clips, turns))
    angle = angle.sub_(angle.floor()).mul_(6)
    # HSV to RGB without its six cases: Smith, SIGGRAPH 1978, written as one formula for each of R, G and B.
    for channel, offset in enumerate((5, 3, 1)):
        place = angle + offset
        place = torch.where(place >= 6, place - 6, place)
        clips[:, channel : channel + 1] = high - chroma * torch.minimum(place, 4 - place).clamp_(0, 1)
    return clips.clamp_(0, 1)


def sharpness(clips: Tensor, factors: Sequence[float]) -> Tensor:
    """Blend with a 3x3 blur that leaves the border pixels: a factor of 0 is blurred, 1 changes nothing."""
    if min(clips.shape[-2:]) < 3:
        return clips
    blurred, inner = clips.clone(), clips[..., 1:-1, 1:-1]
    rows = clips[..., :-2, :] + clips[..., 1:-1, :] + clips[..., 2:, :]
    box = rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:]
    # Weights 1 around a centre of 5, over 13.
    blurred[..., 1:-1, 1:-1] = box.add_(inner * 4).div_(13)
    return _blend(clips, blurred, factors)


def posterize(clips: Tensor, bits: Sequence[float]) -> Tensor:
    """Keep a number of bits of each value, 1 to 8, rounding down."""
    levels = column(clips, [2.0**count for count in bits])
    return torch.minimum(clips.mul_(levels).floor_(), levels - 1).clamp_(min=0).div_(levels)


def solarize(clips: Tensor, thresholds: Sequence[float]) -> Tensor:
    """Invert the values at or above a threshold, 0 to 1."""
    return torch.where(clips >= column(clips, thresholds), 1 - clips, clips)


def autocontrast(clips: Tensor, _unused: Sequence[float]) -> Tensor:
    """Stretch each channel of each frame to 0 to 1; a constant one stays."""
    low, high = clips.amin((-2, -1), keepdim=True), clips.amax((-2, -1), keepdim=True)
    flat = high == low
    scale = torch.where(flat, 1.0, high - low)
    return clips.sub_(torch.where(flat, 0.0, low)).div_(scale).clamp_(0, 1)


def equalize(clips: Tensor, _unused: Sequence[float]) -> Tensor:
    """Flatten the histogram of 256 levels of each channel of each frame, as PIL's ImageOps.equalize does."""
    levels = clips.mul(_LEVELS - 1).round_().clamp_(0, _LEVELS - 1).long().flatten(-2)
    histogram = levels.new_zeros((*levels.shape[:-1], _LEVELS))
    histogram.scatter_add_(-1, levels, levels.new_ones(()).expand_as(levels))
    below = histogram.cumsum(-1)
    last = levels.amax(-1, keepdim=True)
    step = (levels.shape[-1] - histogram.gather(-1, last)) // (_LEVELS - 1)
    table = (functional.pad(below[..., :-1], (1, 0)) + step // 2) // step.clamp(min=1)
    made = table.clamp_(max=_LEVELS - 1).gather(-1, levels).to(clips.dtype).div_(_LEVELS - 1)
    return torch.where((step == 0).unsqueeze(-1), clips, made.view_as(clips))


def grey(clips: Tensor) -> Tensor:
    """Return the luma of clips [N, 3, T, H, W] as [N, 1, T, H, W]."""
    red, green, blue = (clips[:, channel : channel + 1] for channel in range(3))
    return (red * _LUMA[0]).add_(green * _LUMA[1]).add_(blue * _LUMA[2])


def _blend(clips: Tensor, other: Tensor, factors: Sequence[float]) -> Tensor:
    """Return ``factor * clips + (1 - factor) * other``, limited to 0 to 1."""
    share = other * column(clips, [1 - factor for factor in factors])
    return clips.mul_(column(clips, factors)).add_(share).clamp_(0, 1)


def _frame_mean(values: Tensor) -> Tensor:
    """Return the mean of each frame, [N, 1, T, 1, 1], the same in any order of summation."""
    # Whole numbers below 2**53 add up without rounding in float64.
    total = (values * _UNIT).round_().sum((-2, -1), keepdim=True, dtype=torch.float64)
    return total.div_(_UNIT * values.shape[-2] * values.shape[-1]).to(values.dtype)
