"""Evaluation views: several clips of a video, several crops of each clip.

View v shows clip v // num_crops and crop v % num_crops, the order that SlowFast uses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from fastvid.decode.request import Box
from fastvid.errors import UsageError
from fastvid.load.clips.augment import CenterCrop, Spatial
from fastvid.load.order.random_draws import Draws

IntArray = npt.NDArray[np.int64]

NUM_CROPS: Final = (1, 3, 5, 10)

_NO_DRAWS: Final = Draws(0, 0, 0)


class Cut(NamedTuple):
    """One view's crop."""

    box: Box
    flip: bool


class ClipSampler(Protocol):
    """A sampler that can spread several clips over a video."""

    def spread(self, num_frames: int, num_clips: int, /) -> IntArray:
        """Frame indices of the clips, int64 [num_clips, T]."""
        ...


@dataclass(frozen=True)
class Views:
    """N clips x M crops of each video; a batch is then [B, N*M, 3, T, H, W], and each packet is decoded once.

    Clips are spread as the sampler says (`Segments`, `Dense`). Crops have the size that the loader's `CenterCrop` asks
    for: 1 is that crop; 3 lie at the beginning, the middle and the end of the video's longer side; 5 are the corners
    and the middle; 10 are those and their mirror images, in that order.

    Args:
        num_clips: N >= 1.
        num_crops: M: 1, 3, 5 or 10.

    Raises:
        UsageError: An argument is out of range.

    Source:
        3 crops: Feichtenhofer et al., SlowFast, ICCV 2019. 10 crops: Wang et al., Temporal Segment Networks, ECCV 2016.
    """

    num_clips: int = 1
    num_crops: int = 1

    def __post_init__(self) -> None:
        if self.num_clips < 1:
            raise UsageError(f"num_clips is {self.num_clips}, expected at least 1")
        if self.num_crops not in NUM_CROPS:
            raise UsageError(f"num_crops is {self.num_crops}", hint=f"known are {', '.join(map(str, NUM_CROPS))}")

    @property
    def num_views(self) -> int:
        """Views of a video, V."""
        return self.num_clips * self.num_crops

    def cuts(self, spatial: Spatial, height: int, width: int) -> list[Cut]:
        """The crops of a video of that size, M of them."""
        middle = spatial.crop.draw(height, width, _NO_DRAWS)
        spare_y, spare_x = height - middle.height, width - middle.width

        def at(y: float, x: float) -> Box:
            # Halves of the spare rows and columns, at even pixels as all crops are.
            return Box(int(spare_y * y) // 2 * 2, int(spare_x * x) // 2 * 2, middle.height, middle.width)

        if self.num_crops == 1:
            return [Cut(middle, False)]
        if self.num_crops == 3:
            ends = [at(0.5, 0), middle, at(0.5, 1)] if width >= height else [at(0, 0.5), middle, at(1, 0.5)]
            return [Cut(box, False) for box in ends]
        five = [at(0, 0), at(0, 1), at(1, 0), at(1, 1), middle]
        return [Cut(box, flip) for flip in (False, True)[: self.num_crops // 5] for box in five]


def check_views(
    sampler: object, spatial: Spatial, *, streams: tuple[str, ...] = ("rgb",), repeats: int = 1
) -> ClipSampler:
    """The sampler, when a loader can give these views.

    Raises:
        UsageError: It cannot.
    """
    if not isinstance(spatial.crop, CenterCrop) or spatial.flip is not None:
        raise UsageError(f"views are cut by their own rule, but spatial is {spatial}", hint="give CenterCrop alone")
    if not hasattr(sampler, "spread"):
        raise UsageError(f"{sampler!r} gives one clip of a video", hint="use Segments or Dense for views")
    if getattr(sampler, "jitter", False):
        raise UsageError(f"{sampler!r} draws its frames at random", hint="give it jitter=False for views")
    if streams != ("rgb",) or repeats > 1:
        raise UsageError(
            f"views are of the rgb stream, once a video; got streams={streams}, repeats={repeats}",
            hint="without views= the loader gives one clip of each video, with every stream",
        )
    checked: ClipSampler = sampler
    return checked
