"""Spatial transforms that show the whole video: its aspect ratio decides the size of the clip.

Like every crop they show the even part of the video, without the last row or column of a video with an odd side.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from fastvid.decode.request import Box
from fastvid.errors import UsageError
from fastvid.load.clips.augment import CenterCrop
from fastvid.load.clips.crop_size import Size, check_size
from fastvid.load.order.random_draws import Draws
from fastvid.runtime.arrays import IntArray
from fastvid.runtime.checks import check_least


class _Whole(ABC):
    """The whole video, resized by a rule for its size."""

    @property
    def output(self) -> Size | None:
        """Height and width of every clip in pixels; None, because they depend on the video."""
        return None

    @abstractmethod
    def sizes(self, heights: IntArray, widths: IntArray) -> tuple[IntArray, IntArray]:
        """Return the heights and widths of the clips of videos with these sides, in pixels, both int64 [N]."""

    def output_of(self, height: int, width: int) -> Size:
        """Return the height and width of the clips of a video with these sides, in pixels."""
        return _output_of(self, height, width)

    def of_size(self, size: Size) -> CenterCrop:
        """Return the crop for a bucket of this size: the video's largest central region with its aspect ratio."""
        return CenterCrop(None).of_size(size)

    def draw(self, height: int, width: int, _draws: Draws, /) -> Box:
        """Return the even part of the video; uses no random numbers."""
        return Box(0, 0, height & ~1, width & ~1)


# Cached: the videos of a dataset have few sizes, and arrays of one value are slow.
@lru_cache(maxsize=4096)
def _output_of(whole: _Whole, height: int, width: int) -> Size:
    high, wide = whole.sizes(np.array([height]), np.array([width]))
    return int(high[0]), int(wide[0])


@dataclass(frozen=True)
class Resize(_Whole):
    """The whole video, resized; exactly one of the arguments is given.

    Args:
        short_side: Length of the shorter side in pixels. The longer one keeps the aspect ratio and is rounded to the
            nearest even number, half up: 2 * floor(long * short_side / (2 * short) + 1/2), in integers, where short and
            long are the sides of the stored video.
        size: Side, or (height, width), in pixels; the aspect ratio is not kept.

    Raises:
        UsageError: If an argument is not positive, or if not exactly one is given.
    """

    short_side: int | None = None
    size: int | Size | None = None

    def __post_init__(self) -> None:
        if (self.short_side is None) == (self.size is None):
            raise UsageError(
                f"short_side is {self.short_side} and size is {self.size}, expected exactly one of them",
                hint="use Resize(short_side=256), or Resize(size=(256, 340))",
            )
        check_least(1, short_side=self.short_side)
        if self.size is not None:
            object.__setattr__(self, "size", check_size(self.size))

    @property
    def output(self) -> Size | None:
        """Height and width of every clip in pixels; None if they depend on the video."""
        assert not isinstance(self.size, int)
        return self.size

    def sizes(self, heights: IntArray, widths: IntArray) -> tuple[IntArray, IntArray]:
        """Return the heights and widths of the clips of videos with these sides, in pixels, both int64 [N]."""
        if self.output is not None:
            return np.full_like(heights, self.output[0]), np.full_like(widths, self.output[1])
        assert self.short_side is not None
        short, long = np.minimum(heights, widths), np.maximum(heights, widths)
        other = 2 * ((long * self.short_side + short) // (2 * short))
        tall = heights > widths
        # A square video has two short sides, whatever the rounding.
        other[heights == widths] = self.short_side
        return np.where(tall, other, self.short_side), np.where(tall, self.short_side, other)


@dataclass(frozen=True)
class Native(_Whole):
    """The whole video at its own size, with sides that are multiples of a number, such as a model's patch.

    With sides h and w (the even part of the video), m = `multiple`, and round() to the nearest integer, half to even:

    1. H = max(m, round(h/m) * m), and W likewise.
    2. If H * W > max_pixels: b = sqrt(h * w / max_pixels), H = max(m, floor(h/b/m) * m), and W likewise.
    3. Otherwise, if H * W < min_pixels: b = sqrt(min_pixels / (h * w)), H = ceil(h*b/m) * m, and W likewise.

    All in float64. With the default, clips have exactly the pixels of the video. A very long video can exceed
    `max_pixels`, because no side is shorter than m.

    Args:
        multiple: Divides both sides of the clip, >= 1; odd numbers are possible.
        min_pixels: Least pixels of a frame, >= 1; None for no bound.
        max_pixels: Most pixels of a frame, >= min_pixels; None for no bound.

    Raises:
        UsageError: If an argument is out of range.

    Source:
        smart_resize of Qwen2-VL's image processor (transformers), which has factor=28 for `multiple`.
    """

    multiple: int = 2
    min_pixels: int | None = None
    max_pixels: int | None = None

    def __post_init__(self) -> None:
        check_least(1, multiple=self.multiple, min_pixels=self.min_pixels, max_pixels=self.max_pixels)
        if self.min_pixels is not None and self.max_pixels is not None and self.min_pixels > self.max_pixels:
            raise UsageError(
                f"min_pixels is {self.min_pixels}, expected at most max_pixels, which is {self.max_pixels}"
            )

    def sizes(self, heights: IntArray, widths: IntArray) -> tuple[IntArray, IntArray]:
        """Return the heights and widths of the clips of videos with these sides, in pixels, both int64 [N]."""
        m = self.multiple
        h, w = (heights & ~1).astype(np.float64), (widths & ~1).astype(np.float64)
        high, wide = (np.maximum(m, np.rint(side / m) * m) for side in (h, w))
        pixels = high * wide
        if self.max_pixels is not None:
            b = np.sqrt(h * w / self.max_pixels)
            over = pixels > self.max_pixels
            high = np.where(over, np.maximum(m, np.floor(h / b / m) * m), high)
            wide = np.where(over, np.maximum(m, np.floor(w / b / m) * m), wide)
            pixels = np.where(over, np.inf, pixels)
        if self.min_pixels is not None:
            b = np.sqrt(self.min_pixels / (h * w))
            under = pixels < self.min_pixels
            high = np.where(under, np.ceil(h * b / m) * m, high)
            wide = np.where(under, np.ceil(w * b / m) * m, wide)
        return high.astype(np.int64), wide.astype(np.int64)
