"""Read the position and time of each packet from the sample tables of an MP4 or M4A.

Supports the plain files that muxers write by default (ISO/IEC 14496-12): one `moov`, no fragments. Fragmented files are
rejected; tars of other tools are indexed by a full demuxer instead.

The sound of a sample is an M4A in the tar. `.pkt` has no rows for its packets, because the M4A's own tables describe
them. `.pkt` has the M4A's position and the checksum of each of its blocks, so that a reader can check what it reads of
the tables and of the packets.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

import numpy as np

from fastvid.errors import FormatError
from fastvid.format.bitstream import can_plan, packet_flags
from fastvid.format.packets import StreamInfo, packet_records
from fastvid.format.presentation import Times, usual_step
from fastvid.format.schema import Codec, Matrix, PacketFlag, Range, StreamFlag, matrix_of
from fastvid.runtime.arrays import BoolArray, IntArray, RecordArray

Read = Callable[[int, int], bytes | memoryview]
"""Returns bytes of a file by offset and size; fewer at its end."""

_MOST_MOOV: Final = 1 << 30
_CODECS: Final = {
    b"avc1": Codec.H264,
    b"avc3": Codec.H264,
    b"hvc1": Codec.HEVC,
    b"hev1": Codec.HEVC,
    b"vp08": Codec.VP8,
    b"vp09": Codec.VP9,
    b"av01": Codec.AV1,
    b"mp4v": Codec.MPEG4,
}
_EXTRADATA_BOXES: Final = (b"avcC", b"hvcC", b"av1C")
# Bytes of fixed fields before the boxes of a VisualSampleEntry (ISO/IEC 14496-12, 12.1.3).
_VISUAL_ENTRY: Final = 78
# Object type of JPEG in an elementary stream descriptor (MP4 registration authority).
_ESDS_JPEG: Final = 0x6C
# Descriptor tags of ISO/IEC 14496-1 table 1, and the bytes of fields before nested descriptors.
DECODER_CONFIG: Final = 0x04
DECODER_SPECIFIC: Final = 0x05
_DESCRIPTOR_FIELDS: Final = {0x03: 3, DECODER_CONFIG: 13}


@dataclass(frozen=True, slots=True)
class Track:
    """A video track's description and packets, in decode order."""

    codec: Codec
    width: int  # coded width in pixels
    height: int  # coded height in pixels
    extradata: bytes
    range: Range
    matrix: Matrix
    timescale: int  # ticks per second
    offsets: IntArray  # first byte of each packet in the file, int64 [P]
    sizes: IntArray  # size of each packet in bytes, int64 [P]
    last: int  # duration of the last packet, in ticks
    pts: IntArray  # presentation time in ticks, with the edit list applied, int64 [P]
    shown: BoolArray  # whether the edit list shows the packet's frame, bool [P]
    sync: BoolArray  # whether the tables call the packet a sync sample, where decoding may start, bool [P]
    disposable: BoolArray  # whether the tables say that no other packet depends on it, bool [P]


