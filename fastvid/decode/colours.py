"""Colour types: decoded YUV planes with their conversion matrices, and the pixel format of batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch import Tensor

from fastvid.decode.request import split_planes
from fastvid.errors import UsageError
from fastvid.format.schema import Matrix, Range

Layout = Literal["BCTHW", "BTCHW"]


# Kr and Kb of each matrix, ITU-T H.273 table 4. Unknown is treated as BT.601, as in FFmpeg and DALI.
_KR_KB: Final = {
    Matrix.BT709: (0.2126, 0.0722),
    Matrix.UNKNOWN: (0.299, 0.114),
    Matrix.FCC: (0.30, 0.11),
    Matrix.BT470BG: (0.299, 0.114),
    Matrix.SMPTE170M: (0.299, 0.114),
    Matrix.SMPTE240M: (0.212, 0.087),
    Matrix.BT2020_NCL: (0.2627, 0.0593),
}


# ImageNet statistics over RGB in [0, 1], as torchvision's pretrained models expect them.
IMAGENET_MEAN: Final = (0.485, 0.456, 0.406)


IMAGENET_STD: Final = (0.229, 0.224, 0.225)


@dataclass(frozen=True, slots=True)
class Pixels:
    """The pixel format of a batch: normalisation, dtype and layout.

    Values are ``(rgb / 255 - mean) / std``, computed in float32.
    """

    mean: tuple[float, float, float] = IMAGENET_MEAN  # mean of R, G and B in [0, 1]
    std: tuple[float, float, float] = IMAGENET_STD  # standard deviation of R, G and B in [0, 1], not zero
    dtype: torch.dtype = torch.float32
    layout: Layout = "BCTHW"
    channels_last: bool = False

    def __post_init__(self) -> None:
        if len(self.mean) != 3 or len(self.std) != 3 or 0 in self.std:
            raise UsageError(f"mean {self.mean} and std {self.std} must have three numbers each, and std no zero")
        if not self.dtype.is_floating_point:
            raise UsageError(f"dtype {self.dtype} is not a floating dtype", hint="use float32, or uint8 for levels")
        if self.layout not in ("BCTHW", "BTCHW"):
            raise UsageError(f"unknown layout {self.layout!r}", hint="use BCTHW or BTCHW")

    def empty(self, clips: int, frames: int, size: tuple[int, int], device: torch.device | str) -> Tensor:
        """Allocate an uninitialised batch [B, C, T, H, W] or [B, T, C, H, W]."""
        return empty_batch((clips, 3, frames, *size), self.layout, self.dtype, device, channels_last=self.channels_last)

    def channels(self) -> list[tuple[float, float]]:
        """Return the scale and bias of each channel, for ``level * scale + bias``."""
        return [(1 / (255 * std), -mean / std) for mean, std in zip(self.mean, self.std, strict=True)]


def empty_batch(
    shape: tuple[int, int, int, int, int],
    layout: Layout,
    dtype: torch.dtype,
    device: torch.device | str,
    *,
    channels_last: bool = False,
) -> Tensor:
    """Allocate an uninitialised batch [B, C, T, H, W] or [B, T, C, H, W].

    `channels_last`: whether the channels of a pixel are neighbours in memory, which is then [B, T, H, W, C]; for
    "BCTHW" this is `torch.channels_last_3d`. Otherwise the tensor is contiguous.
    """
    memory = "BTHWC" if channels_last else layout
    sizes = dict(zip("BCTHW", shape, strict=True))
    batch = torch.empty([sizes[axis] for axis in memory], dtype=dtype, device=device)
    return batch.permute([memory.index(axis) for axis in layout])


@dataclass(frozen=True, slots=True, eq=False)
class ClipPlanes:
    """One decoded clip on a device: cropped 4:2:0 planes, neither resized nor flipped."""

    y: Tensor  # uint8 [T, h, w]
    u: Tensor  # uint8 [T, h/2, w/2]
    v: Tensor  # uint8 [T, h/2, w/2]
    flip: bool = False
    matrix: Matrix = Matrix.SMPTE170M
    range: Range = Range.LIMITED

    @classmethod
    def packed(
        cls,
        buffer: Tensor,
        num_frames: int,
        height: int,
        width: int,
        *,
        flip: bool = False,
        matrix: Matrix = Matrix.SMPTE170M,
        sample_range: Range = Range.LIMITED,
    ) -> ClipPlanes:
        """Return views of a flat uint8 buffer with the layout of `fastvid.decode.request.Planes.packed`."""
        return cls(*split_planes(buffer, num_frames, height, width), flip, matrix, sample_range)


def conversion(matrix: Matrix, sample_range: Range) -> tuple[float, float, float, float, float, float]:
    """Return the coefficients of the YUV to RGB conversion.

    They are black, luma scale, red of V, green of U, green of V and blue of U. With
    ``luma = (y - black) * scale``: ``r = luma + red_v * (v - 128)`` and so on (ITU-T H.273, equations 38 to 40).
    """
    if matrix not in _KR_KB:
        raise UsageError(f"matrix {matrix.name} is not a YUV matrix")
    kr, kb = _KR_KB[matrix]
    kg = 1 - kr - kb
    full = sample_range is Range.FULL
    black, luma, chroma = (0.0, 1.0, 1.0) if full else (16.0, 255 / 219, 255 / 224)
    red, blue = 2 * (1 - kr) * chroma, 2 * (1 - kb) * chroma
    return black, luma, red, -kb / kg * blue, -kr / kg * red, blue
