"""Spatial transforms: one crop, one output size and one flip for all frames of a clip.

They are drawn before decoding, from the video's size and the clip's random numbers. Crops are frozen dataclasses; their
repr is part of a loader's fingerprint.

Rules for every crop:
- Its sides and corners are even, because 4:2:0 frames are cropped at even pixels; sizes are rounded down to even unless
  stated otherwise. The last row or column of a video with an odd side is never shown.
- The output always has the requested size; a crop of another size is resized to it. If a video is smaller than the
  crop, its largest region with the crop's aspect ratio is enlarged.
- With size None, the size comes from the clip's bucket, see `fastvid.Buckets`. Sizes are then relative to the video's
  largest region with the bucket's aspect ratio, which is shrunk or enlarged to the bucket's size.
- `Resize` and `Native` show the whole video, whose aspect ratio decides the size of the clip.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, field, replace
from functools import lru_cache
from typing import Any, ClassVar, Final, Protocol, Self, cast

import numpy as np

from fastvid.decode.request import Box
from fastvid.errors import UsageError
from fastvid.load.clips.sampling import check_counts
from fastvid.load.order.draws import BatchDraws, Draws, Purpose
from fastvid.runtime.arrays import IntArray
from fastvid.runtime.values import check_bounds, check_integer, check_numbers, check_share, check_switches, is_number

Size = tuple[int, int]
"""Height and width in pixels."""

Rectangle = tuple[int, int, int, int]
"""y, x, height and width in pixels, all even."""


class BatchCrop(ABC):
    """Base of fastvid's crops: computes a crop from random numbers that are drawn for all clips of a batch at once."""

    numbers: ClassVar[int] = 0  # how many random numbers a clip takes

    def draw(self, height: int, width: int, draws: Draws, /) -> Box:
        """Return a crop of at least 2x2 pixels inside a video of this size."""
        return Box(*self.box(height, width, draws.uniform(Purpose.CROP, self.numbers) if self.numbers else ()))

    @abstractmethod
    def box(self, height: int, width: int, numbers: Sequence[float], /) -> Rectangle:
        """Return y, x, height and width of a crop, in pixels; `numbers` are uniform in [0, 1)."""