def index_mp4(
    data: memoryview | bytes, *, conforms: bool = False, whole: bool = False, fps: Fraction | None = None
) -> tuple[StreamInfo, RecordArray]:
    """Index the packets of an MP4's video track.

    `conforms`, `whole`: whether to set these flags of `StreamFlag`. `fps`: the exact frames per second if they are
    known; the mean over rounded container ticks only approximates them. Returns the stream, and its PACKET_DTYPE
    records [P] in decode order. Frames are the shown packets, numbered in display order.
    """
    view = memoryview(data)
    track = read_track(view)
    packets = [view[o : o + s] for o, s in zip(track.offsets.tolist(), track.sizes.tolist(), strict=True)]
    known = can_plan(track.codec)
    flags = np.zeros(len(packets), np.uint32)
    if known:
        try:
            flags = packet_flags(track.codec, track.extradata, packets)
        except FormatError:
            if not whole:
                raise
            known = False
    flags[~track.shown] |= np.uint32(PacketFlag.HIDDEN)
    whole = whole or not known or not flags[0] & PacketFlag.KEY
    flags[0] |= np.uint32(PacketFlag.KEY)
    shown = np.flatnonzero((flags & PacketFlag.HIDDEN) == 0)
    if not len(shown):
        raise FormatError("video track shows no frame")
    order = shown[np.argsort(track.pts[shown], kind="stable")]
    pts = track.pts[order]
    if (np.diff(pts) <= 0).any():
        raise FormatError("two packets have the same presentation time")
    frames = np.full(len(packets), -1, dtype=np.int64)
    frames[order] = np.arange(len(order))
    records = packet_records(
        track.offsets, track.sizes, np.asarray([zlib.crc32(p) for p in packets], np.uint32), frames, flags
    )
    fps, tick = fps or frame_rate(pts, track.timescale, last=track.last), Fraction(1, track.timescale)
    info = StreamInfo(
        codec=track.codec,
        width=track.width,
        height=track.height,
        num_frames=len(shown),
        fps=fps,
        extradata=track.extradata,
        range=track.range,
        matrix=track.matrix,
        flags=(StreamFlag.CONFORMS if conforms else StreamFlag.NONE) | (StreamFlag.WHOLE if whole else StreamFlag.NONE),
        times=None if conforms else Times.of(pts, tick, fps),
    )
    return info, records


def frame_rate(pts: IntArray, timescale: int, *, last: int) -> Fraction:
    """Return the mean frames per second of sorted times; `last` is the last frame's duration in ticks.

    Muxers, which know no frame after the last, may write too short a duration for it: the usual step is the minimum.
    """
    usual = usual_step(np.diff(pts), 0)
    ticks = int(pts[-1] - pts[0]) + max(last, usual) if len(pts) else 0
    if ticks <= 0:
        return Fraction(25)
    return (Fraction(len(pts)) * timescale / ticks).limit_denominator(100_000)


def read_track(view: memoryview) -> Track:
    """Read the first video track of an MP4."""
    return read_moov(_moov_in(view), len(view))


def read_moov(moov: memoryview, file_size: int) -> Track:
    """Read the first video track of an MP4 of `file_size` bytes from the body of its ``moov`` box."""
    if any(name == b"mvex" for name, _ in boxes(moov)):
        raise FormatError("MP4 is fragmented")
    trak, mdia, movie_scale = _find_track(moov, b"vide", "video")
    timescale = _timescale(find_box(mdia, b"mdhd", "mdia"))
    if not timescale:
        raise FormatError("video track has no time scale")
    tables, entry_name, entry = _sample_tables(mdia)
    codec = _CODECS.get(entry_name)
    if codec is None:
        raise FormatError(f"unknown codec {entry_name!r}")
    inner = dict(boxes(entry[_VISUAL_ENTRY:]))
    if codec is Codec.MPEG4 and descriptor(inner.get(b"esds"), DECODER_CONFIG)[:1] == bytes([_ESDS_JPEG]):
        codec = Codec.MJPEG
    colour_range, matrix = _colour(codec, inner)

    offsets, sizes = _packets(tables, file_size)
    count = len(sizes)
    dts = decode_times(tables[b"stts"], count)
    pts = dts + _composition_offsets(tables.get(b"ctts"), count)
    _, start, length = _edits(trak)
    shown = pts >= start
    if length and movie_scale:
        # Converted to media ticks and rounded to the nearest, as FFmpeg does.
        shown &= pts < start + (length * timescale * 2 + movie_scale) // (2 * movie_scale)
    return Track(
        codec=codec,
        width=_u16(entry, 24),
        height=_u16(entry, 26),
        extradata=_decoder_setup(codec, inner),
        range=colour_range,
        matrix=matrix,
        timescale=timescale,
        offsets=offsets,
        sizes=sizes,
        last=_last_duration(tables[b"stts"], timescale),
        pts=pts - start,
        shown=shown,
        sync=_sync_samples(tables.get(b"stss"), count),
        disposable=_disposable_samples(tables.get(b"sdtp"), count),
    )


