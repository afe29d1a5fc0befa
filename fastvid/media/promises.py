"""The promises that streams of a profile keep, and their checks.

A stream is checked when it is written (`fastvid.sharding.encode.check_encoded`) and when its dataset is verified
(`fastvid.media.check_sample`). A copied stream conforms if its tables keep the promises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import av
import numpy as np

from fastvid.errors import FastvidError
from fastvid.format.mp4.demux import Track
from fastvid.format.packets import StreamInfo
from fastvid.format.schema import Codec, Matrix, Range, StreamFlag
from fastvid.media.demuxer import fraction, open_demuxer

Finding = tuple[str, str]
"""The name of a promise or check, and how it is broken."""

FORMATS_420: Final = ("yuv420p", "yuvj420p")
MULTIPLE: Final = 16
"""Both sides of streams of built-in profiles are multiples of this, in pixels."""

# Both values mean BT.601 luma; VP9 has one code for the two.
_BT601: Final = (Matrix.BT470BG, Matrix.SMPTE170M)
_AV_RANGE: Final = {0: Range.UNKNOWN, 1: Range.LIMITED, 2: Range.FULL}  # AVColorRange


@dataclass(frozen=True, slots=True)
class Promised:
    """A stream and its promises."""

    track: Track
    # the promised size, rate and number of frames; with StreamFlag.CONFORMS it promises everything in this file.
    info: StreamInfo
    full_range: bool  # whether its samples must range from 0 to 255
    multiple: int = MULTIPLE  # both sides must be multiples of this, in pixels

    @classmethod
    def of(cls, track: Track, info: StreamInfo, name: str = "rgb") -> Promised:
        """Return a dataset's stream by name: JPEG is full range by definition (JFIF 1.02), flow by ours."""
        return cls(track, info, full_range=name == "flow" or info.codec is Codec.MJPEG)

    @property
    def conforms(self) -> bool:
        """Whether it promises everything in this file."""
        return bool(self.info.flags & StreamFlag.CONFORMS)


def broken_tables(stream: Promised) -> Iterator[Finding]:
    """Yield the broken promises that an MP4's tables show, for a stream that conforms."""
    track, info = stream.track, stream.info
    pts = np.sort(track.pts[track.shown])
    if len(pts) and pts[0]:
        yield "timing", f"the first frame is shown {int(pts[0])} ticks after the start"
    steps = np.diff(pts)
    if len(steps) and (steps != steps[0]).any():
        frame = int(np.argmax(steps != steps[0])) + 1
        yield "timing", f"the frame rate is not constant: frame {frame} lasts {steps[frame - 1]} ticks"
    elif len(steps) and int(steps[0]) * info.fps != track.timescale:
        yield "timing", f"{track.timescale}/{int(steps[0])} frames a second, but {info.fps} are promised"
    if info.width % stream.multiple or info.height % stream.multiple:
        yield "shape", f"{info.width}x{info.height} pixels are not multiples of {stream.multiple}"
    if wrong := _wrong_tags(stream, track.range, track.matrix):
        yield "colour", f"the container {wrong}"


def play_stream(
    data: bytes | memoryview, stream: Promised | None = None, look: Callable[[int, Any], None] | None = None
) -> Iterator[Finding]:
    """Decode a stream as a player does, and yield its broken promises, each with the first frame that breaks it."""
    found: dict[str, str] = {}
    count = 0
    try:
        with open_demuxer(data, "mov") as container:
            video = container.streams.video[0]
            video.codec_context.thread_count = 1
            aspect = fraction(video.sample_aspect_ratio)
            if stream is not None and stream.conforms and aspect not in (None, 1):
                found["shape"] = f"pixels are {aspect} times as wide as high"
            for frame in container.decode(video):
                if frame.is_corrupt:
                    yield "decode", f"frame {count} decodes with errors"
                    return
                for name, message in _broken_frame(stream, frame) if stream is not None else ():
                    found.setdefault(name, f"frame {count} {message}")
                if look is not None:
                    look(count, frame)
                count += 1
    except (av.FFmpegError, FastvidError) as error:
        yield "decode", f"decoding failed after {count} frames: {error}"
        return
    if stream is not None and count != stream.info.num_frames:
        yield "decode", f"{count} frames decode, but {stream.info.num_frames} are promised"
    yield from found.items()


def _broken_frame(stream: Promised, frame: Any) -> Iterator[Finding]:
    """Yield the promises that a decoded frame breaks; a stream that does not conform promises only its size."""
    info = stream.info
    if (frame.width, frame.height) != (info.width, info.height):
        yield "shape", f"has {frame.width}x{frame.height} pixels, but {info.width}x{info.height} in the index"
    if not stream.conforms:
        return
    if frame.rotation:
        yield "shape", f"has a display rotation of {frame.rotation} degrees"
    number = int(frame.colorspace)
    matrix = Matrix(number) if number in Matrix.__members__.values() else Matrix.UNKNOWN
    if wrong := _wrong_tags(stream, _AV_RANGE.get(int(frame.color_range), Range.UNKNOWN), matrix):
        yield "colour", wrong
    elif frame.format.name not in FORMATS_420:
        yield "colour", f"is {frame.format.name}"


def _wrong_tags(stream: Promised, sample_range: Range, matrix: Matrix) -> str:
    wanted = Range.FULL if stream.full_range else Range.LIMITED
    # JPEG is BT.601 by definition (JFIF 1.02) and has no field for it.
    matrices = (*_BT601, Matrix.UNKNOWN) if stream.info.codec is Codec.MJPEG else _BT601
    if sample_range is wanted and matrix in matrices:
        return ""
    return f"is tagged {sample_range.name.lower()} range, {matrix.name.lower()} matrix"
