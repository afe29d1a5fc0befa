"""Parts of a source, each of which becomes a sample: their frames, what ffmpeg decodes for them, and a check of them.

`plan_window` chooses where decoding of some frames begins: at the first packet, or at a key frame before them. The
written frames, and so the bytes, are the same either way: filters select frames by their times, never by counting from
where decoding began.

`compare_parts` compares the first and last frame of each cut part with the source's own frames, decoded without
filters. Counting frames is not enough, because a part that begins at a wrong frame can have the right number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice, pairwise
from typing import Any, Final

import av
import numpy as np
import numpy.typing as npt
from av.container import InputContainer
from av.video.frame import VideoFrame
from av.video.reformatter import ColorRange, Colorspace

from fastvid.errors import SourceError
from fastvid.media.container import open_demuxer, side_data, video_stream
from fastvid.media.probe import OpenSource, SourceInfo
from fastvid.media.reasons import Reason
from fastvid.media.timing import FrameTiming, clip_frames
from fastvid.runtime.arrays import FloatArray
from fastvid.sharding.encode.profiles import (
    DecodeWindow,
    Geometry,
    Profile,
    source_matrix,
    upright_geometry,
    written_timing,
)


def plan_parts(
    timing: FrameTiming,
    start: float | None,
    end: float | None,
    max_seconds: float,
    seconds: FloatArray | None = None,
) -> list[tuple[int, int] | None]:
    """Return the frames of each sample of a source, as half-open ranges at the written rate; None for all frames.

    A video of more than `max_seconds` is split into as few parts of equal length as possible. `seconds`: time of each
    frame, float64 [N]; by default at the written rate.
    """
    total, rate = timing.frames, timing.rate
    seconds = np.arange(total) / float(rate) if seconds is None else seconds
    first, last = clip_frames(seconds, float(1 / rate), start, end)
    most = max(1, int(Fraction(str(max_seconds)) * rate))  # str, because as a binary number 0.3 is less than 3/10
    count = -(-(last - first) // most)
    if count == 1:
        return [None] if (first, last) == (0, total) else [(first, last)]
    cuts = [first + (last - first) * number // count for number in range(count + 1)]
    return list(pairwise(cuts))


def numbered_part(info: SourceInfo, timing: FrameTiming, first: int, count: int) -> tuple[int, int] | None:
    """Return the part with `count` frames from number `first` of the source on, in the form of `plan_parts`."""
    if info.timing.input_rate is None or timing.rate != info.timing.input_rate:
        raise SourceError(
            f"frames cannot be numbered at a {info.timing.kind} rate that is written as {float(timing.rate):g} per"
            " second",
            reason=Reason.OUT_OF_RANGE,
        )
    if first + count > timing.frames:
        raise SourceError(
            f"frames {first} to {first + count} are not in a video of {timing.frames}", reason=Reason.OUT_OF_RANGE
        )
    return None if (first, count) == (0, timing.frames) else (first, first + count)


# ffmpeg seeks this many seconds earlier in formats that it seeks by decode times (ffmpeg_demux.c).
_SEEK_MARGIN_SECONDS: Final = 3 / 23
# Number of frames before and after a part that frame-rate resampling may read.
_RESAMPLED_MARGIN: Final = 2
# Number of pixels that could be decoded in the time that ffmpeg takes to start: 0.1 s, at 250 megapixels per second.
_START_PIXELS: Final = 25_000_000
# Maximum number of parts that one run of ffmpeg encodes at the same time: each encoder keeps tens of frames in memory.
_MOST_PARTS: Final = 16

Part = tuple[int, int]


def plan_window(info: SourceInfo, profile: Profile, parts: Sequence[Part | None]) -> DecodeWindow:
    """Return what ffmpeg must decode for parts of a source.

    `parts`: frames at the rate that is written, half-open; None for all.
    """
    shown = info.timing.shown
    ranges = [part for part in parts if part is not None]
    if len(ranges) < len(parts):
        return DecodeWindow(0, shown, 0, None, trims=False)
    first, last = min(first for first, _ in ranges), max(last for _, last in ranges)
    written = written_timing(info.timing, profile)
    one_to_one = written.input_rate is not None
    if written.input_rate is not None:
        step = int(written.input_rate / written.rate)
        begin, end = first * step, min(shown, (last - 1) * step + 1)
    else:
        shows = np.rint(source_seconds(info) * float(written.rate))
        begin = max(0, int(np.searchsorted(shows, first)) - _RESAMPLED_MARGIN)
        end = min(shown, int(np.searchsorted(shows, last)) + _RESAMPLED_MARGIN)
    trims = one_to_one and not info.interlaced
    # At the end of the stream, resampling uses the stream's duration, which may differ after a seek. So do not seek.
    whole_end = not one_to_one and end >= shown
    if whole_end or not len(info.keys) or not _on_grid(info):
        return DecodeWindow(begin, end, 0, None, trims)
    number = int(np.searchsorted(info.keys, info.times[begin], side="right")) - 1
    if number <= 0:
        return DecodeWindow(begin, end, 0, None, trims)
    key, tick = info.keys[number], float(info.time_base)
    seek = float(key) * tick + min(float(info.times[begin] - key) * tick, _SEEK_MARGIN_SECONDS)
    return DecodeWindow(begin, end, int(np.searchsorted(info.times, key)), seek, trims)


def plan_runs(info: SourceInfo, profile: Profile, clips: Sequence[Sequence[Part | None]]) -> list[range]:
    """Divide the clips of a source into runs of ffmpeg; return the range of consecutive clips of each run.

    A clip joins the run before it if decoding the frames between them costs less than starting another run.
    """
    start = _START_PIXELS / max(1, info.width * info.height)
    runs: list[range] = []
    parts, end = 0, 0
    for number, clip in enumerate(clips):
        window = plan_window(info, profile, clip)
        onward = max(0, window.first - end)
        # Frames to decode for a new run: those that its start costs, and those from the key frame to the clip. To join
        # the run, only the frames between the run's end and the clip (`onward`) are decoded in addition.
        afresh = start + window.first - window.key
        fits = bool(runs) and None not in (*clip, *clips[runs[-1].start]) and parts + len(clip) <= _MOST_PARTS
        if fits and onward <= afresh:
            runs[-1] = range(runs[-1].start, number + 1)
            parts, end = parts + len(clip), max(end, window.last)
        else:
            runs.append(range(number, number + 1))
            parts, end = len(clip), window.last
    return runs


def source_seconds(info: SourceInfo) -> FloatArray:
    """Return the time of each source frame for ffmpeg's filters, in seconds after the first frame, float64 [N]."""
    if info.timing.input_rate is not None:
        return np.arange(info.timing.shown) / float(info.timing.input_rate)
    return np.asarray((info.times - info.times[0]) * float(info.time_base))