@dataclass(frozen=True, slots=True)
class Declared:
    """How a container says that decoded pictures are to be shown; None or 0 where it does not say."""

    matrix: bytes | None = None  # display matrix as FFmpeg returns it: nine 32-bit numbers, little-endian
    pixel: tuple[int, int] = (0, 0)  # width and height of a pixel, of which only the ratio counts
    display: tuple[int, int] = (0, 0)  # width and height at which to show the whole picture, before it is turned
    aperture: tuple[Fraction, Fraction, Fraction, Fraction] | None = None  # height, width, and offsets of the centre
    margins: tuple[int, int, int, int] = (0, 0, 0, 0)  # pixels cut off at the top, left, bottom and right
    # ISO/IEC 23091-2 codes of primaries, transfer and matrix, and FFmpeg's code of the range; used if the stream itself
    # does not state them
    colours: tuple[int, int, int, int] | None = None

    def aspect(self, height: int, width: int) -> Fraction | None:
        """Return the width of a pixel divided by its height; None if it is not declared.

        `height`, `width`: of the decoded pictures.
        """
        if all(self.pixel):
            return Fraction(*self.pixel)
        if self.display in ((0, 0), (width, height)):
            return None
        if self.aperture is not None:
            height, width = self.crop(height, width)[2:]
        return Fraction(self.display[0] * height, self.display[1] * width)

    def crop(self, height: int, width: int) -> tuple[int, int, int, int]:
        """Return the shown part of pictures: first row, first column, height, width. The whole if it is impossible."""
        top, left, bottom, right = self.margins
        crop = (top, left, height - top - bottom, width - left - right)
        if self.aperture is not None:
            rows, columns, down, along = self.aperture
            crop = (
                round((height - rows) / 2 + down),
                round((width - columns) / 2 + along),
                round(rows),
                round(columns),
            )
        y, x, h, w = crop
        inside = min(h, w) >= 2 and min(y, x) >= 0 and y + h <= height and x + w <= width
        return crop if inside else (0, 0, height, width)


_UNITY: Final = struct.pack("<9i", 1 << 16, 0, 0, 0, 1 << 16, 0, 0, 0, 1 << 30)


def declared_by_mp4(moov: memoryview) -> Declared:
    """Return how the first video track of an MP4 is to be shown, by ``tkhd``, ``pasp`` and ``clap``.

    Source:
        ISO/IEC 14496-12, 8.3.2 and 12.1.4.
    """
    trak, mdia, _ = _find_track(moov, b"vide", "video")
    tkhd = find_box(trak, b"tkhd", "trak")
    at = 40 if bytes(tkhd[:1]) == b"\0" else 52
    if len(tkhd) < at + 44:
        raise FormatError("MP4 track header ends too early")
    matrix = struct.pack("<9i", *struct.unpack_from(">9i", tkhd, at))
    width, height = struct.unpack_from(">II", tkhd, at + 36)
    _, _, entry = _sample_tables(mdia)
    inner = dict(boxes(entry[_VISUAL_ENTRY:]))
    pasp, clap = inner.get(b"pasp", memoryview(b"")), inner.get(b"clap", memoryview(b""))
    aperture = None
    if len(clap) >= 32:
        numbers = struct.unpack(">4I", clap[:16]), struct.unpack(">iIiI", clap[16:32])
        if all((*numbers[0][1::2], *numbers[1][1::2])):
            (wn, wd, hn, hd), (xn, xd, yn, yd) = numbers
            aperture = Fraction(hn, hd), Fraction(wn, wd), Fraction(yn, yd), Fraction(xn, xd)
    return Declared(
        matrix=None if matrix == _UNITY else matrix,
        pixel=struct.unpack(">II", pasp[:8]) if len(pasp) >= 8 else (0, 0),
        display=(width >> 16, height >> 16) if width >> 16 and height >> 16 else (0, 0),
        aperture=aperture,
        colours=_colour_codes(inner),
    )


