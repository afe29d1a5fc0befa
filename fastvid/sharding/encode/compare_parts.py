"""Compare the first and last frame of each cut part with the source's own frames, decoded without filters.

A part that begins at the wrong frame has the right number of frames, so counting does not notice it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice
from typing import Any, Final

import av
import numpy as np
import numpy.typing as npt
from av.container import InputContainer
from av.video.frame import VideoFrame
from av.video.reformatter import ColorRange, Colorspace

from fastvid.errors import SourceError
from fastvid.media.demuxer import open_demuxer, side_data, video_stream
from fastvid.media.probe import OpenSource, SourceInfo
from fastvid.media.reasons import Reason
from fastvid.sharding.encode.profile import Profile, source_seconds
from fastvid.sharding.encode.profiles import Geometry, source_matrix, upright_geometry

Thumbnail = npt.NDArray[np.float64]

# Rows and columns of a thumbnail. The mean of so many pixels hardly changes when a frame is encoded.
_GRID: Final = 24
# Largest root mean square difference between thumbnails of the same frame, in levels of luma, and the part of the
# contrast that is added to it. A linear map between them is allowed, for full range. Over all real videos of the tests
# the most is three quarters of this, with tone mapping half of `_TONE_MAPPED` times as much.
_LEVELS, _CONTRAST, _TONE_MAPPED = 6.0, 0.12, 4.0
_SPACES: Final = {
    "bt601": Colorspace.ITU601,
    "bt709": Colorspace.ITU709,
    "fcc": Colorspace.FCC,
    "smpte240m": Colorspace.SMPTE240M,
}


@dataclass(frozen=True, slots=True)
class PartEnd:
    """The first or last frame of a part."""

    number: int
    frames: range  # numbers of the source frames, one of which it must show
    picture: VideoFrame


def part_ends(
    info: SourceInfo, written: SourceInfo, part: tuple[int, int], pictures: tuple[VideoFrame, VideoFrame]
) -> Iterator[PartEnd]:
    """Yield the first and last frame of an encoded part.

    `part`: the part's frames at that rate, half-open.
    """
    rate = written.timing.rate
    for number, picture in zip((part[0], part[1] - 1), pictures, strict=True):
        if written.timing.input_rate is not None:
            source = number * int(written.timing.input_rate / rate)
            yield PartEnd(number, range(source, source + 1), picture)
            continue
        source = int(np.searchsorted(np.rint(source_seconds(info) * float(rate)), number, side="right")) - 1
        yield PartEnd(number, range(max(0, source - 1), source + 2), picture)


def compare_parts(frames: SourceFrames, profile: Profile, ends: Sequence[PartEnd]) -> None:
    """Compare the ends of parts with the source."""
    info = frames.info
    size = upright_geometry(info, profile)
    wrong = [end for end in ends if not any(_alike(end, frame, info, size) for frame in frames.of(end.frames))]
    if wrong:
        # Times and key frames of some files mislead. Counting all frames from the first one does not.
        right = set()
        for number, frame in enumerate(frames.decoded(max(end.frames[-1] for end in wrong) + 1)):
            right |= {end.number for end in wrong if number in end.frames and _alike(end, frame, info, size)}
        wrong = [end for end in wrong if end.number not in right]
    if wrong:
        raise SourceError(
            f"the encoded sample is wrong: frame {wrong[0].number} shows another picture than the source",
            reason=Reason.VERIFY_FAILED,
        )


class SourceFrames:
    """The frames of a source, decoded without filters and apart from the program that encodes."""

    def __init__(self, source: OpenSource, info: SourceInfo) -> None:
        self.source, self.info = source, info
        self._container: InputContainer | None = None
        self._frames: Iterator[VideoFrame] = iter(())
        self._at: int | None = None

    def close(self) -> None:
        """Close the source's container."""
        if self._container is not None:
            self._container.close()
            self._container = None

    def of(self, numbers: range) -> Iterator[VideoFrame]:
        """Yield source frames, found by their times; decode from the nearest key frame, or go on from the last call."""
        times = self.info.times
        if self.info.timing.kind == "counted" or numbers.start >= len(times):
            return
        wanted = set(times[numbers.start : numbers.stop].tolist())
        try:
            self._approach(min(wanted))
            for frame in self._frames:
                self._at = frame.pts
                if frame.pts in wanted:
                    yield frame
                if frame.pts is None or frame.pts >= max(wanted):
                    return
            self._at = None
        except av.FFmpegError:
            self._at = None

    def decoded(self, count: int) -> Iterator[VideoFrame]:
        """Yield the first `count` frames."""
        with open_demuxer(self.source.url, self.source.container) as container:
            stream = video_stream(container)
            stream.codec_context.thread_count = 1
            try:
                yield from islice(container.decode(stream), count)
            except av.FFmpegError:
                return

    def _approach(self, time: int) -> None:
        """Continue after the last frame, unless that is later or a key frame lies between."""
        keys = self.info.keys
        if self._container is not None and self._at is not None and len(keys) and self._at < time:
            key = keys[max(0, int(np.searchsorted(keys, time, side="right")) - 1)]
            if key <= self._at:
                return
        if self._container is None:
            self._container = open_demuxer(self.source.url, self.source.container)
            video_stream(self._container).codec_context.thread_count = 1
        stream = video_stream(self._container)
        self._container.seek(time, stream=stream)
        self._frames, self._at = iter(self._container.decode(stream)), None


