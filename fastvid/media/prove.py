"""Indexes a video file that another tool wrote: finds its packets with FFmpeg's demuxer and verifies them by decoding.

Nothing that the container says is trusted. A packet must be in the file byte for byte; frames are numbered in the order
in which the decoder outputs them; and all frames must equal those a player shows, bit for bit. Reading parts of a
stream is allowed only if every GOP decodes on its own, and twice more with half of its droppable packets left out. A
stream that fails this is marked to be decoded whole.

The file is untrusted: run this in a worker process that may crash (`fastvid.sharding.engines.local_engine`).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from typing import Any, Final

import av
import numpy as np
import numpy.typing as npt
from av.video.frame import VideoFrame

from fastvid.decode.pyav import open_context
from fastvid.errors import FormatError, SourceError
from fastvid.format.codecs.bitstream import can_plan, packet_flags
from fastvid.format.mp4.demux import frame_rate
from fastvid.format.packets import PacketTable, StreamInfo, packet_records
from fastvid.format.schema import Codec, Matrix, PacketFlag, Range, StreamFlag
from fastvid.media.containers import HEAD_BYTES, sniff
from fastvid.media.frame_digest import frame_digest
from fastvid.media.limits import Limits
from fastvid.media.playback import ENCODE_HINT, Playback, play
from fastvid.media.reasons import Reason
from fastvid.runtime.arrays import FloatArray, IntArray

_RANGE: Final = {1: Range.LIMITED, 2: Range.FULL}  # AVColorRange
# Demuxers return the position of the packet's own header; the longest in use, of Matroska's block groups, is smaller.
_HEADER_WINDOW: Final = 4096
# MPEG-4's placeholder for a frame that an earlier packet contained: a picture header without a picture.
_PLACEHOLDER_BYTES: Final = 8
# Passes over each GOP with half of the droppable packets left out.
_PASSES: Final = 2


@dataclass(frozen=True, slots=True)
class IndexedVideo:
    """An indexed video."""

    info: StreamInfo
    records: npt.NDArray[np.void]  # PACKET_DTYPE records [P], with offsets from the start of the file
    pix_fmt: str  # FFmpeg's pixel format of the frames
    container: str
    notes: tuple[str, ...]
    digests: tuple[bytes, ...] = ()  # digests of its frames in display order
    # when each frame is shown, since the first one, float64 [N]; None if the container does not tell.
    seconds: FloatArray | None = None


@dataclass(frozen=True, slots=True)
class NumberedPackets:
    """What each packet of a stream is and shows."""

    flags: npt.NDArray[np.uint32]  # packetFlag of each packet, uint32 [P]; the first is KEY
    frames: npt.NDArray[np.int64]  # frame that each packet shows, in display order, -1 for none; int64 [P]
    order: tuple[int, ...]
    whole: str


def index_video(data: bytes, limits: Limits) -> IndexedVideo:
    """Find and verify the packets of a video file's first video stream.

    `limits`: limits on the size and number of frames.
    """
    container = sniff(data[:HEAD_BYTES])
    played = play(data, container, limits)
    offsets = _locate(data, played)
    first = played.first
    assert first is not None
    if min(first.width, first.height) < 2:
        raise SourceError(
            f"{first.width}x{first.height} pixels are too few: cropping to even sizes leaves nothing",
            reason=Reason.BAD_SHAPE,
        )
    range_, matrix = colours_of(first)
    info = StreamInfo(
        codec=played.codec,
        width=first.width,
        height=first.height,
        num_frames=len(played.digests),
        fps=played.rate,
        extradata=played.extradata,
        range=range_,
        matrix=matrix,
    )
    numbered = number_packets(played)
    info, notes = _rate(played, info, numbered.frames)
    sizes = [len(packet) for packet in played.packets]
    checksums = [zlib.crc32(packet) for packet in played.packets]
    try:
        records = packet_records(offsets, sizes, checksums, numbered.frames, numbered.flags)
        PacketTable(records)
    except FormatError as error:
        raise SourceError(f"its packets cannot be indexed: {error.message}", reason=Reason.NO_INDEX) from error
    whole = numbered.whole or why_decode_whole(played, numbered)
    if whole:
        info = replace(info, flags=info.flags | StreamFlag.WHOLE)
        notes.append(f"whole: {whole}")
    notes = [*_differences(played, info, first), *notes]
    digests, seconds = tuple(played.digests), frame_seconds(played.pts, numbered.frames, played.time_base)
    return IndexedVideo(info, records, first.format.name, container, tuple(notes), digests, seconds)


def frame_seconds(pts: Sequence[int | None], frames: IntArray, time_base: Fraction) -> FloatArray | None:
    """Return when each frame is shown, since the first one, float64 [N]; None if times are missing or disordered.

    `frames`: the frame that each packet shows, -1 for none, int64 [P]. `time_base`: seconds per tick.
    """
    shown = np.flatnonzero(frames >= 0)
    times = [pts[number] for number in shown[np.argsort(frames[shown])].tolist()]
    if None in times:
        return None
    known = np.asarray(times, np.int64)
    if (np.diff(known) <= 0).any():
        return None
    seconds: FloatArray = (known - known[0]) * float(time_base)
    return seconds


def colours_of(frame: VideoFrame) -> tuple[Range, Matrix]:
    """Return the range and the luma coefficients of a frame; a tag of RGB on YUV pictures is ignored, as players do."""
    if frame.format.is_rgb:
        raise SourceError(f"its pictures are {frame.format.name}", reason=Reason.NO_INDEX, hint=ENCODE_HINT)
    full = Range.FULL if frame.format.name.startswith("yuvj") else Range.UNKNOWN
    matrix = int(frame.colorspace)
    known = matrix in list(Matrix) and matrix != Matrix.RGB
    return _RANGE.get(int(frame.color_range), full), Matrix(matrix) if known else Matrix.UNKNOWN


def number_packets(played: Playback) -> NumberedPackets:
    """Classify and number each packet, from its header and by decoding all packets without the container."""
    flags, whole = np.zeros(len(played.packets), np.uint32), ""
    if can_plan(played.codec):
        try:
            flags = packet_flags(played.codec, played.extradata, played.packets)
        except FormatError as error:
            whole = error.message
    else:
        whole = f"packet headers of {played.codec.label} are not parsed"
    try:
        given = dict(_decode(played, range(len(played.packets))))
    except (SourceError, av.FFmpegError, ValueError) as error:
        raise SourceError(
            f"its packets do not decode without their container: {error}", reason=Reason.NO_INDEX, hint=ENCODE_HINT
        ) from error
    silent = [number for number in range(len(played.packets)) if number not in given]
    allowed = set(_silent(played, flags))
    lost = [number for number in silent if number not in allowed]
    if lost:
        raise SourceError(
            f"{len(lost)} packets decode to no frame, the first of them packet {lost[0]}", reason=Reason.DAMAGED
        )
    shown = [number for number in given if not played.discard[number]]
    if [given[number] for number in shown] != played.digests:
        raise SourceError(
            f"decoding its packets returns {len(shown)} frames that differ from the {len(played.digests)} of the file",
            reason=Reason.NO_INDEX,
            hint=ENCODE_HINT,
        )
    frames = np.full(len(played.packets), -1, np.int64)
    frames[shown] = np.arange(len(shown))
    hidden = np.where(frames < 0, np.uint32(PacketFlag.HIDDEN), np.uint32(0))
    flags = (flags & ~np.uint32(PacketFlag.HIDDEN)) | hidden
    if not whole and not flags[0] & PacketFlag.KEY:
        whole = "the first packet is no key packet"
    flags[0] |= np.uint32(PacketFlag.KEY)
    return NumberedPackets(flags, frames, tuple(given), whole)


def _locate(data: bytes, played: Playback) -> list[int]:
    """Return the offset of each packet in the file."""
    offsets: list[int] = []
    end = 0
    for number, (packet, position) in enumerate(zip(played.packets, played.positions, strict=True)):
        start = end if position is None or position < 0 else position
        at = data.find(packet, start, start + _HEADER_WINDOW + len(packet))
        if at < 0:
            raise SourceError(
                f"packet {number} is not contiguous at byte {start} of the file",
                reason=Reason.NO_INDEX,
                hint=ENCODE_HINT,
            )
        offsets.append(at)
        end = at + len(packet)
    return offsets


def _silent(played: Playback, flags: npt.NDArray[np.uint32]) -> Iterator[int]:
    """Yield the packets that may decode to no frame."""
    leading = played.codec is Codec.HEVC
    for number, packet in enumerate(played.packets):
        placeholder = played.codec is Codec.MPEG4 and len(packet) <= _PLACEHOLDER_BYTES
        if flags[number] & PacketFlag.HIDDEN or played.discard[number] or placeholder:
            yield number
        elif leading and number:
            # Leading pictures of the first key picture, whose references were cut off.
            leading = (packet[4] >> 1 & 63) in (8, 9) if len(packet) > 4 else False
            if leading:
                yield number


def why_decode_whole(played: Playback, numbered: NumberedPackets) -> str:
    """Return why a part of the stream cannot be decoded on its own; empty if every part can."""
    flags, frames = numbered.flags, numbered.frames
    shown = {number: played.digests[frame] for number, frame in enumerate(frames.tolist()) if frame >= 0}
    keys = [*np.flatnonzero(flags & np.uint32(PacketFlag.KEY)).tolist(), len(flags)]
    droppable = (flags & np.uint32(PacketFlag.DROPPABLE)) != 0
    rng = np.random.default_rng(zlib.crc32(flags.tobytes() + frames.tobytes()))
    for start, stop in pairwise(keys):
        group = np.arange(start, stop)
        # In each pass, random droppable packets are left out while others that may depend on them are kept.
        kept = [group] if len(keys) > 2 else []
        if droppable[start:stop].any():
            kept += [
                group[~droppable[start:stop] | half] for half in rng.integers(0, 2, (_PASSES, len(group))).astype(bool)
            ]
        for packets in kept:
            try:
                given = dict(_decode(played, packets.tolist()))
            except (SourceError, av.FFmpegError, ValueError) as error:
                return f"packets {start} to {stop - 1} do not decode on their own: {error}"
            wrong = [number for number in packets.tolist() if number in shown and given.get(number) != shown[number]]
            if wrong:
                return f"packet {wrong[0]} differs if packets {start} to {stop - 1} are decoded on their own"
    return ""


def _decode(played: Playback, packets: Sequence[int]) -> Iterator[tuple[int, bytes]]:
    """Decode packets as `fastvid.decode.pyav` does; yield packet numbers and frame digests, in display order."""
    context = open_context(played.codec, played.extradata)
    for number in [*packets, None]:
        packet = None
        if number is not None:
            data: Any = played.packets[number]  # PyAV takes any buffer; its stubs say bytes
            packet = av.Packet(data)
            packet.pts = number
        for frame in context.decode(packet):
            if frame.pts is None or frame.is_corrupt:
                raise SourceError("a packet decodes with errors", reason=Reason.DAMAGED)
            yield frame.pts, frame_digest(frame)


def _rate(played: Playback, info: StreamInfo, frames: npt.NDArray[np.int64]) -> tuple[StreamInfo, list[str]]:
    """Set the mean rate over the times of the shown packets; return notes about those times."""
    shown = np.flatnonzero(frames >= 0)
    order = shown[np.argsort(frames[shown])]
    times = [played.pts[number] for number in order.tolist()]
    known = [time for time in times if time is not None]
    if len(known) < len(times):
        return info, ["times-missing"]
    pts = np.asarray(known, np.int64)
    steps = np.diff(pts)
    if (steps <= 0).any():
        return info, ["times-disordered"]
    ticks = played.time_base
    last = played.durations[int(order[-1])] or (int(np.median(steps)) if len(steps) else 0)
    if last:
        rate = frame_rate(pts, ticks.denominator, last=last * ticks.numerator) if ticks.numerator == 1 else info.fps
        nominal = info.fps
        # Containers round times to their clock, so the nominal rate is kept if it explains the times.
        if abs(rate - nominal) * 1000 > rate:
            info = replace(info, fps=rate)
    # Rounding to the container's clock changes a step by up to one tick.
    varies = len(steps) > 0 and int(steps.max() - steps.min()) > max(1, int(np.median(steps)) // 100)
    return info, ["variable-rate"] if varies else []


def _differences(played: Playback, info: StreamInfo, frame: VideoFrame) -> Iterator[str]:
    """Yield why a stream does not conform to what fastvid's profiles write."""
    if info.width % 16 or info.height % 16:
        yield "size"
    if frame.format.name not in ("yuv420p", "yuvj420p"):
        yield f"pixels-{frame.format.name}"
    if info.range is not Range.LIMITED or info.matrix not in (Matrix.SMPTE170M, Matrix.BT470BG):
        yield f"colour-{info.range.name.lower()}-{info.matrix.name.lower()}"
    if frame.rotation:
        yield f"rotated-{frame.rotation % 360}"
    if played.aspect != 1:
        yield "pixel-aspect"
    if frame.interlaced_frame:
        yield "interlaced"
    if any(played.discard):
        yield "edit-list"