def _colour_codes(inner: dict[bytes, memoryview]) -> tuple[int, int, int, int] | None:
    """Return the codes of colours in ``colr`` or ``vpcC``, see `Declared.colours`; None without them."""
    colr, vpcc = inner.get(b"colr", memoryview(b"")), inner.get(b"vpcC", memoryview(b""))
    if bytes(colr[:4]) in (b"nclx", b"nclc") and len(colr) >= 10:
        full = 1 + (colr[10] >> 7) if bytes(colr[:4]) == b"nclx" and len(colr) >= 11 else 0
        return _u16(colr, 4), _u16(colr, 6), _u16(colr, 8), full
    return (vpcc[7], vpcc[8], vpcc[9], 1 + (vpcc[6] & 1)) if len(vpcc) >= 10 else None


def packet_places(moov: memoryview, file_size: int) -> tuple[IntArray, IntArray]:
    """Return the first byte and the size of each packet of the first video track, int64 [P], all inside the file."""
    return _packets(_sample_tables(_find_track(moov, b"vide", "video")[1])[0], file_size)


def _find_track(moov: memoryview, handler: bytes, kind: str) -> tuple[memoryview, memoryview, int]:
    """Return the first track of a kind, its ``mdia`` box, and the movie's ticks per second."""
    movie_scale = _timescale(find_box(moov, b"mvhd", "moov"))
    for name, trak in boxes(moov):
        if name == b"trak":
            mdia = find_box(trak, b"mdia", "trak")
            if bytes(find_box(mdia, b"hdlr", "mdia")[8:12]) == handler:
                return trak, mdia, movie_scale
    raise FormatError(f"MP4 has no {kind} track")


def _timescale(header: memoryview) -> int:
    """Return the ticks per second of an ``mvhd`` or ``mdhd`` box; in its version 1 longer fields precede them."""
    return _u32(header, 12 if bytes(header[:1]) == b"\0" else 20)


def _sample_tables(mdia: memoryview) -> tuple[dict[bytes, memoryview], bytes, memoryview]:
    """Return the sample tables of a track by name, and the name and body of its first sample entry."""
    tables = dict(boxes(find_box(find_box(mdia, b"minf", "mdia"), b"stbl", "minf")))
    for required in (b"stsd", b"stts", b"stsc", b"stsz"):
        if required not in tables:
            raise FormatError(f"MP4 has no {required.decode()} table")
    return tables, *next(iter(boxes(tables[b"stsd"][8:])), (b"", memoryview(b"")))


def _packets(tables: dict[bytes, memoryview], file_size: int) -> tuple[IntArray, IntArray]:
    """Return the first byte in the file and the size in bytes of each packet, both int64 [P]."""
    sizes = _packet_sizes(tables[b"stsz"], file_size)
    offsets = _packet_offsets(tables, sizes)
    if len(sizes) and (offsets.min() < 0 or int((offsets + sizes).max()) > file_size):
        raise FormatError("MP4 sample table points outside the file")
    return offsets, sizes


def box_places(read: Read, size: int) -> Iterator[tuple[bytes, int, int, int]]:
    """Yield name, offset, header size and size in bytes of each box of an MP4; the last may exceed the file.

    `size`: of the file in bytes, or of the body of a box, whose bytes `read` returns.
    """
    position = 0
    while position + 8 <= size:
        head = read(position, 16)
        length, name, header = int.from_bytes(head[:4], "big"), bytes(head[4:8]), 8
        if length == 1:  # a 64-bit size follows (ISO/IEC 14496-12, 4.2)
            length, header = int.from_bytes(head[8:16], "big"), 16
        elif length == 0:
            length = size - position
        if length < header:
            raise FormatError(f"MP4 box {name!r} of {length} bytes is shorter than its header")
        yield name, position, header, length
        position += length


def find_moov(read: Read, size: int) -> memoryview:
    """Return the body of the ``moov`` box of an MP4 or M4A of `size` bytes."""
    for name, position, header, length in box_places(read, size):
        if position + length > size:
            raise FormatError(f"MP4 box {name!r} of {length} bytes exceeds the file")
        if name == b"moov":
            if length > _MOST_MOOV:
                raise FormatError(f"MP4 has tables of {length} bytes")
            return memoryview(read(position + header, length - header))
    raise FormatError("MP4 has no moov box")


