"""What fastvid's colours are: planes and their matrices on one side, what the model gets on the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch import Tensor

from fastvid.errors import UsageError
from fastvid.format.schema import Matrix, Range

Layout = Literal["BCTHW", "BTCHW"]


# Kr and Kb of each matrix, ITU-T H.273 table 4. Unknown is taken for BT.601, as FFmpeg and DALI take it.
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
    """What the model gets: ``(rgb / 255 - mean) / std``, computed in float32, in a dtype and a layout.

    Attributes:
        mean: Of R, G and B in [0, 1].
        std: Of R, G and B in [0, 1]; none is zero.
        dtype: A floating dtype.
        layout: "BCTHW" or "BTCHW".
    """

    mean: tuple[float, float, float] = IMAGENET_MEAN
    std: tuple[float, float, float] = IMAGENET_STD
    dtype: torch.dtype = torch.float32
    layout: Layout = "BCTHW"

    def __post_init__(self) -> None:
        if len(self.mean) != 3 or len(self.std) != 3 or 0 in self.std:
            raise UsageError(f"mean {self.mean} and std {self.std} must be three numbers each, std not zero")
        if not self.dtype.is_floating_point:
            raise UsageError(f"dtype {self.dtype} is not a floating dtype")
        if self.layout not in ("BCTHW", "BTCHW"):
            raise UsageError(f"layout {self.layout!r} is not known", hint="known are BCTHW and BTCHW")

    def empty(self, clips: int, frames: int, size: tuple[int, int], device: torch.device | str) -> Tensor:
        """An uninitialised batch [B, C, T, H, W] or [B, T, C, H, W]."""
        order = (3, frames) if self.layout == "BCTHW" else (frames, 3)
        return torch.empty((clips, *order, *size), dtype=self.dtype, device=device)

    def channels(self) -> list[tuple[float, float]]:
        """Scale and bias of each channel: ``level * scale + bias``."""
        return [(1 / (255 * std), -mean / std) for mean, std in zip(self.mean, self.std, strict=True)]


@dataclass(frozen=True, slots=True, eq=False)
class ClipPlanes:
    """One clip as a decoder leaves it on a device: cropped 4:2:0 planes, neither resized nor flipped.

    Attributes:
        y: uint8 [T, h, w].
        u: uint8 [T, h/2, w/2].
        v: uint8 [T, h/2, w/2].
        flip: Mirror left and right.
        matrix: Luma coefficients.
        range: Sample range.
    """

    y: Tensor
    u: Tensor
    v: Tensor
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
        """Views of a flat uint8 buffer laid out as `fastvid.decode.request.Planes.packed` lays it out."""
        luma, chroma = num_frames * height * width, num_frames * (height // 2) * (width // 2)
        half = (num_frames, height // 2, width // 2)
        return cls(
            buffer[:luma].view(num_frames, height, width),
            buffer[luma : luma + chroma].view(half),
            buffer[luma + chroma : luma + 2 * chroma].view(half),
            flip,
            matrix,
            sample_range,
        )


def conversion(matrix: Matrix, sample_range: Range) -> tuple[float, float, float, float, float, float]:
    """What turns samples into RGB levels: black, luma scale, and what V gives to red, U and V to green, U to blue.

    With ``luma = (y - black) * scale``: ``r = luma + red_v * (v - 128)`` and so on (ITU-T H.273, equations 38 to 40).

    Raises:
        UsageError: The matrix is not one of YUV.
    """
    if matrix not in _KR_KB:
        raise UsageError(f"matrix {matrix.name} is not one of YUV")
    kr, kb = _KR_KB[matrix]
    kg = 1 - kr - kb
    full = sample_range is Range.FULL
    black, luma, chroma = (0.0, 1.0, 1.0) if full else (16.0, 255 / 219, 255 / 224)
    red, blue = 2 * (1 - kr) * chroma, 2 * (1 - kb) * chroma
    return black, luma, red, -kb / kg * blue, -kr / kg * red, blue
