"""Decodes what was written, once, from memory, and holds it against what the format promises."""

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

# Both numbers stand for BT.601 luma; VP9 has one code for the two.
_BT601: Final = (Matrix.BT470BG, Matrix.SMPTE170M)
_LIMITED, _FULL = 1, 2  # AVCOL_RANGE_MPEG, AVCOL_RANGE_JPEG


@dataclass(frozen=True, slots=True)
class Verified:
    """An encoded sample that passed.

    Attributes:
        num_frames: Frames it shows.
        width: Pixels.
        height: Pixels.
        num_keys: Key packets.
        num_droppable: Packets that nothing refers to.
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
    look: Callable[[Any], None] | None = None,
) -> Verified:
    """Decodes every frame of an encoded sample and checks count, size, colour, and the structure that plans rely on.

    Args:
        data: The MP4.
        profile: What wrote it.
        frames: Fewest and most frames it may have.
        size: Width and height in pixels that it must have; by default those that the profile gives pictures.
        full_range: Whether its luma runs from 0 to 255; by default what the profile gives pictures.
        look: Called with every decoded frame.

    Raises:
        SourceError: It breaks a promise; the message says which.
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
        raise _failure("its packets cannot be planned")
    if not frames[0] <= info.num_frames <= frames[1]:
        raise _failure(f"{info.num_frames} frames, expected {frames[0]} to {frames[1]}")
    if keys != -(-info.num_frames // profile.gop):
        raise _failure(f"{keys} key frames in {info.num_frames} frames, expected one in {profile.gop}")
    if profile.bframes and info.num_frames > 2 and not droppable:
        raise _failure("every frame is referred to")
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
    decoded = _decode(data, info.width, info.height, look, full_range=full)
    if decoded != info.num_frames:
        raise _failure(f"{decoded} frames decode, {info.num_frames} are indexed")
    return Verified(info.num_frames, info.width, info.height, keys, droppable)


def _decode(data: bytes, width: int, height: int, look: Callable[[Any], None] | None, *, full_range: bool) -> int:
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
                if look is not None:
                    look(frame)
                count += 1
    except av.FFmpegError as error:
        raise _failure(f"decoding fails after {count} frames: {error}") from error
    return count


def _check_frame(frame: Any, width: int, height: int, number: int, *, full_range: bool) -> None:
    if frame.is_corrupt:
        raise _failure(f"frame {number} decodes with errors")
    if frame.rotation:
        raise _failure(f"frame {number} is to be turned by {frame.rotation} degrees")
    # Decoders name full range by the format, or by the range alone.
    formats = ("yuvj420p", "yuv420p") if full_range else ("yuv420p",)
    if (frame.width, frame.height) != (width, height) or frame.format.name not in formats:
        raise _failure(f"frame {number} is {frame.width}x{frame.height} {frame.format.name}")
    if int(frame.colorspace) not in _BT601 or int(frame.color_range) != (_FULL if full_range else _LIMITED):
        raise _failure(f"frame {number} is tagged matrix {int(frame.colorspace)} range {int(frame.color_range)}")


def _failure(message: str) -> SourceError:
    return SourceError(f"what was written is wrong: {message}", reason=Reason.VERIFY_FAILED)