def boxes(view: memoryview) -> Iterator[tuple[bytes, memoryview]]:
    """Yield the name and body of each box inside a container box."""
    for name, position, header, size in box_places(lambda at, count: view[at : at + count], len(view)):
        if position + size > len(view):
            raise FormatError(f"MP4 box {name!r} of {size} bytes exceeds its parent")
        yield name, view[position + header : position + size]


def _moov_in(view: memoryview) -> memoryview:
    """Return the body of the ``moov`` box of a file in memory."""
    return find_moov(lambda at, count: view[at : at + count], len(view))


def find_box(view: memoryview, wanted: bytes, parent: str) -> memoryview:
    """Return the body of the first box with a name."""
    for name, body in boxes(view):
        if name == wanted:
            return body
    raise FormatError(f"MP4 has no {wanted.decode()} box in {parent}")


def _u16(view: memoryview, position: int) -> int:
    return int.from_bytes(view[position : position + 2], "big")


def _u32(view: memoryview, position: int) -> int:
    if position + 4 > len(view):
        raise FormatError("MP4 box ends too early")
    return int.from_bytes(view[position : position + 4], "big")


def _table(view: memoryview, position: int, count: int, columns: int, dtype: str = ">u4") -> IntArray:
    width = np.dtype(dtype).itemsize
    if position + count * columns * width > len(view):
        raise FormatError(f"MP4 table of {count} entries is longer than its box")
    table = np.frombuffer(view, dtype=dtype, count=count * columns, offset=position)
    return table.astype(np.int64).reshape(count, columns)


def _packet_sizes(stsz: memoryview, file_size: int) -> IntArray:
    """Return the size of each packet in bytes, int64 [P]."""
    fixed, count = _u32(stsz, 4), _u32(stsz, 8)
    if fixed:
        if fixed * count > file_size:
            raise FormatError(f"MP4 claims {count} packets of {fixed} bytes")
        return np.full(count, fixed, dtype=np.int64)
    return _table(stsz, 12, count, 1)[:, 0]


def _packet_offsets(tables: dict[bytes, memoryview], sizes: IntArray) -> IntArray:
    """Return the first byte of each packet in the file, int64 [P]."""
    if b"stco" in tables:
        chunks = _table(tables[b"stco"], 8, _u32(tables[b"stco"], 4), 1)[:, 0]
    elif b"co64" in tables:
        chunks = _table(tables[b"co64"], 8, _u32(tables[b"co64"], 4), 1, ">i8")[:, 0]
    else:
        raise FormatError("MP4 has no stco table")
    runs = _table(tables[b"stsc"], 8, _u32(tables[b"stsc"], 4), 3)
    if (np.diff(runs[:, 0]) < 0).any():
        raise FormatError("MP4 runs of chunks do not ascend")
    offsets = np.zeros(len(sizes), dtype=np.int64)
    done = 0
    for number, (first, per_chunk, _) in enumerate(runs.tolist()):
        last = runs[number + 1, 0] - 1 if number + 1 < len(runs) else len(chunks)
        for chunk in range(first - 1, last):
            if done >= len(sizes):
                break
            if not 0 <= chunk < len(chunks):
                raise FormatError(f"MP4 has no chunk {chunk}")
            stop = min(done + per_chunk, len(sizes))
            ends = np.cumsum(sizes[done:stop])
            offsets[done:stop] = chunks[chunk] + ends - sizes[done:stop]
            done = stop
    if done < len(sizes):
        raise FormatError(f"MP4 chunks contain {done} of {len(sizes)} packets")
    return offsets


def decode_times(stts: memoryview, count: int) -> IntArray:
    """Return the decode time of each packet in ticks, int64 [count]."""
    runs = _table(stts, 8, _u32(stts, 4), 2)
    if runs[:, 0].sum() < count or runs[:, 0].max(initial=0) > 2**31:
        raise FormatError(f"MP4 has decode times for {int(runs[:, 0].sum())} of {count} packets")
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(_expanded(runs, count))])[:count]


