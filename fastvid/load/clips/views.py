"""Evaluation views: several clips of a video, several crops of each clip.

View v shows clip v // num_crops and crop v % num_crops, the order that SlowFast uses. The loader,
``fastvid eval --protocol`` and ``fastvid predict --protocol`` all use this definition.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from fastvid.errors import UsageError
from fastvid.load.clips.crops import CenterCrop, Spatial
from fastvid.load.clips.sampling import Sampler, Segments, VideoInfo, check_counts, draw_frames
from fastvid.load.order.draws import Draws
from fastvid.runtime.arrays import IntArray
from fastvid.runtime.values import check_choice, check_numbers

NUM_CROPS: Final = (1, 3, 5, 10)

_NO_DRAWS: Final = Draws(0, 0, 0)


@dataclass(frozen=True, repr=False)
class Views:
    """N clips x M crops of each video; a batch is then [B, N*M, 3, T, H, W], and each packet is decoded once.

    A single clip is drawn by the loader's sampler; several are spread by it (`Segments`, `Dense`, `Window`). A single
    crop is the loader's; several have the size of its `CenterCrop`: 3 are at the start, centre and end of the video's
    longer side; 5 are the corners and the centre; 10 are those and their mirror images, in that order.

    Args:
        num_clips: N >= 1.
        num_crops: M: 1, 3, 5 or 10.
        places: Place of each clip within the segments of `Segments`, each 0 <= place < 1; empty spreads them evenly.

    Raises:
        UsageError: If an argument is out of range.

    Source:
        3 crops: Feichtenhofer et al., SlowFast, ICCV 2019. 10 crops: Wang et al., Temporal Segment Networks, ECCV 2016.
    """

    num_clips: int = 1
    num_crops: int = 1
    places: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        check_counts(self, "num_clips")
        check_choice("num_crops", self.num_crops, NUM_CROPS)
        if not hasattr(self.places, "__len__"):
            raise UsageError(f"places are {self.places!r}, expected a tuple", hint="crops have the size of spatial=")
        object.__setattr__(self, "places", check_numbers("places", self.places))
        if self.places and (len(self.places) != self.num_clips or not all(0 <= place < 1 for place in self.places)):
            raise UsageError(f"places are {self.places}, expected {self.num_clips} numbers >= 0 and < 1, one a clip")

    def __repr__(self) -> str:
        # Part of a loader's fingerprint, so omit default places.
        places = f", places={self.places}" if self.places else ""
        return f"Views(num_clips={self.num_clips}, num_crops={self.num_crops}{places})"

    @property
    def num_views(self) -> int:
        """Views of a video, V."""
        return self.num_clips * self.num_crops

    def clips(self, sampler: Sampler, video: VideoInfo, draws: Draws = _NO_DRAWS) -> list[IntArray]:
        """Return the frame indices of the clips of a video: N arrays, each int64 [T].

        Raises:
            UsageError: If the sampler fails, or chooses anything but frames of the video; names sampler and key.
        """
        spreads: Any = sampler  # has `at` or `spread` if the views need it, see `check_views`
        if self.places:
            return draw_frames(sampler, video, lambda: [spreads.at(video, place) for place in self.places])
        if self.num_clips == 1:
            return draw_frames(sampler, video, lambda: [sampler.draw(video, draws)])
        return draw_frames(sampler, video, lambda: list(spreads.spread(video, self.num_clips)))

    def divided(self, cuts: IntArray, heights: IntArray, widths: IntArray) -> IntArray:
        """Replace the central crop of each video, int64 [N, 7], by its M crops, [N * M, 7], see `Spatial.cuts`."""
        if self.num_crops == 1:
            return cuts
        places, along = np.array(_PLACES[: 5 if self.num_crops > 3 else 3]), np.array([0, 0.5, 1])
        downs, rights = places[:, 0], places[:, 1]
        if self.num_crops == 3:
            wide = (widths >= heights)[:, None]
            downs, rights = np.where(wide, 0.5, along), np.where(wide, along, 0.5)
        found = np.repeat(cuts[:, None], self.num_crops, axis=1)
        sides = len(places)
        # Fractions of the spare rows and columns, rounded down to even pixels.
        for first in range(0, self.num_crops, sides):
            part = found[:, first : first + sides]
            part[..., 0] = ((heights - cuts[:, 2])[:, None] * downs).astype(np.int64) // 2 * 2
            part[..., 1] = ((widths - cuts[:, 3])[:, None] * rights).astype(np.int64) // 2 * 2
            part[..., 6] = first > 0
        return found.reshape(-1, cuts.shape[1])


_PLACES: Final = ((0, 0), (0, 1), (1, 0), (1, 1), (0.5, 0.5))
"""Corners and centre, in fractions of the spare rows and columns."""

ONE_VIEW: Final = Views()
"""One clip and one crop, drawn by the loader's sampler and crop."""


def check_views(
    views: Views, sampler: object, spatial: Spatial, *, clips_per_video: int = 1, audio: bool = False
) -> None:
    """Raise UsageError if a loader cannot make these views with its sampler, crop and other arguments."""
    if audio:
        raise UsageError("audio= was given with views=", hint="make a loader with one clip per video for the sound")
    if views.num_crops > 1 and (not isinstance(spatial.crop, CenterCrop) or spatial.flip is not None):
        hint = "use CenterCrop alone"
        raise UsageError(f"{views.num_crops} crops need a CenterCrop without flip, but spatial is {spatial}", hint=hint)
    if views.places and not isinstance(sampler, Segments):
        raise UsageError(f"{sampler!r} has no segments for places={views.places}", hint="use Segments")
    if views.num_clips > 1 and not hasattr(sampler, "spread"):
        hint = "use Segments, Dense or Window for views"
        raise UsageError(f"{sampler!r} makes one clip of a video, not {views.num_clips}", hint=hint)
    if views.num_clips > 1 and getattr(sampler, "jitter", False):
        raise UsageError(f"{sampler!r} draws its frames at random", hint="set jitter=False for views")
    if clips_per_video > 1:
        hint = "use Views(num_clips), or clips_per_video"
        raise UsageError(f"views= was given with clips_per_video={clips_per_video}", hint=hint)
