"""Erase a rectangle, the same in all frames of a clip."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from torch import Tensor

from fastvid.errors import UsageError
from fastvid.load.after.transform import TransformDraws, check_probability

_TRIES: Final = 10  # attempts before the clip is left as it is, as in torchvision


class Hole(NamedTuple):
    """A rectangle in pixels."""

    y: int
    x: int
    height: int
    width: int


@dataclass(frozen=True)
class Erasing:
    """Fills a random rectangle of the clip with one colour, with probability p.

    Up to ten attempts draw an area (uniform) and an aspect ratio (log-uniform) until a rectangle smaller than the
    picture results; if none does, the clip stays. Its place is uniform.

    Args:
        p: Probability, 0 <= p <= 1.
        scale: Bounds of the rectangle's fraction of the picture's area, 0 < low <= high <= 1.
        ratio: Bounds of the rectangle's height / width, 0 < low <= high.
        value: The colour, before normalisation: one number, or three for R, G and B, each 0 to 1.

    Raises:
        UsageError: If an argument is out of range.

    Source:
        Zhong et al., Random Erasing Data Augmentation, AAAI 2020; torchvision.transforms.v2.RandomErasing.
    """

    p: float = 0.5
    scale: tuple[float, float] = (0.02, 0.33)
    ratio: tuple[float, float] = (0.3, 3.3)
    value: float | tuple[float, float, float] = 0.0

    def __post_init__(self) -> None:
        check_probability(self.p)
        scale, ratio = (tuple(map(float, pair)) for pair in (self.scale, self.ratio))
        if len(scale) != 2 or not 0 < scale[0] <= scale[1] <= 1:
            raise UsageError(f"scale is {self.scale}, expected 0 < low <= high <= 1", hint="set scale=(0.02, 0.33)")
        if len(ratio) != 2 or not 0 < ratio[0] <= ratio[1] < math.inf:
            raise UsageError(f"ratio is {self.ratio}, expected 0 < low <= high", hint="set ratio=(0.3, 3.3)")
        colour = (self.value,) * 3 if isinstance(self.value, int | float) else tuple(self.value)
        if len(colour) != 3 or not all(0 <= level <= 1 for level in colour):
            raise UsageError(
                f"value is {self.value}, expected one or three numbers 0 to 1", hint="divide levels by 255"
            )
        # Normalise, so that equal settings have the same fingerprint.
        for name, normal in (("scale", scale), ("ratio", ratio), ("value", tuple(map(float, colour)))):
            object.__setattr__(self, name, normal)

    def draw(self, draws: TransformDraws, /) -> list[float]:
        """Return four numbers for each attempt; none if the clip stays as it is."""
        chance, *numbers = draws.uniform(1 + 4 * _TRIES)
        return numbers if chance < self.p else []

    def apply(self, clips: Tensor, parameters: Sequence[list[float]], /) -> Tensor:
        """Return the changed clips, float32 [N, 3, T, H, W]."""
        height, width = clips.shape[-2:]
        assert isinstance(self.value, tuple)
        for clip, numbers in zip(clips, parameters, strict=True):
            hole = self.hole(height, width, numbers)
            if hole is not None:
                rows, columns = slice(hole.y, hole.y + hole.height), slice(hole.x, hole.x + hole.width)
                for channel, level in zip(clip, self.value, strict=True):
                    channel[:, rows, columns] = level
        return clips

    def hole(self, height: int, width: int, numbers: Sequence[float]) -> Hole | None:
        """Return the rectangle to erase from pictures of this size, or None.

        Args:
            height: Height of the pictures.
            width: Width of the pictures.
            numbers: From `draw`.
        """
        low, high = (math.log(bound) for bound in self.ratio)
        for start in range(0, len(numbers), 4):
            size, shape, v, u = numbers[start : start + 4]
            area = height * width * (self.scale[0] + size * (self.scale[1] - self.scale[0]))
            aspect = math.exp(low + shape * (high - low))
            h, w = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
            if 0 < h < height and 0 < w < width:
                return Hole(int(v * (height - h + 1)), int(u * (width - w + 1)), h, w)
        return None
