"""Blur clips, all frames alike."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional

from fastvid.errors import UsageError
from fastvid.load.after.transform import TransformDraws, change_rows, check_probability, column
from fastvid.runtime.checks import check_integer

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
        sigma = tuple(map(float, self.sigma))
        if len(sigma) != 2 or not 0 < sigma[0] <= sigma[1] < math.inf:
            raise UsageError(f"sigma is {self.sigma}, expected 0 < low <= high", hint="set sigma=(0.1, 2.0)")
        object.__setattr__(self, "sigma", sigma)
        check_probability(self.p)

    def draw(self, draws: TransformDraws, /) -> Weights:
        """Return the weights of a clip's kernel from its centre outwards; none if the clip stays as it is."""
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
            raise UsageError(
                f"{self} does not fit clips of {clips.shape[-1]}x{clips.shape[-2]} pixels", hint="lower kernel_size"
            )
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
