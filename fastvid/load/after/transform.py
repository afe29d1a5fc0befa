"""The protocol of transforms, their random numbers, and the operations that they are made of.

A batch is the same for any world size, so a clip must get the same bits whichever clips it shares a batch with. The
transforms of this folder therefore use only operations whose result for a clip cannot depend on the others:
elementwise ones, products and sums in separate calls (a fused product and sum rounds once in the vectorised part of a
loop and may round twice in its remainder), minima and maxima, and sums that are exact in any order.

Operations of colour are torchvision's. Each takes clips, float32 [N, 3, T, H, W] in 0 to 1, which it may change, and
one number per clip, and returns clips of the same shape. Statistics of a picture (the mean of `contrast`, the extremes
of `autocontrast`, the histogram of `equalize`) are those of each frame, as torchvision computes them for a video.
Rotation, shear and shift use one sampling grid per clip, for all of its frames.

Source:
    torchvision 0.29, torchvision/transforms/v2/functional/_color.py; results differ from it by at most 1e-6.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from fastvid.load.device import upload
from fastvid.load.order.draws import Draws, Purpose

_WORDS: Final = 2**32  # random words reserved for each transform of each view of a clip
_TRANSFORMS: Final = 2**12  # transforms for which words are reserved


@dataclass(frozen=True, slots=True)
class TransformDraws:
    """The random numbers of one transform for one clip: the same for any world size, worker kind and device.

    Attributes:
        draws: The random numbers of the clip's sample, by seed, epoch and position.
        view: Index of the clip among the views of its sample, 0 without views.
        index: Index of the transform in the list `after=`.
    """

    draws: Draws
    view: int = 0
    index: int = 0

    def uniform(self, count: int, first: int = 0) -> list[float]:
        """Return numbers `first` to `first + count - 1` of the sequence, uniform in [0, 1); the same on every call."""
        return self.draws.uniform(Purpose.TRANSFORM, count, self._start + first)

    @property
    def seed(self) -> int:
        """A seed for another random generator, 0 <= seed < 2**64."""
        return self.draws.words(Purpose.TRANSFORM, 1, self._start)[0]

    @property
    def _start(self) -> int:
        return (self.view * _TRANSFORMS + self.index) * _WORDS


class ClipTransform(Protocol):
    """A transform of a batch of clips. Its repr becomes part of a loader's state, so use a frozen dataclass.

    A transform that moves pixels, as a rotation does, has an attribute `geometric` that is True: a loader rejects it
    together with optical flow, which transforms do not change.
    """

    def draw(self, draws: TransformDraws, /) -> Any:
        """Return the parameters of one clip, of any type. Called on the host."""
        ...

    def apply(self, clips: Tensor, parameters: Sequence[Any], /) -> Tensor:
        """Return the transformed clips; may change `clips` in place.

        Args:
            clips: float32 [N, 3, T, H, W], RGB in 0 to 1, contiguous, on the device of the batch. Masked rows are not
                among them. N depends on the world size: the result for a clip must not depend on other clips.
            parameters: What `draw` returned for each clip.

        Returns:
            float32 [N, 3, T, H', W'].
        """
        ...


def column(clips: Tensor, values: Sequence[float]) -> Tensor:
    """Return one number per clip, float32 [N, 1, 1, 1, 1], on the device of the clips, without waiting for the copy."""
    return upload(torch.tensor(values, dtype=torch.float32), clips.device).view(-1, 1, 1, 1, 1)


def change_rows(clips: Tensor, rows: Sequence[int], change: Callable[[Tensor], Tensor]) -> Tensor:
    """Change the clips in `rows` in place, keeping their shape; return all clips, [N, ...].

    `change`: gets the clips of `rows` as one tensor, may change it in place, and returns the result.
    """
    if len(rows) == len(clips):
        return change(clips)
    if rows:
        # Copied back one by one: an index list would be copied to the device, and the host would wait for that.
        changed = change(torch.stack([clips[row] for row in rows]))
        for row, clip in zip(rows, changed, strict=True):
            clips[row] = clip
    return clips


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
    """Stretch each channel of each frame to 0 to 1; a channel of one value is unchanged."""
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
    # Sums of whole numbers below 2**53 are exact in float64.
    total = (values * _UNIT).round_().sum((-2, -1), keepdim=True, dtype=torch.float64)
    return total.div_(_UNIT * values.shape[-2] * values.shape[-1]).to(values.dtype)


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
    """Return the map from output to source pixels as a 2x3 matrix, row by row, relative to the picture's centre.

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


Program = Sequence[tuple[str, Any]]
"""The operations on one clip, in order: a name in `OPERATIONS` and its parameter. Empty leaves the clip as it is."""

_ALL: Final[Sequence[Callable[[Tensor, Sequence[Any]], Tensor]]] = (
    *(autocontrast, brightness, contrast, equalize, hue, posterize, saturation, sharpness, solarize, warp),
)
OPERATIONS: Final = {operation.__name__: operation for operation in _ALL}


def run_programs(clips: Tensor, programs: Sequence[Program]) -> Tensor:
    """Return the clips after their programs; at each step, clips with the same operation are changed together.

    `clips`: float32 [N, 3, T, H, W] in 0 to 1; may be changed.
    """
    for step in range(max(map(len, programs), default=0)):
        groups: dict[str, list[int]] = {}
        for row, program in enumerate(programs):
            if step < len(program):
                groups.setdefault(program[step][0], []).append(row)
        for name, rows in groups.items():
            numbers = [programs[row][step][1] for row in rows]
            clips = change_rows(clips, rows, lambda part, name=name, numbers=numbers: OPERATIONS[name](part, numbers))  # type: ignore[misc]
    return clips
