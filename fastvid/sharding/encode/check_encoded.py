"""Decode an encoded sample once, from memory, and check it against the guarantees of the format."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import av

from fastvid.errors import FormatError, SourceError
from fastvid.format.demux import index_mp4
from fastvid.format.packets import PacketTable
from fastvid.format.schema import Matrix, PacketFlag, Range, StreamFlag
from fastvid.media.demuxer import open_demuxer
from fastvid.media.reasons import Reason
from fastvid.sharding.encode.profile import Profile

# Both values mean BT.601 luma; VP9 has one code for both.
_BT601: Final = (Matrix.BT470BG, Matrix.SMPTE170M)
_LIMITED, _FULL = 1, 2  # AVCOL_RANGE_MPEG, AVCOL_RANGE_JPEG


@dataclass(frozen=True, slots=True)
class Verified:
    """Properties of an encoded sample that passed the check.

    Attributes:
        num_frames: Number of displayed frames.
        width: Width in pixels.
        height: Height in pixels.
        num_keys: Number of key packets.
        num_droppable: Number of packets that no other packet references.
    """

    num_frames: int
    width: int
    height: int
    num_keys: int
    num_droppable: int


def verify(
    data: bytes,
    profile: Profile,
    *,
    frames: tuple[int, int],
    size: tuple[int, int] | None = None,
    full_range: bool | None = None,
    on_frame: Callable[[Any], None] | None = None,
) -> Verified:
    """Decode an encoded sample; check frame count, size, colour and the structure that plans need.

    Args:
        data: The MP4.
        profile: The profile with which it was encoded.
        frames: Minimum and maximum number of frames.
        size: Required width and height in pixels; by default those that the profile writes for RGB.
        full_range: Whether its luma must range from 0 to 255; by default as the profile writes RGB.
        on_frame: Called with every decoded frame.

    Raises:
        SourceError: If a check fails; the message says which.
    """
    try:
        info, records = index_mp4(data, conforms=True)
        PacketTable(records)
    except FormatError as error:
        raise _failure(f"the packet index cannot be built: {error.message}") from error
    flags = records["flags"]
    keys = int(((flags & PacketFlag.KEY) != 0).sum())
    droppable = int(((flags & PacketFlag.DROPPABLE) != 0).sum())
    if info.flags & StreamFlag.WHOLE:
        raise _failure("its packets cannot be decoded selectively")
    if not frames[0] <= info.num_frames <= frames[1]:
        raise _failure(f"{info.num_frames} frames, expected {frames[0]} to {frames[1]}")
    if keys != -(-info.num_frames // profile.gop):
        raise _failure(f"{keys} key frames in {info.num_frames} frames, expected one in {profile.gop}")
    if profile.bframes and info.num_frames > 2 and not droppable:
        raise _failure("every frame is a reference frame")
    sides = sorted((info.width, info.height))
    if size is not None:
        if (info.width, info.height) != size:
            raise _failure(f"{info.width}x{info.height} pixels, expected {size[0]}x{size[1]}")
    elif sides[0] != profile.short_side or sides[1] % profile.multiple:
        raise _failure(
            f"{info.width}x{info.height} pixels, expected {profile.short_side} and a multiple of {profile.multiple}"
        )
    full = profile.full_range if full_range is None else full_range
    if info.range is not (Range.FULL if full else Range.LIMITED) or info.matrix not in _BT601:
        raise _failure(f"the container is tagged {info.range.name} {info.matrix.name}")
    decoded = _decode(data, info.width, info.height, on_frame, full_range=full)
    if decoded != info.num_frames:
        raise _failure(f"{decoded} frames decode, but {info.num_frames} are indexed")
    return Verified(info.num_frames, info.width, info.height, keys, droppable)


def _decode(data: bytes, width: int, height: int, on_frame: Callable[[Any], None] | None, *, full_range: bool) -> int:
    count = 0
    try:
        container = open_demuxer(data, "mov")
    except SourceError as error:
        raise _failure(f"it cannot be opened: {error.message}") from error
    try:
        with container:
            stream = container.streams.video[0]
            stream.codec_context.thread_count = 1
            for frame in container.decode(stream):
                _check_frame(frame, width, height, count, full_range=full_range)
                if on_frame is not None:
                    on_frame(frame)
                count += 1
    except av.FFmpegError as error:
        raise _failure(f"decoding failed after {count} frames: {error}") from error
    return count


def _check_frame(frame: Any, width: int, height: int, number: int, *, full_range: bool) -> None:
    if frame.is_corrupt:
        raise _failure(f"frame {number} decodes with errors")
    if frame.rotation:
        raise _failure(f"frame {number} has a display rotation of {frame.rotation} degrees")
    # Decoders signal full range by the pixel format, or only by the range.
    formats = ("yuvj420p", "yuv420p") if full_range else ("yuv420p",)
    if (frame.width, frame.height) != (width, height) or frame.format.name not in formats:
        raise _failure(f"frame {number} is {frame.width}x{frame.height} {frame.format.name}")
    if int(frame.colorspace) not in _BT601 or int(frame.color_range) != (_FULL if full_range else _LIMITED):
        raise _failure(f"frame {number} is tagged matrix {int(frame.colorspace)} range {int(frame.color_range)}")


def _failure(message: str) -> SourceError:
    return SourceError(f"the encoded sample is wrong: {message}", reason=Reason.VERIFY_FAILED)
