"""Packets of a video file that another tool wrote: found by FFmpeg's demuxer, proved by decoding.

Nothing that a container says is taken on trust. A packet counts only where its very bytes stand in the file; frames are
numbered in the order in which the decoder gives them; all frames must be those that a player shows, bit for bit; and
packets may be left out only after every group of pictures has been decoded alone, and twice more with half of its
droppable packets left out. A stream that fails the last is marked to be decoded whole.

The file is hostile: call this in a process that may die (`fastvid.sharding.engines.local_engine`).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final

import av
import numpy as np
import numpy.typing as npt
from av.video.frame import VideoFrame

from fastvid.decode.pyav import open_context
from fastvid.errors import FormatError, SourceError
from fastvid.format.bitstream import can_plan, packet_flags
from fastvid.format.demux import frame_rate
from fastvid.format.packets import PacketTable, StreamInfo, packet_records
from fastvid.format.schema import Codec, Matrix, PacketFlag, Range, StreamFlag
from fastvid.media.containers import HEAD_BYTES, sniff
from fastvid.media.frame_digest import frame_digest
from fastvid.media.limits import Limits
from fastvid.media.playback import ENCODE_HINT, Playback, play
from fastvid.media.reasons import Reason

_RANGE: Final = {1: Range.LIMITED, 2: Range.FULL}  # AVColorRange
# Demuxers give the position of a packet's own header; the longest in use, of Matroska's block groups, stays below.
_HEADER_WINDOW: Final = 4096
# A placeholder of MPEG-4 for a frame that an earlier packet brought: a picture header without a picture.
_PLACEHOLDER_BYTES: Final = 8
# Passes over each group of pictures in which half of the droppable packets are left out.
_PASSES: Final = 2


@dataclass(frozen=True, slots=True)
class Found:
    """An indexed video.

    Attributes:
        info: What a decoder must know.
        records: PACKET_DTYPE records [P], offsets from the file's first byte.
        pix_fmt: FFmpeg's pixel format of the frames.
        container: FFmpeg's demuxer.
        notes: In which ways it differs from what fastvid writes, and why it is decoded whole if it is.
        digests: Of its frames in display order.
    """

    info: StreamInfo
    records: npt.NDArray[np.void]
    pix_fmt: str
    container: str
    notes: tuple[str, ...]
    digests: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Numbered:
    """What the packets of a stream are.

    Attributes:
        flags: PacketFlag of each, uint32 [P]; the first is KEY.
        frames: The frame that each shows, in display order, -1 for none; int64 [P].
        order: Packets that give a frame, hidden ones too, in display order.
        whole: Why the stream must be decoded whole; empty when nothing is known against planning.
    """

    flags: npt.NDArray[np.uint32]
    frames: npt.NDArray[np.int64]
    order: tuple[int, ...]
    whole: str


def index_video(data: bytes, limits: Limits) -> Found:
    """Finds and proves the packets of a video file's first video stream.

    Args:
        data: The whole file.
        limits: For the size of frames and their number.

    Raises:
        SourceError: It is no video, it is damaged, or its packets cannot be addressed in the file.
    """
    container = sniff(data[:HEAD_BYTES])
    played = play(data, container, limits)
    offsets = _locate(data, played)
    first = played.first
    assert first is not None
    if min(first.width, first.height) < 2:
        raise SourceError(
            f"nothing is left of {first.width}x{first.height} pixels when odd sizes are cropped",
            reason=Reason.BAD_SHAPE,
        )
    matrix = int(first.colorspace)
    info = StreamInfo(
        codec=played.codec,
        width=first.width,
        height=first.height,
        num_frames=len(played.digests),
        fps=played.rate,
        extradata=played.extradata,
        range=_RANGE.get(int(first.color_range), Range.FULL if first.format.name.startswith("yuvj") else Range.UNKNOWN),
        matrix=Matrix(matrix) if matrix in list(Matrix) else Matrix.UNKNOWN,
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
    whole = numbered.whole or disproof(played, numbered)
    if whole:
        info = replace(info, flags=info.flags | StreamFlag.WHOLE)
        notes.append(f"whole: {whole}")
    notes = [*_differences(played, info, first), *notes]
    return Found(info, records, first.format.name, container, tuple(notes), tuple(played.digests))


def number_packets(played: Playback) -> Numbered:
    """What each packet is and shows, by their headers and by decoding all without their container.

    Raises:
        SourceError: The frames are not those that a player shows, or a packet gives none.
    """
    flags, whole = np.zeros(len(played.packets), np.uint32), ""
    if can_plan(played.codec):
        try:
            flags = packet_flags(played.codec, played.extradata, played.packets)
        except FormatError as error:
            whole = error.message
    else:
        whole = f"packets of {played.codec.label} are not read"
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
            f"{len(lost)} packets give no frame, the first of them packet {lost[0]}", reason=Reason.DAMAGED
        )
    shown = [number for number in given if not played.discard[number]]
    if [given[number] for number in shown] != played.digests:
        raise SourceError(
            f"decoding its packets gives {len(shown)} frames, other than the {len(played.digests)} of the file",
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
    return Numbered(flags, frames, tuple(given), whole)


def _locate(data: bytes, played: Playback) -> list[int]:
    """Where each packet's very bytes stand in the file.

    Raises:
        SourceError: A packet does not stand in one piece where its container puts it.
    """
    offsets: list[int] = []
    end = 0
    for number, (packet, position) in enumerate(zip(played.packets, played.positions, strict=True)):
        start = end if position is None or position < 0 else position
        at = data.find(packet, start, start + _HEADER_WINDOW + len(packet))
        if at < 0:
            raise SourceError(
                f"packet {number} does not lie in one piece at byte {start} of the file",
                reason=Reason.NO_INDEX,
                hint=ENCODE_HINT,
            )
        offsets.append(at)
        end = at + len(packet)
    return offsets


def _silent(played: Playback, flags: npt.NDArray[np.uint32]) -> Iterator[int]:
    """Packets that may give no frame."""
    leading = played.codec is Codec.HEVC
    for number, packet in enumerate(played.packets):
        placeholder = played.codec is Codec.MPEG4 and len(packet) <= _PLACEHOLDER_BYTES
        if flags[number] & PacketFlag.HIDDEN or played.discard[number] or placeholder:
            yield number
        elif leading and number:
            # Pictures behind the first key picture, shown before it, that refer to what was cut off.
            leading = (packet[4] >> 1 & 63) in (8, 9) if len(packet) > 4 else False
            if leading:
                yield number


def disproof(played: Playback, numbered: Numbered) -> str:
    """Why a part of the stream cannot be decoded alone; empty when it can."""
    flags, frames = numbered.flags, numbered.frames
    shown = {number: played.digests[frame] for number, frame in enumerate(frames.tolist()) if frame >= 0}
    keys = [*np.flatnonzero(flags & np.uint32(PacketFlag.KEY)).tolist(), len(flags)]
    droppable = (flags & np.uint32(PacketFlag.DROPPABLE)) != 0
    rng = np.random.default_rng(zlib.crc32(flags.tobytes() + frames.tobytes()))
    for start, stop in pairwise(keys):
        group = np.arange(start, stop)
        # Each droppable packet is left out of some passes while those that could need it are kept.
        kept = [group] if len(keys) > 2 else []
        if droppable[start:stop].any():
            kept += [
                group[~droppable[start:stop] | half] for half in rng.integers(0, 2, (_PASSES, len(group))).astype(bool)
            ]
        for packets in kept:
            try:
                given = dict(_decode(played, packets.tolist()))
            except (SourceError, av.FFmpegError, ValueError) as error:
                return f"packets {start} to {stop - 1} do not decode alone: {error}"
            wrong = [number for number in packets.tolist() if number in shown and given.get(number) != shown[number]]
            if wrong:
                return f"packet {wrong[0]} gives another picture when packets {start} to {stop - 1} are decoded alone"
    return ""


def _decode(played: Playback, packets: Sequence[int]) -> Iterator[tuple[int, bytes]]:
    """Decodes packets as `fastvid.decode.pyav` does: gives their numbers with their frames, in display order."""
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
    """The mean rate over the times of the shown packets, and notes about those times."""
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
        # Containers round times to their clock: the nominal rate stands when it explains them.
        if abs(rate - nominal) * 1000 > rate:
            info = replace(info, fps=rate)
    # One tick is what rounding to the container's clock costs.
    varies = len(steps) > 0 and int(steps.max() - steps.min()) > max(1, int(np.median(steps)) // 100)
    return info, ["variable-rate"] if varies else []


def _differences(played: Playback, info: StreamInfo, frame: VideoFrame) -> Iterator[str]:
    """Why a stream does not conform to what fastvid's profiles write."""
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
