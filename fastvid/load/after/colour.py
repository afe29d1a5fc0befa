"""Random changes of colour, the same for all frames of a clip."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from fastvid.errors import UsageError
from fastvid.load.after.programs import Program, run_programs
from fastvid.load.after.transform import TransformDraws, check_probability

Range = tuple[float, float]


@dataclass(frozen=True)
class ColorJitter:
    """Changes brightness, contrast, saturation and hue by uniformly random amounts, in random order.

    Args:
        brightness: Bounds (low, high) of the factor, 0 <= low <= high; a number b stands for (max(0, 1 - b), 1 + b), so
            0 never changes it.
        contrast: As brightness. Contrast is about the mean grey of each frame.
        saturation: As brightness.
        hue: Bounds of the shift in turns of the colour circle, -0.5 <= low <= high <= 0.5; a number h stands for
            (-h, h).
        p: Probability that a clip is changed at all, 0 <= p <= 1.

    Raises:
        UsageError: If an argument is out of range.

    Source:
        torchvision.transforms.v2.ColorJitter, which has no `p`.
    """

    brightness: float | Range = 0.0
    contrast: float | Range = 0.0
    saturation: float | Range = 0.0
    hue: float | Range = 0.0
    p: float = 1.0

    def __post_init__(self) -> None:
        for name in ("brightness", "contrast", "saturation"):
            bounds = _bounds(name, getattr(self, name), centre=1.0, least=0.0, most=math.inf)
            object.__setattr__(self, name, bounds)
        object.__setattr__(self, "hue", _bounds("hue", self.hue, centre=0.0, least=-0.5, most=0.5))
        check_probability(self.p)

    def draw(self, draws: TransformDraws, /) -> Program:
        """Return the changes of a clip, in the order in which they are applied."""
        chance, *numbers = draws.uniform(9)
        if chance >= self.p:
            return ()
        steps = []
        names = ("brightness", "contrast", "saturation", "hue")
        for name, number, place in zip(names, numbers[:4], numbers[4:], strict=True):
            low, high = getattr(self, name)
            unchanged = 0.0 if name == "hue" else 1.0
            if (low, high) != (unchanged, unchanged):
                steps.append((place, (name, low + number * (high - low))))
        return tuple(step for _, step in sorted(steps))

    def apply(self, clips: Tensor, parameters: Sequence[Program], /) -> Tensor:
        """Return the changed clips, float32 [N, 3, T, H, W]."""
        return run_programs(clips, parameters)


@dataclass(frozen=True)
class Grayscale:
    """Replaces R, G and B of a clip by its luma with probability p.

    Args:
        p: Probability, 0 <= p <= 1.

    Raises:
        UsageError: If the probability is out of range.

    Source:
        torchvision.transforms.v2.RandomGrayscale.
    """

    p: float = 0.1

    def __post_init__(self) -> None:
        check_probability(self.p)

    def draw(self, draws: TransformDraws, /) -> Program:
        """Return the program of a clip."""
        return (("saturation", 0.0),) if draws.uniform(1)[0] < self.p else ()

    def apply(self, clips: Tensor, parameters: Sequence[Program], /) -> Tensor:
        """Return the changed clips, float32 [N, 3, T, H, W]."""
        return run_programs(clips, parameters)


def _bounds(name: str, value: float | Range, *, centre: float, least: float, most: float) -> Range:
    """Return the bounds of a setting, so that 0.4 and (0.6, 1.4) have the same repr."""
    if isinstance(value, int | float):
        pair = (max(least, centre - value), centre + value) if value >= 0 else (math.nan, math.nan)
    else:
        pair = tuple(map(float, value))  # type: ignore[assignment]
    if len(pair) != 2 or not least <= pair[0] <= pair[1] <= most or math.isinf(pair[1]):
        limits = f"{least:g} <= low <= high" + ("" if math.isinf(most) else f" <= {most:g}")
        raise UsageError(f"{name} is {value!r}, expected a number >= 0 or bounds {limits}", hint=f"lower {name}")
    return float(pair[0]), float(pair[1])
