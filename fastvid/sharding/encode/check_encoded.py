"""Decode an encoded sample once, from memory, and check it against the guarantees of the format."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import chain
from typing import Any

from fastvid.errors import FormatError, SourceError
from fastvid.format.mp4.demux import index_mp4, read_track
from fastvid.format.packets import PacketTable, StreamInfo
from fastvid.format.schema import PacketFlag, StreamFlag
from fastvid.media.promises import Finding, Promised, broken_tables, play_stream
from fastvid.media.reasons import Reason
from fastvid.sharding.encode.profile import Profile


@dataclass(frozen=True, slots=True)
class Verified:
    """Properties of an encoded sample that passed the check."""

    num_frames: int  # number of displayed frames
    width: int  # width in pixels
    height: int  # height in pixels
    num_keys: int
    num_droppable: int


def verify(
    data: bytes,
    profile: Profile,
    *,
    frames: tuple[int, int],
    rate: Fraction,
    size: tuple[int, int] | None = None,
    full_range: bool | None = None,
    on_frame: Callable[[int, Any], None] | None = None,
) -> Verified:
    """Decode every frame of an encoded sample; check what the job asked for, then what the format promises.

    `frames`: minimum and maximum number of frames. `rate`: required frames per second. `size`: required width and
    height in pixels; by default those that the profile writes for RGB. `full_range`: whether its luma must range
    from 0 to 255; by default as the profile writes RGB.
    """
    try:
        info, records = index_mp4(data, conforms=True)
        PacketTable(records)
        track = read_track(memoryview(data))
    except FormatError as error:
        raise _failure(f"the packet index cannot be built: {error.message}") from error
    flags = records["flags"]
    keys = int(((flags & PacketFlag.KEY) != 0).sum())
    droppable = int(((flags & PacketFlag.DROPPABLE) != 0).sum())
    found = Verified(info.num_frames, info.width, info.height, keys, droppable)
    full = profile.full_range if full_range is None else full_range
    stream = Promised(track, replace(info, fps=rate), full, profile.multiple)
    wrong = chain(
        _structure(info, found, profile, frames, size), broken_tables(stream), play_stream(data, stream, on_frame)
    )
    for _, message in wrong:
        raise _failure(message)
    return found


def _structure(
    info: StreamInfo, found: Verified, profile: Profile, frames: tuple[int, int], size: tuple[int, int] | None
) -> Iterator[Finding]:
    """Yield what differs from the structure that the profile writes."""
    if info.flags & StreamFlag.WHOLE:
        yield "index", "its packets cannot be decoded selectively"
    if not frames[0] <= found.num_frames <= frames[1]:
        yield "index", f"{found.num_frames} frames, expected {frames[0]} to {frames[1]}"
    if found.num_keys != -(-found.num_frames // profile.gop):
        yield "index", f"{found.num_keys} key frames in {found.num_frames} frames, expected one in {profile.gop}"
    if profile.bframes and found.num_frames > 2 and not found.num_droppable:
        yield "index", "every frame is a reference frame"
    if size is not None and (found.width, found.height) != size:
        yield "shape", f"{found.width}x{found.height} pixels, expected {size[0]}x{size[1]}"
    if size is None and min(found.width, found.height) != profile.short_side:
        yield "shape", f"{found.width}x{found.height} pixels, expected {profile.short_side} on the shorter side"


def _failure(message: str) -> SourceError:
    return SourceError(f"the encoded sample is wrong: {message}", reason=Reason.VERIFY_FAILED)
