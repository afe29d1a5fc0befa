"""Evaluation protocols by name: which clips of a video, and which crops of a clip, are averaged.

    1x1         one clip, the centre crop
    10x3        ten clips, three crops along the longer side, as for I3D, SlowFast and dense TSM
    1x10        one clip; corners, centre and their mirror images, the "10-crop" of TSN and TSM
    twice       two clips, the centre crop: TSM's "twice sample", at the middle and at the start of each segment
    twicex3     the same with three crops, TSM's protocol for Something-Something

In general ``CLIPSxCROPS`` with 1, 3, 5 or 10 crops. Clips of a sampler of segments lie at V evenly spaced places inside
each segment; dense clips start at V evenly spaced places, first and last included (mit-han-lab/temporal-shift-module
ops/dataset.py at 1f6a834, _get_test_indices).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from fastvid.decode.request import Box
from fastvid.errors import UsageError
from fastvid.load.clips.augment import CenterCrop, Crop, HorizontalFlip, Transform
from fastvid.load.clips.sampling import Dense, Sampler, Segments
from fastvid.load.order.random_draws import Draws

IntArray = npt.NDArray[np.int64]
TWICE: Final = "twice"

_NAME: Final = re.compile(r"(\d+|twice)(?:x(\d+))?")
_MIDDLE: Final = (1, 1)
_CORNERS: Final = ((0, 0), (0, 2), (2, 0), (2, 2))


@dataclass(frozen=True)
class SegmentsAt:
    """One frame at the same place of each segment.

    Attributes:
        num_segments: T.
        place: Place inside a segment, 0 <= place < 1; one half is the middle.
        length: Consecutive frames from each place.
    """

    num_segments: int
    place: float
    length: int = 1

    @property
    def num_frames(self) -> int:
        """Frames of a clip."""
        return self.num_segments * self.length

    def draw(self, num_frames: int, _draws: Draws, /) -> IntArray:
        """Frame indices, int64 [T * length]."""
        tick = max(1, num_frames - self.length + 1) / self.num_segments
        starts = (tick * self.place + tick * np.arange(self.num_segments)).astype(np.int64)
        frames: IntArray = np.minimum(starts[:, None] + np.arange(self.length), num_frames - 1).reshape(-1)
        return frames


@dataclass(frozen=True)
class DenseAt:
    """A dense clip that starts at one of several evenly spaced places.

    Attributes:
        dense: Frames, stride and what follows a short video.
        number: Which clip, from 0.
        count: How many clips.
    """

    dense: Dense
    number: int
    count: int

    @property
    def num_frames(self) -> int:
        """Frames of a clip."""
        return self.dense.num_frames

    def draw(self, num_frames: int, _draws: Draws, /) -> IntArray:
        """Frame indices, int64 [T]."""
        dense = self.dense
        spare = max(0, num_frames - ((dense.num_frames - 1) * dense.stride + 1))
        start = int(np.linspace(0, spare, self.count)[self.number])
        frames = start + np.arange(dense.num_frames, dtype=np.int64) * dense.stride
        return frames % num_frames if dense.short == "loop" else np.minimum(frames, num_frames - 1)


@dataclass(frozen=True)
class PlacedCrop(CenterCrop):
    """A crop of the centre crop's size at another place.

    Attributes:
        place: Halves of the free height and width above and left of the crop: (1, 1) is the centre.
        longer: Move along the longer side alone, by ``place[1]``.
    """

    place: tuple[int, int] = _MIDDLE
    longer: bool = False

    def draw(self, height: int, width: int, draws: Draws, /) -> Box:
        """The crop; nothing is drawn."""
        box = super().draw(height, width, draws)
        down, right = self.place
        if self.longer and height > width:
            down, right = right, 1
        elif self.longer:
            down = 1
        return Box((height - box.height) * down // 2 & ~1, (width - box.width) * right // 2 & ~1, box.height, box.width)


@dataclass(frozen=True)
class View:
    """One clip and crop of every video.

    Attributes:
        frames: Which frames.
        spatial: Which crop.
    """

    frames: Sampler
    spatial: tuple[Transform, ...]


def views(protocol: str, frames: Sampler, spatial: Sequence[Transform], *, size: int | None = None) -> list[View]:
    """The views that a protocol averages.

    Args:
        protocol: Name, see the module.
        frames: Sampler of the recipe's evaluation.
        spatial: The recipe's evaluation crop.
        size: Side of the crops in pixels, such as 256 for "full resolution"; None keeps the recipe's.

    Raises:
        UsageError: The name is none, or the sampler or crop cannot be moved.
    """
    match = _NAME.fullmatch(protocol)
    if match is None or match[1] == "0":
        raise UsageError(f"protocol is {protocol!r}", hint="such as 1x1, 10x3, 1x10, twice or twicex3")
    crops = _crops(int(match[2] or 1), spatial, size)
    return [View(sampler, crop) for sampler in _samplers(match[1], frames) for crop in crops]


def _samplers(clips: str, frames: Sampler) -> list[Sampler]:
    if clips == "1":
        return [frames]
    if isinstance(frames, Segments):
        # TSM's two: the middle and the start of each segment.
        count = 2 if clips == TWICE else int(clips)
        places = (0.5, 0.0) if clips == TWICE else [(number + 0.5) / count for number in range(count)]
        return [SegmentsAt(frames.num_segments, place, frames.length) for place in places]
    if isinstance(frames, Dense) and clips != TWICE:
        return [DenseAt(frames, number, int(clips)) for number in range(int(clips))]
    raise UsageError(
        f"data.eval_frames is {frames}, of which a video has no {clips} clips",
        hint="use a protocol of one clip, Segments with any, or Dense with a number of clips",
    )


def _crops(count: int, spatial: Sequence[Transform], size: int | None) -> list[tuple[Transform, ...]]:
    crop = next(transform for transform in spatial if not isinstance(transform, HorizontalFlip))
    side, short = (size or crop.output), getattr(crop, "short_side", None)
    if count == 1:
        return [tuple(spatial) if size is None else (CenterCrop(size, short),)]
    if not isinstance(crop, CenterCrop):
        raise UsageError(f"data.eval_spatial crops by {_kind(crop)}, of which there are no {count}", hint="CenterCrop")
    if count == 3:
        return [(PlacedCrop(side, short, (1, right), longer=True),) for right in range(3)]
    if count not in (5, 10):
        raise UsageError(f"{count} crops are no protocol", hint="1, 3, 5 or 10")
    five: list[tuple[Transform, ...]] = [(PlacedCrop(side, short, place),) for place in (_MIDDLE, *_CORNERS)]
    return five if count == 5 else [*five, *((*one, HorizontalFlip(1.0)) for one in five)]


def _kind(crop: Crop) -> str:
    return type(crop).__name__
