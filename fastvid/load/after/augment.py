"""Random blur, colour, erasing and RandAugment: each the same for all frames of a clip."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor
from torch.nn import functional

from fastvid.errors import UsageError
from fastvid.load.after.transform import Program, TransformDraws, change_rows, column, run_programs
from fastvid.runtime.values import check_bounds, check_channels, check_integer, check_share, check_switches, is_number

Weights = tuple[float, ...]


@dataclass(frozen=True)
class GaussianBlur:
    """Blurs each frame by a Gaussian of random width, with probability p; borders are mirrored.

    Args:
        kernel_size: Side of the kernel in pixels, odd; half of it must be smaller than the sides of the clip.
        sigma: Bounds of the standard deviation in pixels, 0 < low <= high.
        p: Probability, 0 <= p <= 1.

    Raises:
        UsageError: If an argument is out of range, or the clips are too small for the kernel.

    Source:
        torchvision.transforms.v2.GaussianBlur, which has no `p`.
    """

    kernel_size: int
    sigma: tuple[float, float] = (0.1, 2.0)
    p: float = 1.0

    def __post_init__(self) -> None:
        if check_integer("kernel_size", self.kernel_size, 1) % 2 == 0:
            raise UsageError(f"kernel_size is {self.kernel_size}, expected an odd number", hint="add 1 to kernel_size")
        object.__setattr__(self, "sigma", check_bounds("sigma", self.sigma))
        check_share("p", self.p)

    def draw(self, draws: TransformDraws, /) -> Weights:
        """Return the kernel's weights from its centre outwards, which sum to 1 with both sides; () for no blur."""
        chance, number = draws.uniform(2)
        if chance >= self.p:
            return ()
        sigma = self.sigma[0] + number * (self.sigma[1] - self.sigma[0])
        bell = [math.exp(-0.5 * (x / sigma) ** 2) for x in range(self.kernel_size // 2 + 1)]
        total = bell[0] + 2 * sum(bell[1:])
        return tuple(weight / total for weight in bell)

    def apply(self, clips: Tensor, parameters: Sequence[Weights], /) -> Tensor:
        """Return the changed clips, float32 [N, 3, T, H, W]."""
        if self.kernel_size // 2 >= min(clips.shape[-2:]):
            hint = "lower kernel_size"
            raise UsageError(f"{self} does not fit clips of {clips.shape[-1]}x{clips.shape[-2]} pixels", hint=hint)
        rows = [row for row, weights in enumerate(parameters) if weights]
        return change_rows(clips, rows, lambda part: self._blur(part, [parameters[row] for row in rows]))

    def _blur(self, clips: Tensor, kernels: Sequence[Weights]) -> Tensor:
        reach, (height, width) = self.kernel_size // 2, clips.shape[-2:]
        columns = [column(clips, weights) for weights in zip(*kernels, strict=True)]
        # Shifted sums, not a convolution, whose algorithm may depend on the number of clips.
        for axis, length in ((-2, height), (-1, width)):
            pad = (0, 0, reach, reach) if axis == -2 else (reach, reach, 0, 0)
            padded = functional.pad(clips.flatten(1, 2), pad, mode="reflect")
            padded = padded.view(*clips.shape[:3], *padded.shape[-2:])
            clips = padded.narrow(axis, reach, length) * columns[0]
            for x, weight in enumerate(columns[1:], 1):
                pair = padded.narrow(axis, reach - x, length) + padded.narrow(axis, reach + x, length)
                clips.add_(pair.mul_(weight))
        return clips


Range = tuple[float, float]


class _Programs:
    """Base of the transforms that draw a program of operations for each clip."""

    def apply(self, clips: Tensor, parameters: Sequence[Program], /) -> Tensor:
        """Return the changed clips, float32 [N, 3, T, H, W]."""
        return run_programs(clips, parameters)


@dataclass(frozen=True)
class ColorJitter(_Programs):
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
        check_share("p", self.p)

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


@dataclass(frozen=True)
class Grayscale(_Programs):
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
        check_share("p", self.p)

    def draw(self, draws: TransformDraws, /) -> Program:
        """Return the operations of a clip: one that removes its saturation, or none."""
        return (("saturation", 0.0),) if draws.uniform(1)[0] < self.p else ()


def _bounds(name: str, value: Any, *, centre: float, least: float, most: float) -> Range:
    """Return a setting as (low, high), so that 0.4 and (0.6, 1.4) have the same repr."""
    if is_number(value):
        pair = (max(least, centre - value), centre + value) if value >= 0 else (math.nan, math.nan)
    else:
        pair = tuple(value) if hasattr(value, "__iter__") and all(map(is_number, value)) else ()
    if len(pair) != 2 or not least <= pair[0] <= pair[1] <= most or math.isinf(pair[1]):
        limits = f"{least:g} <= low <= high" + ("" if math.isinf(most) else f" <= {most:g}")
        raise UsageError(f"{name} is {value!r}, expected a number >= 0 or bounds {limits}", hint=f"lower {name}")
    return float(pair[0]), float(pair[1])


_TRIES: Final = 10  # attempts before the clip is left as it is, as in torchvision


@dataclass(frozen=True)
class Erasing:
    """Fills a random rectangle of the clip with one colour, with probability p.

    Up to ten attempts draw an area (uniform) and an aspect ratio (log-uniform) until they give a rectangle smaller than
    the picture; if none does, the clip is unchanged. The rectangle's position is uniform.

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
        check_share("p", self.p)
        # Normalise, so that equal settings have the same fingerprint.
        object.__setattr__(self, "scale", check_bounds("scale", self.scale, 1))
        object.__setattr__(self, "ratio", check_bounds("ratio", self.ratio))
        object.__setattr__(self, "value", check_channels("value", self.value, 1))

    def draw(self, draws: TransformDraws, /) -> list[float]:
        """Return four numbers in [0, 1) for each attempt, as one list; empty if the clip stays as it is."""
        chance, *numbers = draws.uniform(1 + 4 * _TRIES)
        return numbers if chance < self.p else []

    def apply(self, clips: Tensor, parameters: Sequence[list[float]], /) -> Tensor:
        """Return the changed clips, float32 [N, 3, T, H, W]."""
        height, width = clips.shape[-2:]
        assert isinstance(self.value, tuple)
        for clip, numbers in zip(clips, parameters, strict=True):
            y, x, h, w = self.hole(height, width, numbers) or (0, 0, 0, 0)
            for channel, level in zip(clip, self.value, strict=True):
                channel[:, y : y + h, x : x + w] = level
        return clips

    def hole(self, height: int, width: int, numbers: Sequence[float]) -> tuple[int, int, int, int] | None:
        """Return y, x, height and width of the rectangle to erase from pictures of this size, in pixels, or None.

        Args:
            height: Height of the pictures.
            width: Width of the pictures.
            numbers: The list from `draw`: for each attempt area, aspect ratio, y and x.
        """
        low, high = (math.log(bound) for bound in self.ratio)
        for start in range(0, len(numbers), 4):
            size, shape, v, u = numbers[start : start + 4]
            area = height * width * (self.scale[0] + size * (self.scale[1] - self.scale[0]))
            aspect = math.exp(low + shape * (high - low))
            h, w = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
            if 0 < h < height and 0 < w < width:
                return int(v * (height - h + 1)), int(u * (width - w + 1)), h, w
        return None


_COLOUR: Final = (
    *("identity", "brightness", "saturation", "contrast", "sharpness"),
    *("posterize", "solarize", "autocontrast", "equalize"),
)
_GEOMETRIC: Final = ("shear_x", "shear_y", "translate_x", "translate_y", "rotate")

# Sizes at the highest magnitude, from torchvision's RandAugment: shears in pixels per pixel, translations as a share
# of the side (150 of the 331 pixels of the NASNet pictures that AutoAugment was tuned on), rotation in degrees, and how
# far a factor is from 1.
_LARGEST: Final = {
    **dict.fromkeys(("shear_x", "shear_y"), 0.3),
    **dict.fromkeys(("translate_x", "translate_y"), 150 / 331),
    "rotate": 30.0,
    **dict.fromkeys(("brightness", "saturation", "contrast", "sharpness"), 0.9),
}
_BITS: Final = (8, 4)  # kept by posterize at the lowest and the highest magnitude


@dataclass(frozen=True)
class RandAugment(_Programs):
    """Applies `num_ops` operations to each clip, each drawn from 14 with equal probability.

    The operations are identity, shear x and y, translate x and y, rotate, brightness, saturation ("Color"), contrast,
    sharpness, posterize, solarize, autocontrast and equalize, with the ranges of torchvision's table; shifts in either
    direction are equally likely. Geometric operations sample bilinearly; pixels from outside the picture are black.

    Args:
        num_ops: Operations per clip, at least 1.
        magnitude: Strength of every operation, 0 <= magnitude < num_magnitude_bins.
        num_magnitude_bins: Number of strengths, at least 2.
        geometric: False drops shears, translations and rotations, as optical flow requires.

    Raises:
        UsageError: If an argument is out of range.

    Source:
        Cubuk et al., RandAugment, 2020; torchvision.transforms.v2.RandAugment, whose default is to sample the nearest
        pixel.
    """

    num_ops: int = 2
    magnitude: int = 9
    num_magnitude_bins: int = 31
    geometric: bool = True

    def __post_init__(self) -> None:
        check_integer("num_ops", self.num_ops, 1)
        check_integer("num_magnitude_bins", self.num_magnitude_bins, 2)
        check_switches(geometric=self.geometric)
        if not 0 <= check_integer("magnitude", self.magnitude) < self.num_magnitude_bins:
            hint = "lower magnitude, or raise num_magnitude_bins"
            raise UsageError(f"magnitude is {self.magnitude}, expected 0 to {self.num_magnitude_bins - 1}", hint=hint)

    def draw(self, draws: TransformDraws, /) -> Program:
        """Return the operations of a clip."""
        names = _COLOUR + (_GEOMETRIC if self.geometric else ())
        numbers = draws.uniform(2 * self.num_ops)
        drawn = [
            (names[int(which * len(names))], -1.0 if sign < 0.5 else 1.0)
            for which, sign in zip(numbers[::2], numbers[1::2], strict=True)
        ]
        return tuple(self._step(name, sign) for name, sign in drawn if name != "identity")

    def _step(self, name: str, sign: float) -> tuple[str, Any]:
        strength = self.magnitude / (self.num_magnitude_bins - 1)
        if name in _GEOMETRIC:
            return "warp", (name, sign * strength * _LARGEST[name])
        if name in _LARGEST:
            return name, 1 + sign * strength * _LARGEST[name]
        if name == "posterize":
            return name, float(_BITS[0] - round(strength * (_BITS[0] - _BITS[1])))
        # `strength` sets the threshold of solarize; autocontrast and equalize ignore the number.
        return name, 1 - strength
