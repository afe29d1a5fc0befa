"""The protocol of transforms, their random numbers, and helpers for transforms of whole batches.

A batch is the same for any world size, so a clip must get the same bits whichever clips it shares a batch with. The
transforms of this folder therefore use only operations whose result for a clip cannot depend on the others:
elementwise ones, products and sums in separate calls (a fused product and sum rounds once in the vectorised part of a
loop and may round twice in its remainder), minima and maxima, and sums that are exact in any order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from fastvid.errors import UsageError
from fastvid.load.memory.device import upload
from fastvid.load.order.random_draws import Draws, Purpose

_WORDS: Final = 2**32  # random words reserved for each transform of each view of a clip
_TRANSFORMS: Final = 2**12  # transforms for which words are reserved


@dataclass(frozen=True, slots=True)
class TransformDraws:
    """The random numbers of one transform for one clip: the same for any world size, worker kind and device.

    Attributes:
        draws: The random numbers of the clip's sample, by seed, epoch and position.
        view: Number of the clip among the views of its sample, 0 without views.
        index: Place of the transform in the list `after=`.
    """

    draws: Draws
    view: int = 0
    index: int = 0

    def uniform(self, count: int, first: int = 0) -> list[float]:
        """Return the numbers `first` to `first + count - 1`, uniform in [0, 1); the same on every call."""
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

    A transform that moves pixels, as a rotation does, has an attribute `geometric` that is True: it is refused together
    with optical flow, which transforms do not change.
    """

    def draw(self, draws: TransformDraws, /) -> Any:
        """Return the parameters of one clip, of any type. Called on the host."""
        ...

    def apply(self, clips: Tensor, parameters: Sequence[Any], /) -> Tensor:
        """Return the transformed clips; may change `clips` in place.

        Args:
            clips: float32 [N, 3, T, H, W], RGB in 0 to 1, contiguous, on the device of the batch. Masked rows are not
                among them. N differs between worlds: the result for a clip must not depend on the other clips.
            parameters: What `draw` returned for each clip.

        Returns:
            float32 [N, 3, T, H', W'].
        """
        ...


def column(clips: Tensor, values: Sequence[float]) -> Tensor:
    """Return one number per clip on the device of the clips, float32 [N, 1, 1, 1, 1]; the host does not wait."""
    return upload(torch.tensor(values, dtype=torch.float32), clips.device).view(-1, 1, 1, 1, 1)


def change_rows(clips: Tensor, rows: Sequence[int], change: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply a change of unchanged shape to some clips of a batch.

    Args:
        clips: [N, ...]; changed in place.
        rows: Numbers of the clips, increasing.
        change: Gets the clips of `rows` as one tensor, may change it in place, and returns the result.

    Returns:
        [N, ...].
    """
    if len(rows) == len(clips):
        return change(clips)
    if rows:
        # Row by row, because a list of rows would be copied to the device, and the host would wait for that.
        changed = change(torch.stack([clips[row] for row in rows]))
        for row, clip in zip(rows, changed, strict=True):
            clips[row] = clip
    return clips


def check_probability(p: float) -> None:
    """Check the probability of a transform.

    Raises:
        UsageError: If it is not in 0 to 1.
    """
    if not 0 <= p <= 1:
        raise UsageError(f"p is {p}, expected 0 <= p <= 1", hint="set p to the share of clips to transform")