def _alike(end: PartEnd, frame: VideoFrame, info: SourceInfo, size: Geometry) -> bool:
    """Return whether a part's frame shows a source's frame."""
    height, width = size.cropped[::-1]
    allowed = _TONE_MAPPED if info.hdr else 1.0
    made = _thumbnail(end.picture.to_ndarray()[: end.picture.height])
    tilted = side_data(frame, "DISPLAYMATRIX") is not None
    scaled = size.scaled[::-1] if tilted and info.turned else size.scaled
    y, x, rows, columns = info.crop
    down, along = Fraction(scaled[1], rows), Fraction(scaled[0], columns)
    whole = 2 * round(info.width * along / 2), 2 * round(info.height * down / 2)
    y, x = min(round(y * down), whole[1] - scaled[1]), min(round(x * along), whole[0] - scaled[0])
    luma = frame.reformat(
        *whole,
        format="yuv420p",
        src_colorspace=_SPACES.get(source_matrix(info), Colorspace.ITU709),
        dst_colorspace=Colorspace.ITU601,
        src_color_range=ColorRange.JPEG if info.full_range else ColorRange.MPEG,
        dst_color_range=ColorRange.MPEG,
    ).to_ndarray()[y : y + scaled[1], x : x + scaled[0]]
    views = [luma]
    if tilted:
        # A display matrix may mirror the picture, too.
        views = [view for turn in range(4) for view in (np.rot90(luma, turn), np.rot90(luma, turn).T)]
    for view in views:
        top, left = (view.shape[0] - height) // 2, (view.shape[1] - width) // 2
        if (
            top >= 0
            and left >= 0
            and _distance(made, _thumbnail(view[top : top + height, left : left + width])) <= allowed
        ):
            return True
    return False


def _thumbnail(luma: npt.NDArray[Any]) -> Thumbnail:
    """Return the mean of each cell of a grid, float64 [R, C]."""
    means = luma.astype(np.float64)
    for axis in (0, 1):
        cuts = np.linspace(0, luma.shape[axis], min(_GRID, luma.shape[axis]) + 1).astype(np.int64)
        shape = [-1 if one == axis else 1 for one in (0, 1)]
        means = np.add.reduceat(means, cuts[:-1], axis) / np.diff(cuts).reshape(shape)
    return means


def _distance(made: Thumbnail, source: Thumbnail) -> float:
    """Return how much a part's thumbnail differs from a linear function of the source's; 1 is the most allowed."""
    made, source = made - made.mean(), source - source.mean()
    gain = (made * source).sum() / max(float((source * source).sum()), 1e-9)
    residue = float(np.sqrt(((made - gain * source) ** 2).mean()))
    return residue / (_LEVELS + _CONTRAST * float(made.std()))