def _expanded(runs: IntArray, count: int) -> IntArray:
    """Return the values of the first `count` samples, or of fewer; of each run are given its samples and its value."""
    ends = np.minimum(np.cumsum(np.clip(runs[:, 0], 0, count)), count)
    return np.repeat(runs[:, 1], np.diff(ends, prepend=0))


def _composition_offsets(ctts: memoryview | None, count: int) -> IntArray:
    if ctts is None:
        return np.zeros(count, dtype=np.int64)
    # Version 1 is signed. In version 0, huge values are negative ones too: FFmpeg reads them so.
    runs = _table(ctts, 8, _u32(ctts, 4), 2, ">i4")
    offsets = _expanded(runs, count)
    return np.concatenate([offsets, np.zeros(count - len(offsets), np.int64)])


def _disposable_samples(sdtp: memoryview | None, count: int) -> BoolArray:
    """Return which packets no other depends on, bool [count] (14496-12, 8.6.4); none without a complete table."""
    if sdtp is None or len(sdtp) < 4 + count:
        return np.zeros(count, dtype=np.bool_)
    disposable: BoolArray = np.frombuffer(sdtp, np.uint8, count, 4) >> 2 & 3 == 2  # sample_is_depended_on
    return disposable


def _sync_samples(stss: memoryview | None, count: int) -> BoolArray:
    if stss is None:
        return np.ones(count, dtype=np.bool_)
    numbers = _table(stss, 8, _u32(stss, 4), 1)[:, 0] - 1
    if len(numbers) and not 0 <= numbers.min() <= numbers.max() < count:
        raise FormatError(f"MP4 has no sync sample {int(numbers.max()) + 1} among {count} samples")
    return np.isin(np.arange(count), numbers)


def _edits(trak: memoryview) -> tuple[int, int, int]:
    """Return the delay before the track in movie ticks, its first media tick, and its length in movie ticks.

    A length of 0 means the whole track.
    """
    edits = next((body for name, body in boxes(trak) if name == b"edts"), None)
    if edits is None:
        return 0, 0, 0
    table = find_box(edits, b"elst", "edts")
    width, delay, heard = 8 if len(table) and table[0] == 1 else 4, 0, list[tuple[int, int]]()
    for number in range(_u32(table, 4)):
        at = 8 + number * (2 * width + 4)
        if at + 2 * width > len(table):
            raise FormatError("MP4 edit list ends too early")
        length = int.from_bytes(table[at : at + width], "big")
        start = int.from_bytes(table[at + width : at + 2 * width], "big", signed=True)
        if start >= 0:
            heard.append((start, length))
        elif not heard:
            delay += length
    if len(heard) > 1:
        raise FormatError(f"MP4 edit list has {len(heard)} segments, more than 1 is not supported")
    return (delay, *(heard[0] if heard else (0, 0)))


def _colour(codec: Codec, inner: dict[bytes, memoryview]) -> tuple[Range, Matrix]:
    codes = _colour_codes(inner)
    if codes is None or not codes[3]:
        return (Range.FULL if codec is Codec.MJPEG else Range.UNKNOWN), Matrix.UNKNOWN
    return Range(codes[3]), matrix_of(codes[2])


def descriptor(esds: memoryview | None, tag: int) -> bytes:
    """Return the body of a descriptor in an `esds` box (ISO/IEC 14496-1, 7.2.6); empty if it is missing."""
    data, position = b"" if esds is None else bytes(esds[4:]), 0
    while position + 2 <= len(data):
        found, size, position = data[position], 0, position + 1
        more = True
        while more and position < len(data):
            more, size = bool(data[position] & 0x80), size << 7 | data[position] & 0x7F
            position += 1
        if found == tag:
            return data[position : position + size]
        # Descriptors in _DESCRIPTOR_FIELDS contain others after their own fields; skip all others entirely.
        position += _DESCRIPTOR_FIELDS.get(found, size)
    return b""


def _decoder_setup(codec: Codec, inner: dict[bytes, memoryview]) -> bytes:
    """Return the decoder's configuration record; empty if there is none."""
    if codec is Codec.MPEG4:
        return descriptor(inner.get(b"esds"), DECODER_SPECIFIC)
    return next((bytes(inner[name]) for name in _EXTRADATA_BOXES if name in inner), b"")


