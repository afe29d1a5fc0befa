"""Open video files with FFmpeg's demuxers, in all supported versions of PyAV.

Files are untrusted: call this in a process that may die (`fastvid.sharding.engines.local`).
"""

from __future__ import annotations

import contextlib
import io
from fractions import Fraction
from functools import cache
from typing import Any, cast

import av
from av.container import InputContainer
from av.sidedata.sidedata import Type
from av.video.frame import VideoFrame
from av.video.stream import VideoStream

from fastvid.errors import SourceError
from fastvid.media.reasons import Reason


def open_demuxer(file: str | bytes | memoryview | io.RawIOBase, container: str) -> InputContainer:
    """Open a file with a forced demuxer and no access to other files. Metadata that is not UTF-8 is accepted."""
    try:
        opened = av.open(
            file if isinstance(file, str | io.RawIOBase) else io.BytesIO(file),
            format=container,
            # The options also apply to nested demuxers; they allow no protocol except file.
            options={"protocol_whitelist": "file", "format_whitelist": container},
            **_any_text(),
        )
    except MemoryError as error:
        raise SourceError("opening the file exceeds the memory limit", reason=Reason.MEMORY) from error
    except (av.FFmpegError, ValueError) as error:
        raise SourceError(f"{container}: {ffmpeg_message(error)}", reason=Reason.BROKEN_CONTAINER) from error
    return cast(InputContainer, opened)


def video_stream(source: InputContainer) -> VideoStream:
    """Return the first video stream that is not a cover image (ffmpeg's specifier V), set to decode in one thread."""
    pictures = [s for s in source.streams.video if not s.disposition & av.stream.Disposition.attached_pic]
    if not pictures:
        kinds = " and ".join(sorted({s.type for s in source.streams})) or "nothing"
        raise SourceError(f"file contains {kinds}, no video", reason=Reason.NO_VIDEO_STREAM)
    # PyAV has no context for a codec that it cannot decode, although its type annotations do not allow None.
    context: Any = pictures[0].codec_context
    if context is None:
        raise SourceError("no decoder for the video stream", reason=Reason.NO_DECODER)
    if not context.is_open:
        context.thread_count = 1
    return pictures[0]


def fraction(value: Any) -> Fraction | None:
    """Convert a rate, time base or aspect ratio of PyAV; None if unset, in PyAV 19 also 0/1 and 1/0."""
    return Fraction(value.numerator, value.denominator) if value and value.denominator else None


def side_data(frame: VideoFrame, name: str) -> bytes | None:
    """Return a frame's side data of one type, such as "DISPLAYMATRIX", or None if it has none."""
    _name_every_type()
    data: Any = frame.side_data.get(name)
    return None if data is None else bytes(data)


def ffmpeg_message(error: BaseException) -> str:
    """Return FFmpeg's message, at most 200 characters, without the name of a file descriptor, which means nothing."""
    text = getattr(error, "strerror", None) or str(error)
    return str(text).split(": 'file:")[0][:200]


@cache
def _any_text() -> dict[str, Any]:
    """Return the arguments with which `av.open` accepts metadata that is not UTF-8."""
    arguments: dict[str, Any] = {"metadata_errors": "replace"}
    try:
        with contextlib.suppress(av.FFmpegError, ValueError):  # the test file is empty
            av.open(io.BytesIO(), format="mov", **arguments)
    except TypeError:  # PyAV 19 accepts any bytes and has removed the argument
        return {}
    return arguments


@cache
def _name_every_type() -> None:
    """Let PyAV before version 19 accept unknown types of side data.

    Otherwise one unknown type makes all side data of a frame unreadable. Decoders attach such types to spatial videos
    (VIEW_ID) and to JPEG with EXIF; new versions of FFmpeg add more.
    """
    types: Any = Type
    try:
        types(-1)
    except ValueError:
        # As PyAV 19 does: https://github.com/PyAV-Org/PyAV/pull/2392
        types._missing_ = classmethod(_nameless)


def _nameless(cls: Any, value: object) -> Any:
    """Create an enum member for an unknown value."""
    member = object.__new__(cls)
    member._name_, member._value_ = f"UNKNOWN_{value}", value
    return cls._value2member_map_.setdefault(value, member)
