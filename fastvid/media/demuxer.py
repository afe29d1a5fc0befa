"""Opens video files with FFmpeg's demuxers, through whichever PyAV is installed: it is asked what it can do.

The file is hostile: call this in a process that may die (`fastvid.sharding.engines.local_engine`).
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


def open_demuxer(file: str | bytes | memoryview, container: str) -> InputContainer:
    """Opens a file as the format that it is, and reaches nothing else. Its titles and tags may hold any bytes.

    Args:
        file: The whole file, or its URL such as `fastvid.media.probe.OpenSource.url`.
        container: FFmpeg's demuxer, from `fastvid.media.containers.sniff`.

    Raises:
        SourceError: Its header cannot be read.
    """
    try:
        opened = av.open(
            file if isinstance(file, str) else io.BytesIO(file),
            format=container,
            # Options reach every nested demuxer; no protocol but the file itself is allowed.
            options={"protocol_whitelist": "file", "format_whitelist": container},
            **_any_text(),
        )
    except MemoryError as error:
        raise SourceError("opening the file needs too much memory", reason=Reason.MEMORY) from error
    except (av.FFmpegError, ValueError) as error:
        raise SourceError(f"{container}: {said(error)}", reason=Reason.BROKEN_CONTAINER) from error
    return cast(InputContainer, opened)


def video_stream(source: InputContainer) -> VideoStream:
    """The first video stream, as ffmpeg's specifier V: cover images are no video.

    Raises:
        SourceError: There is none, or no decoder for it.
    """
    pictures = [s for s in source.streams.video if not s.disposition & av.stream.Disposition.attached_pic]
    if not pictures:
        kinds = " and ".join(sorted({s.type for s in source.streams})) or "nothing"
        raise SourceError(f"the file holds {kinds}, no video", reason=Reason.NO_VIDEO_STREAM)
    # The binding has no context for a codec that it cannot decode; its types do not say so.
    context: Any = pictures[0].codec_context
    if context is None:
        raise SourceError("no decoder for the video stream", reason=Reason.NO_DECODER)
    return pictures[0]


def fraction(value: Any) -> Fraction | None:
    """A rate, time base or aspect ratio of PyAV; None where it is not set, which PyAV 19 says by 0/1 or 1/0."""
    return Fraction(value.numerator, value.denominator) if value and value.denominator else None


def side_data(frame: VideoFrame, name: str) -> bytes | None:
    """What a frame carries of one type, such as "DISPLAYMATRIX", whatever else it carries; None for nothing."""
    _name_every_type()
    data: Any = frame.side_data.get(name)
    return None if data is None else bytes(data)


def said(error: BaseException) -> str:
    """What FFmpeg says, short, without the name of a file that only this process knows."""
    text = getattr(error, "strerror", None) or str(error)
    return str(text).split(": 'file:")[0][:200]


@cache
def _any_text() -> dict[str, Any]:
    """What `av.open` must be told so that tags in another encoding than UTF-8 are no error."""
    told: dict[str, Any] = {"metadata_errors": "replace"}
    try:
        with contextlib.suppress(av.FFmpegError, ValueError):  # the file that is tried is empty
            av.open(io.BytesIO(), format="mov", **told)
    except TypeError:  # PyAV 19 keeps any bytes unasked, and no longer takes the argument
        return {}
    return told


@cache
def _name_every_type() -> None:
    """Before version 19, PyAV gives none of a frame's side data when it has no name for the type of one.

    Decoders attach such types to spatial videos (VIEW_ID), to JPEG with EXIF, and to what FFmpeg learns next.
    """
    types: Any = Type
    try:
        types(-1)
    except ValueError:
        # As PyAV 19 does: https://github.com/PyAV-Org/PyAV/pull/2392
        types._missing_ = classmethod(_nameless)


def _nameless(cls: Any, value: object) -> Any:
    """A member of an enumeration for a value that has none."""
    member = object.__new__(cls)
    member._name_, member._value_ = f"UNKNOWN_{value}", value
    return cls._value2member_map_.setdefault(value, member)
