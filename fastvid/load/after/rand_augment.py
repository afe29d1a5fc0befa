"""RandAugment for clips: random operations of one strength, the same for all frames of a clip."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor

from fastvid.errors import UsageError
from fastvid.load.after.programs import Program, run_programs
from fastvid.load.after.transform import TransformDraws
from fastvid.runtime.checks import check_integer

_COLOUR: Final = (
    *("identity", "brightness", "saturation", "contrast", "sharpness"),
    *("posterize", "solarize", "autocontrast", "equalize"),
)
_GEOMETRIC: Final = ("shear_x", "shear_y", "translate_x", "translate_y", "rotate")

# Largest sizes, from torchvision's RandAugment: shears in pixels per pixel, translations as a share of the side (150 of
# the 331 pixels of the NASNet pictures that AutoAugment was tuned on), degrees, and distances of a factor from 1.
_LARGEST: Final = {
    **dict.fromkeys(("shear_x", "shear_y"), 0.3),
    **dict.fromkeys(("translate_x", "translate_y"), 150 / 331),
    "rotate": 30.0,
    **dict.fromkeys(("brightness", "saturation", "contrast", "sharpness"), 0.9),
}
_BITS: Final = (8, 4)  # of posterize, from the lowest to the highest magnitude


@dataclass(frozen=True)
class RandAugment:
    """Applies `num_ops` operations to each clip, each drawn from 14 with equal probability.

    They are identity, shear x and y, translate x and y, rotate, brightness, saturation ("Color"), contrast, sharpness,
    posterize, solarize, autocontrast and equalize, with the ranges of torchvision's table; each that has a sign gets
    either with equal probability. Geometric operations sample bilinearly, and what comes from outside is black.

    Args:
        num_ops: Operations per clip, at least 1.
        magnitude: Strength of every operation, 0 <= magnitude < num_magnitude_bins.
        num_magnitude_bins: Number of strengths, at least 2.
        geometric: False leaves out shears, translations and rotations, as optical flow requires.

    Raises:
        UsageError: If an argument is out of range.

    Source:
        Cubuk et al., RandAugment, 2020; torchvision.transforms.v2.RandAugment, which samples the nearest pixel unless
        told otherwise.
    """

    num_ops: int = 2
    magnitude: int = 9
    num_magnitude_bins: int = 31
    geometric: bool = True

    def __post_init__(self) -> None:
        check_integer("num_ops", self.num_ops, 1)
        check_integer("num_magnitude_bins", self.num_magnitude_bins, 2)
        if not 0 <= check_integer("magnitude", self.magnitude) < self.num_magnitude_bins:
            raise UsageError(
                f"magnitude is {self.magnitude}, expected 0 to {self.num_magnitude_bins - 1}",
                hint="lower magnitude, or raise num_magnitude_bins",
            )

    def draw(self, draws: TransformDraws, /) -> Program:
        """Return the operations of a clip."""
        names = _COLOUR + (_GEOMETRIC if self.geometric else ())
        numbers = draws.uniform(2 * self.num_ops)
        drawn = [
            (names[int(which * len(names))], -1.0 if sign < 0.5 else 1.0)
            for which, sign in zip(numbers[::2], numbers[1::2], strict=True)
        ]
        return tuple(self._step(name, sign) for name, sign in drawn if name != "identity")

    def apply(self, clips: Tensor, parameters: Sequence[Program], /) -> Tensor:
        """Return the changed clips, float32 [N, 3, T, H, W]."""
        return run_programs(clips, parameters)

    def _step(self, name: str, sign: float) -> tuple[str, Any]:
        strength = self.magnitude / (self.num_magnitude_bins - 1)
        if name in _GEOMETRIC:
            return "warp", (name, sign * strength * _LARGEST[name])
        if name in _LARGEST:
            return name, 1 + sign * strength * _LARGEST[name]
        if name == "posterize":
            return name, float(_BITS[0] - round(strength * (_BITS[0] - _BITS[1])))
        # The threshold of solarize; the other operations ignore it.
        return name, 1 - strength
