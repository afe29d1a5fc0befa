"""Where the packets of a video are, when they are shown and where decoding may start, as its container says.

The tables of a plain MP4 are read by themselves: two or three small reads, wherever they are in the file. Every other
container is read from end to end by FFmpeg's demuxer, because only its blocks say where they are; nothing is stored.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, Final

import av
import numpy as np

from fastvid.errors import FormatError, SourceError
from fastvid.format.codecs.fields import FieldPairs
from fastvid.format.codecs.heads import WHOLE_PACKETS
from fastvid.format.mp4.demux import Track, frame_rate, read_moov
from fastvid.format.schema import Codec
from fastvid.media.boxes import check_fragments
from fastvid.media.containers import HEAD_BYTES as CONTAINER_BYTES
from fastvid.media.containers import sniff
from fastvid.media.demuxer import ffmpeg_message, fraction, open_demuxer, video_stream
from fastvid.media.in_place.file_reader import FileReader
from fastvid.media.limits import Limits
from fastvid.media.playback import ENCODE_HINT
from fastvid.media.reasons import Reason
from fastvid.runtime.arrays import BoolArray, IntArray, UInt32Array

_CODECS: Final = {codec.label: codec for codec in Codec}
# Demuxers return the position of the packet's own header; the longest in use, of Matroska's block groups, is smaller.
_HEADER_WINDOW: Final = 4096
# A demuxed packet's first bytes that are kept.
_KEPT_HEAD: Final = 4096
_MOST_MOOV: Final = 1 << 30
# Bytes read with the header of a box: the tables of several minutes of video.
_TABLES_AHEAD: Final = 1 << 18


@dataclass(frozen=True, slots=True)
class Tables:
    """The packets of a file's first video stream, in decode order."""

    container: str
    codec: Codec
    extradata: bytes
    rate: Fraction  # mean frames per second of the shown frames
    time_base: Fraction  # seconds per tick
    offsets: IntArray  # first byte of each packet in the file, int64 [P]
    sizes: IntArray  # size of each packet in bytes, int64 [P]
    pts: IntArray  # presentation time of each packet in ticks, int64 [P]
    shown: BoolArray  # whether the packet's frame is shown, bool [P]: an edit list hides others
    sync: BoolArray  # whether the container calls it a key packet, bool [P]
    heads: Sequence[bytes | None]  # first bytes of each packet, None for those not read
    checksums: UInt32Array | None = None  # CRC-32 of each packet, uint32 [P]; None if the packets were not read
    notes: tuple[str, ...] = ()


def read_tables(file: FileReader, limits: Limits) -> Tables:
    """Read where the packets of a file are."""
    container = sniff(file.part(0, CONTAINER_BYTES))
    if container == "mov":
        try:
            track = read_moov(memoryview(_moov(file)), file.size)
        except FormatError:
            pass  # fragments, several edits and what else only a full demuxer reads
        else:
            return _from_track(track, container, limits)
        check_fragments(file.part, file.size)
    return _Demuxed(file, container, limits).tables()


def _moov(file: FileReader) -> bytes:
    """Return the body of the file's ``moov`` box."""
    position = 0
    while position + 8 <= file.size:
        # Boxes behind the frames are the tables and little else: read them at once.
        head = file.part(position, 16, ahead=_TABLES_AHEAD if position else 0)
        size, name, start = int.from_bytes(head[:4], "big"), head[4:8], 8
        if size == 1:
            size, start = int.from_bytes(head[8:16], "big"), 16
        elif size == 0:
            size = file.size - position
        if size < start or position + size > file.size:
            raise FormatError(f"MP4 box {name!r} of {size} bytes exceeds the file")
        if name == b"moov":
            if size > _MOST_MOOV:
                raise FormatError(f"MP4 has tables of {size} bytes")
            return file.part(position + start, size - start)
        position += size
    raise FormatError("MP4 has no moov box")


def _from_track(track: Track, container: str, limits: Limits) -> Tables:
    count = len(track.sizes)
    _check_limits(track.width, track.height, count, limits)
    if not track.shown.any():
        raise SourceError(f"none of the {count} packets shows a frame", reason=Reason.NO_FRAMES)
    return Tables(
        container=container,
        codec=track.codec,
        extradata=track.extradata,
        rate=_rate(track.pts, track.shown, track.timescale, _last_step(track.dts)),
        time_base=Fraction(1, track.timescale),
        offsets=track.offsets,
        sizes=track.sizes,
        pts=track.pts,
        shown=track.shown,
        sync=track.sync,
        heads=[None] * count,
        notes=("edit-list",) if not track.shown.all() else (),
    )