@dataclass(frozen=True)
class Sized(BatchCrop):
    """Base of the crops that have an output size, which may be None until a bucket gives it.

    Attributes:
        size: (height, width) in pixels; None if it comes from a bucket.
        from_bucket: Whether the size came from a bucket, so that regions are relative to `largest`.
    """

    size: int | Size | None = None
    from_bucket: bool = field(default=False, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.size is None:
            return
        # Normalise, so that 224 and (224, 224) have the same fingerprint.
        object.__setattr__(self, "size", check_size(self.size))

    @property
    def output(self) -> Size | None:
        """Height and width of every clip in pixels; None if they come from a bucket."""
        assert not isinstance(self.size, int)
        return self.size

    def output_of(self, _height: int, _width: int, /) -> Size:
        """Return the height and width of a clip in pixels."""
        if self.output is None:
            hint = "set size=, or use batches=Buckets(...)"
            raise UsageError(f"{self!r} has no size, which only a bucket can give it", hint=hint)
        return self.output

    def sizes(self, heights: IntArray, widths: IntArray) -> tuple[IntArray, IntArray]:
        """Return the heights and widths of the clips of videos with these sides, both int64 [N]. With size None, the
        even part of the video, out of which a bucket takes its region."""
        if self.output is None:
            return heights & ~1, widths & ~1
        return np.full_like(heights, self.output[0]), np.full_like(widths, self.output[1])

    def of_size(self, size: Size) -> Self:
        """Return this crop with the size of a bucket."""
        if self.output == tuple(size):
            return self
        if self.output is not None:
            hint = "set size=None: the size then comes from the bucket"
            raise UsageError(f"{self!r} cannot make clips of {size[0]}x{size[1]} pixels for a bucket", hint=hint)
        made = replace(self, size=size)
        object.__setattr__(made, "from_bucket", True)
        return made

    def largest(self, height: int, width: int) -> tuple[float, float]:
        """Return the sides of the largest region of a video with the output's aspect ratio, in pixels."""
        out = self.output_of(height, width)
        scale = min(height / out[0], width / out[1])
        return out[0] * scale, out[1] * scale


def check_size(size: int | Size) -> Size:
    """Return a size as (height, width)."""
    pair = tuple(size) if isinstance(size, Sequence | np.ndarray) else (size, size)
    if len(pair) != 2 or not all(is_number(side) and hasattr(side, "__index__") and side >= 1 for side in pair):
        raise UsageError(f"size is {size!r}, expected one positive number of pixels or (height, width)")
    return int(pair[0]), int(pair[1])


# Attempts before RandomResizedCrop uses the central region, as in torchvision.
_TRIES: Final = 10
# MultiScaleCrop uses the output size itself if a side is within this many pixels of it, as in the TSN code.
_SNAP: Final = 3


class Crop(Protocol):
    """Protocol of a crop.

    A crop whose `output` is None also has ``output_of(height, width)``, ``sizes(heights, widths)`` and
    ``of_size((H, W))``; see `Spatial`, which has the same methods for all crops.
    """

    @property
    def output(self) -> Size | None:
        """Height and width of every clip in pixels; None if they depend on the video."""
        ...

    def draw(self, height: int, width: int, draws: Draws, /) -> Box:
        """Return a crop of at least 2x2 pixels inside a video of this size."""
        ...


@dataclass(frozen=True)
class _Region(Sized):
    short_side: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(self, "short_side")
        if self.short_side is not None and self.size is None:
            raise UsageError(f"short_side is {self.short_side}, but size is None", hint="give a size, or no short_side")

    def _region(self, height: int, width: int) -> Size:
        """Return the even height and width of the crop: the output's aspect ratio, no larger than the video."""
        out = self.output_of(height, width)
        scale = min(height, width) / self.short_side if self.short_side else math.inf if self.from_bucket else 1.0
        scale = min(scale, height / out[0], width / out[1])
        # A scale of exactly one must return exactly the output size, despite rounding in the divisions.
        return max(2, _even(out[0] * scale + 1e-6)), max(2, _even(out[1] * scale + 1e-6))


@dataclass(frozen=True)
class CenterCrop(_Region):
    """The central region of the video.

    Args:
        size: Output side, or (height, width), in pixels; None for the size of the clip's bucket.
        short_side: Crop as if the video were first resized to this short side; None crops the stored video.

    Raises:
        UsageError: If an argument is not positive.
    """

    def box(self, height: int, width: int, _numbers: Sequence[float], /) -> Rectangle:
        """Return the central crop."""
        h, w = self._region(height, width)
        return _even((height - h) / 2), _even((width - w) / 2), h, w


@dataclass(frozen=True)
class RandomCrop(_Region):
    """A uniformly placed region, resized only if the video is too small for it.

    Args:
        size: Output side, or (height, width), in pixels; None for the size of the clip's bucket.
        short_side: Crop as if the video were first resized to this short side; None crops the stored video.

    Raises:
        UsageError: If an argument is not positive.
    """

    numbers: ClassVar[int] = 2

    def box(self, height: int, width: int, numbers: Sequence[float], /) -> Rectangle:
        """Return a crop whose corner is uniform over the even pixels where it fits."""
        h, w = self._region(height, width)
        return _place(numbers[0], height, h), _place(numbers[1], width, w), h, w


@dataclass(frozen=True)
class RandomResizedCrop(Sized):
    """A region of random area and aspect ratio, resized: torchvision's definition of the Inception crop.

    Up to ten attempts draw an area (uniform) and an aspect ratio (log-uniform) until the region fits. If none fits, the
    largest central region with an allowed ratio is used. Sides are rounded to the nearest even number.

    Args:
        size: Output side, or (height, width), in pixels; None for the size of the clip's bucket.
        scale: Bounds of the region's fraction of the video's area, 0 < low <= high <= 1; with size None, of the area of
            the largest region with the bucket's aspect ratio.
        ratio: Bounds of the region's width / height, 0 < low <= high; with size None, relative to the bucket's.

    Raises:
        UsageError: If an argument is out of range.

    Source:
        torchvision.transforms.RandomResizedCrop.get_params; Szegedy et al., CVPR 2015, section 6.
    """

    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, most in (("scale", 1), ("ratio", math.inf)):
            check_bounds(name, getattr(self, name), most)
            object.__setattr__(self, name, tuple(getattr(self, name)))  # equal arguments have the same fingerprint

    numbers: ClassVar[int] = 4 * _TRIES

    def box(self, height: int, width: int, numbers: Sequence[float], /) -> Rectangle:
        """Return a crop of random area, aspect ratio and place."""
        height, width = height & ~1, width & ~1
        least, most = self.ratio
        whole: float = height * width
        if self.from_bucket:
            h, w = self.largest(height, width)
            least, most, whole = least * w / h, most * w / h, h * w
        low, high = math.log(least), math.log(most)
        for first in range(0, len(numbers), 4):
            size, shape, v, u = numbers[first : first + 4]
            area = whole * (self.scale[0] + size * (self.scale[1] - self.scale[0]))
            aspect = math.exp(low + shape * (high - low))
            rows, columns = _nearest_even(math.sqrt(area / aspect)), _nearest_even(math.sqrt(area * aspect))
            if rows <= height and columns <= width:
                return _place(v, height, rows), _place(u, width, columns), rows, columns
        rows = min(height, _nearest_even(width / least))
        columns = min(width, _nearest_even(height * most))
        return _even((height - rows) / 2), _even((width - columns) / 2), rows, columns


@dataclass(frozen=True)
class MultiScaleCrop(Sized):
    """TSN's crop: sides are scales of the short side, corners are at fixed places; then resized.

    Height and width each use one of the scales, at most `max_distort` steps apart in the list; each pair is equally
    likely. The region is at one of the corners or the centre; `more_fix_crop` adds the middles of the sides and the
    quarters (13 places in total). Each place is equally likely.

    Args:
        size: Output side, or (height, width), in pixels; None for the size of the clip's bucket.
        scales: Fractions of the short side, each 0 < s <= 1; with size None, of each side of the largest region with
            the bucket's aspect ratio.
        max_distort: Maximum steps between the scales of height and width, >= 0.
        more_fix_crop: Use 13 places instead of 5.

    Raises:
        UsageError: If an argument is out of range.

    Source:
        Wang et al., Temporal Segment Networks, ECCV 2016; mit-han-lab/temporal-shift-module ops/transforms.py
        (GroupMultiScaleCrop).
    """

    scales: tuple[float, ...] = (1.0, 0.875, 0.75, 0.66)
    max_distort: int = 1
    more_fix_crop: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "scales", check_numbers("scales", self.scales))
        if not self.scales or not all(0 < scale <= 1 for scale in self.scales):
            raise UsageError(f"scales are {self.scales}, expected at least one, each 0 < scale <= 1")
        check_integer("max_distort", self.max_distort, 0)
        check_switches(more_fix_crop=self.more_fix_crop)

    numbers: ClassVar[int] = 2

    def box(self, height: int, width: int, numbers: Sequence[float], /) -> Rectangle:
        """Return a crop of random scales and place."""
        short = min(height, width)
        bases = self.largest(height, width) if self.from_bucket else (short, short)
        heights, widths = (
            [out if abs(side - out) < _SNAP else side for side in [int(base * scale) for scale in self.scales]]
            for base, out in zip(bases, self.output_of(height, width), strict=True)
        )
        pairs = [
            (min(max(2, h), height), min(max(2, w), width))
            for i, h in enumerate(heights)
            for j, w in enumerate(widths)
            if abs(i - j) <= self.max_distort
        ]
        which, where = numbers
        h, w = pairs[int(which * len(pairs))]
        places = _PLACES if self.more_fix_crop else _PLACES[:5]
        down, right = places[int(where * len(places))]
        return _even(down * ((height - h) // 4)), _even(right * ((width - w) // 4)), _even(h), _even(w)


# Row and column offsets in quarters of the free height and width: corners, centre; middles of the sides, quarters.
_PLACES: Final = (
    *((0, 0), (0, 4), (4, 0), (4, 4), (2, 2)),
    *((2, 0), (2, 4), (4, 2), (0, 2), (1, 1), (1, 3), (3, 1), (3, 3)),
)


@dataclass(frozen=True)
class HorizontalFlip:
    """Mirrors left and right with probability p.

    Args:
        p: Probability, 0 <= p <= 1.

    Raises:
        UsageError: If the probability is out of range.
    """

    p: float = 0.5

    def __post_init__(self) -> None:
        check_share("p", self.p)

    def draw(self, draws: Draws) -> bool:
        """Return whether this clip is mirrored."""
        return bool(draws.uniform(Purpose.FLIP, 1)[0] < self.p)


Transform = Crop | HorizontalFlip


@dataclass(frozen=True)
class Spatial:
    """One crop and at most one flip."""

    crop: Crop
    flip: HorizontalFlip | None = None

    @classmethod
    def of(cls, transforms: Sequence[Transform] | Transform) -> Spatial:
        """Build from a user's list of transforms."""
        listed = list(transforms) if isinstance(transforms, Sequence) else [transforms]
        flips = [transform for transform in listed if isinstance(transform, HorizontalFlip)]
        crops = [transform for transform in listed if not isinstance(transform, HorizontalFlip)]
        if any(isinstance(crop, type) or not hasattr(crop, "draw") or not hasattr(crop, "output") for crop in crops):
            size = listed[0] if isinstance(listed[0], int) else 224
            hint = f"use CenterCrop({size}), RandomResizedCrop({size}) or another crop of fastvid; others go to after="
            raise UsageError(f"spatial contains something that is neither a crop nor a flip: {listed}", hint=hint)
        if len(crops) != 1 or len(flips) > 1:
            hint = "add CenterCrop(224), RandomCrop(224), Resize(short_side=256) or another crop"
            raise UsageError(f"spatial must contain one crop and at most one HorizontalFlip, got {listed}", hint=hint)
        return cls(crops[0], flips[0] if flips else None)

    def cuts(self, heights: Sequence[int], widths: Sequence[int], draws: BatchDraws) -> IntArray:
        """Return what clips of videos with these sizes show, int64 [N, 7]: y, x, height and width of the box, height
        and width of the clip, and 1 if it is flipped."""
        crop, flip = self.crop, self.flip
        own = cast(BatchCrop, crop) if getattr(type(crop), "draw", None) is BatchCrop.draw else None
        numbers = draws.uniform(Purpose.CROP, own.numbers).tolist() if own else []
        flips = [False] * len(heights) if flip is None else (draws.uniform(Purpose.FLIP, 1)[:, 0] < flip.p).tolist()
        found, output = np.empty((len(heights), 7), dtype=np.int64), crop.output
        for row, (height, width) in enumerate(zip(heights, widths, strict=True)):
            if min(height, width) < 2:
                told = f"a video of {width}x{height} pixels is too small"
                raise UsageError(f"{told}: crops have even sides of at least 2 pixels")
            box = own.box(height, width, numbers[row]) if own else astuple(crop.draw(height, width, draws[row]))
            found[row] = (*box, *(output or self.output_of(height, width)), flips[row])
        return found

    def output_of(self, height: int, width: int) -> Size:
        """Return the height and width of a clip of a video with these sides, in pixels."""
        size: Size = self.crop.output or self._sizing("output_of")(height, width)
        return size

    def sizes(self, heights: IntArray, widths: IntArray) -> tuple[IntArray, IntArray]:
        """Return the heights and widths of the clips of videos with these sides, in pixels.

        `heights`: of the videos, int64 [N]. `widths`: of the videos, int64 [N]. Returns two arrays, int64 [N]:
        `output_of` of each video, or, if the size comes from a bucket, the video's size.
        """
        if self.crop.output is not None:
            return np.full_like(heights, self.crop.output[0]), np.full_like(widths, self.crop.output[1])
        high, wide = self._sizing("sizes")(heights, widths)
        return high, wide

    def of_size(self, size: Size) -> Spatial:
        """Return these transforms with the size of a bucket, (height, width) in pixels."""
        return self if self.crop.output == tuple(size) else replace(self, crop=self._sizing("of_size")(size))

    def _sizing(self, name: str) -> Callable[..., Any]:
        method: Callable[..., Any] | None = getattr(self.crop, name, None)
        if method is None:
            raise UsageError(f"crop {self.crop!r} has no fixed size and no {name}()", hint=f"add {name}() to it")
        return method


def _even(pixels: float) -> int:
    return int(pixels) & ~1


def _nearest_even(pixels: float) -> int:
    return max(2, 2 * int(pixels / 2 + 0.5))


def _place(number: float, whole: int, part: int) -> int:
    """Return a random even coordinate, uniform over those where `part` fits into `whole`; 0 <= number < 1."""
    return 2 * int(number * ((whole - part) // 2 + 1))


class _Whole(BatchCrop):
    """Base of the crops that show the whole video, resized to a size that is computed from the video's size."""

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
        """Return the crop for a bucket of this size: the largest central region with the bucket's aspect ratio."""
        return CenterCrop(None).of_size(size)

    def box(self, height: int, width: int, _numbers: Sequence[float], /) -> Rectangle:
        """Return the even part of the video."""
        return 0, 0, height & ~1, width & ~1


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
            told = f"short_side is {self.short_side} and size is {self.size}, expected exactly one of them"
            raise UsageError(told, hint="use Resize(short_side=256), or Resize(size=(256, 340))")
        check_counts(self, "short_side")
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
        multiple: Number of which both sides of the clip are multiples, >= 1; odd numbers are possible.
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
        check_counts(self, "multiple", "min_pixels", "max_pixels")
        if self.min_pixels is not None and self.max_pixels is not None and self.min_pixels > self.max_pixels:
            raise UsageError(f"min_pixels is {self.min_pixels}, expected at most max_pixels = {self.max_pixels}")

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