def _on_grid(info: SourceInfo) -> bool:
    """Return whether the times of the frames, rounded to the forced rate, give the frame numbers 0, 1, 2, ...

    Only then do filters find the right frames after a seek. True if no rate is forced.
    """
    rate = info.timing.input_rate
    if rate is None:
        return True
    per_tick = info.time_base * rate
    # av_rescale_q: to the nearest integer, halves away from zero.
    ticks = info.times - info.times[0]
    counted = (2 * ticks * per_tick.numerator + per_tick.denominator) // (2 * per_tick.denominator)
    return bool((counted == np.arange(len(ticks))).all())


Thumbnail = npt.NDArray[np.float64]

# Rows and columns of a thumbnail. Each cell is a mean of so many pixels that encoding hardly changes it.
_GRID: Final = 24
# Limit of the root mean square difference between two thumbnails of the same frame: `_LEVELS` levels of luma, plus
# `_CONTRAST` times the standard deviation of the thumbnail; with tone mapping, `_TONE_MAPPED` times as much. Gain and
# offset are fitted before, because the ranges may differ. The largest difference of the real videos in the tests is
# three quarters of the limit, with tone mapping half of it.
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
    frames: range  # numbers of source frames: the picture must show one of them
    picture: VideoFrame


def part_ends(
    info: SourceInfo, written: SourceInfo, part: tuple[int, int], pictures: tuple[VideoFrame, VideoFrame]
) -> Iterator[PartEnd]:
    """Yield the first and last frame of an encoded part, with the source frames that they may show.

    `info`: the source. `written`: the same with the rate that is written. `part`: the part's frames at that rate,
    half-open. `pictures`: its first and last frame, decoded.
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
    """Compare the first and last frames of parts with the source; raise SourceError if one shows another picture."""
    info = frames.info
    size = upright_geometry(info, profile)
    wrong = [end for end in ends if not any(_alike(end, frame, info, size) for frame in frames.of(end.frames))]
    if wrong:
        # In some files, seeking by times and key frames finds wrong frames. So count all frames from the first one.
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
    """The frames of a source, decoded without filters by libavcodec in this process, not by the encoding ffmpeg."""

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
        """Yield source frames, found by their times; decode from a key frame before, or continue the last call."""
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
        with open_demuxer(self.source.url, self.source.container) as container, suppress(av.FFmpegError):
            yield from islice(container.decode(video_stream(container)), count)

    def _approach(self, time: int) -> None:
        """Seek to the key frame before a time, unless decoding can continue to it without skipping a key frame."""
        keys = self.info.keys
        if self._container is not None and self._at is not None and len(keys) and self._at < time:
            key = keys[max(0, int(np.searchsorted(keys, time, side="right")) - 1)]
            if key <= self._at:
                return
        if self._container is None:
            self._container = open_demuxer(self.source.url, self.source.container)
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
        # ffmpeg's filter crops at even places, those of whole chroma samples.
        top, left = (view.shape[0] - height) // 4 * 2, (view.shape[1] - width) // 4 * 2
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
    """Return the difference of two thumbnails after fitting brightness and contrast, divided by the accepted limit."""
    made, source = made - made.mean(), source - source.mean()
    gain = (made * source).sum() / max(float((source * source).sum()), 1e-9)
    residue = float(np.sqrt(((made - gain * source) ** 2).mean()))
    return residue / (_LEVELS + _CONTRAST * float(made.std()))