@dataclass(slots=True)
class _Demuxed:
    """Reads a file from end to end."""

    file: FileReader
    container: str
    limits: Limits
    offsets: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    pts: list[int] = field(default_factory=list)
    shown: list[bool] = field(default_factory=list)
    sync: list[bool] = field(default_factory=list)
    heads: list[bytes | None] = field(default_factory=list)
    checksums: list[int] = field(default_factory=list)
    last: int = 0

    def tables(self) -> Tables:
        """Read the file."""
        with open_demuxer(self.file, self.container) as source:
            stream = video_stream(source)
            context = stream.codec_context
            name = context.codec.canonical_name
            codec = _CODECS.get(name)
            if codec is None:
                raise SourceError(f"no fastvid decoder supports {name}", reason=Reason.NO_INDEX, hint=ENCODE_HINT)
            _check_limits(context.width, context.height, 0, self.limits)
            extradata = bytes(context.extradata or b"")
            kept = self.limits.memory_bytes if codec in WHOLE_PACKETS else _KEPT_HEAD
            fields = FieldPairs(codec.label, extradata)
            try:
                for packet in source.demux(stream):
                    if packet.size:
                        self._take(packet, fields, kept)
            except MemoryError as error:
                raise SourceError("reading the file exceeds the memory limit", reason=Reason.MEMORY) from error
            except av.FFmpegError as error:
                message = f"reading failed after {len(self.sizes)} packets: {ffmpeg_message(error)}"
                raise SourceError(message, reason=Reason.DAMAGED) from error
            time_base = fraction(stream.time_base) or Fraction(1, 1000)
            nominal = fraction(stream.average_rate) or fraction(stream.guessed_rate) or Fraction(25)
        if not any(self.shown):
            raise SourceError(f"none of the {len(self.sizes)} packets shows a frame", reason=Reason.NO_FRAMES)
        pts, shown = np.asarray(self.pts, np.int64), np.asarray(self.shown, np.bool_)
        rate = nominal.limit_denominator(100_000)
        if time_base.numerator == 1:
            measured = _rate(pts, shown, time_base.denominator, self.last or 1)
            # Containers round times to their clock, so the nominal rate is kept if it explains the times.
            rate = measured if abs(measured - rate) * 1000 > measured else rate
        return Tables(
            container=self.container,
            codec=codec,
            extradata=extradata,
            rate=rate,
            time_base=time_base,
            offsets=np.asarray(self.offsets, np.int64),
            sizes=np.asarray(self.sizes, np.int64),
            pts=pts,
            shown=shown,
            sync=np.asarray(self.sync, np.bool_),
            heads=self.heads,
            checksums=np.asarray(self.checksums, np.uint32),
            notes=("edit-list",) if not shown.all() else (),
        )

    def _take(self, packet: Any, fields: FieldPairs, kept: int) -> None:
        number = len(self.sizes)
        if packet.is_corrupt:
            raise SourceError(f"packet {number} is truncated", reason=Reason.TRUNCATED)
        if number >= self.limits.max_frames:
            raise SourceError(f"file has more than {self.limits.max_frames} frames", reason=Reason.TOO_LONG)
        if packet.pts is None:
            raise SourceError(f"packet {number} has no time", reason=Reason.NO_INDEX, hint=ENCODE_HINT)
        data = bytes(packet)
        if fields.completes(memoryview(data)) and number:
            raise SourceError("its frames are pairs of fields", reason=Reason.NO_INDEX, hint=ENCODE_HINT)
        end = self.offsets[-1] + self.sizes[-1] if number else 0
        start = end if packet.pos is None or packet.pos < 0 else packet.pos
        at = self.file.part(start, _HEADER_WINDOW + len(data)).find(data)
        if at < 0:
            raise SourceError(
                f"packet {number} is not contiguous at byte {start} of the file",
                reason=Reason.NO_INDEX,
                hint=ENCODE_HINT,
            )
        self.offsets.append(start + at)
        self.sizes.append(len(data))
        self.pts.append(packet.pts)
        self.shown.append(not packet.is_discard)
        self.sync.append(packet.is_keyframe)
        self.heads.append(data[:kept])
        self.checksums.append(zlib.crc32(data))
        self.last = packet.duration or self.last


def with_heads(tables: Tables, heads: Sequence[bytes | None]) -> Tables:
    """Return tables whose packets were read as far as `heads`; with checksums if that is all of each."""
    whole = all(head is not None and len(head) == size for head, size in zip(heads, tables.sizes.tolist(), strict=True))
    checksums = np.asarray([zlib.crc32(head or b"") for head in heads], np.uint32) if whole else None
    return replace(tables, heads=heads, checksums=checksums)


def _check_limits(width: int, height: int, packets: int, limits: Limits) -> None:
    if width * height > limits.max_pixels:
        raise SourceError(
            f"frames have {width}x{height} pixels, at most {limits.max_pixels} are allowed", reason=Reason.TOO_LARGE
        )
    if packets > limits.max_frames:
        raise SourceError(f"file has more than {limits.max_frames} frames", reason=Reason.TOO_LONG)


def _rate(pts: IntArray, shown: BoolArray, ticks: int, last: int) -> Fraction:
    return frame_rate(np.sort(pts[shown]), ticks, last=last)


def _last_step(dts: IntArray) -> int:
    """Return the usual duration of a packet in ticks, which stands for that of the last one."""
    return int(np.median(np.diff(dts))) if len(dts) > 1 else 1