def _last_duration(stts: memoryview, timescale: int) -> int:
    """Return the duration of the last packet in ticks; 1/25 s if the table has none."""
    runs = _table(stts, 8, _u32(stts, 4), 2)
    return (int(runs[-1, 1]) if len(runs) else 0) or max(1, timescale // 25)


# Bytes of fixed fields before the boxes of an AudioSampleEntry (ISO/IEC 14496-12, 12.2.3).
_AUDIO_ENTRY: Final = 28
_AUDIO_CODECS: Final = {b"mp4a": "aac", b"alac": "alac"}
_OBJECT_AAC: Final = 0x40  # MP4 registration authority
_MOST_SAMPLES: Final = 2**53  # exact as float64, and 6,000 years at 48 kHz


@dataclass(frozen=True, slots=True)
class AudioInfo:
    """The description of a sample's audio track, as in its facts."""

    codec: str
    sample_rate: int  # samples per second and channel
    channels: int
    num_samples: int  # samples per channel in all packets, including those before the start (encoder delay)
    num_packets: int
    extradata: bytes


@dataclass(frozen=True, slots=True, eq=False)
class AudioTrack:
    """The packets of an M4A's audio track, and which part of its sound is played."""

    info: AudioInfo
    offsets: IntArray  # first byte of each packet in the file, int64 [P]
    sizes: IntArray  # size of each packet in bytes, int64 [P]
    times: IntArray  # start of each packet and end of the last one, in samples of `info.sample_rate`, int64 [P + 1]
    start: int  # first sample that is played
    stop: int  # one past the last sample that is played
    delay: Fraction  # seconds from the first frame of the video to the sample `start`


def index_m4a(data: memoryview | bytes) -> AudioInfo:
    """Read the description of an M4A's audio track."""
    return read_sound_track(_moov_in(memoryview(data)), len(data)).info


def read_sound_track(moov: memoryview, file_size: int) -> AudioTrack:
    """Read the first audio track of an M4A from its ``moov``; `file_size`: bytes of the file."""
    trak, mdia, movie_scale = _find_track(moov, b"soun", "audio")
    rate = _timescale(find_box(mdia, b"mdhd", "mdia"))
    tables, name, entry = _sample_tables(mdia)
    codec = _AUDIO_CODECS.get(name)
    if codec is None or not rate or len(entry) < _AUDIO_ENTRY:
        raise FormatError(f"M4A has audio codec {name!r} at {rate} Hz; supported are mp4a (AAC) and alac")
    stts = tables[b"stts"]
    total = sum(count * step for count, step in _table(stts, 8, _u32(stts, 4), 2).tolist())
    if total >= _MOST_SAMPLES:
        raise FormatError(f"M4A claims {total} audio samples")
    offsets, sizes = _packets(tables, file_size)
    info = AudioInfo(
        codec=codec,
        sample_rate=rate,
        channels=int.from_bytes(entry[16:18], "big"),
        num_samples=total,
        num_packets=len(sizes),
        extradata=_extradata(codec, dict(boxes(entry[_AUDIO_ENTRY:]))),
    )
    times = np.append(decode_times(stts, len(sizes)), info.num_samples).astype(np.int64)
    delay, start, length = _edits(trak)
    stop = info.num_samples
    if length and movie_scale:
        stop = min(stop, start + -(-length * rate // movie_scale))
    return AudioTrack(info, offsets, sizes, times, start, stop, Fraction(delay, movie_scale or 1))


def _extradata(codec: str, inner: dict[bytes, memoryview]) -> bytes:
    if codec != "aac":
        return bytes(inner.get(b"alac", b""))
    if descriptor(inner.get(b"esds"), DECODER_CONFIG)[:1] != bytes([_OBJECT_AAC]):
        raise FormatError("elementary stream of the M4A is not AAC")
    return descriptor(inner.get(b"esds"), DECODER_SPECIFIC)
