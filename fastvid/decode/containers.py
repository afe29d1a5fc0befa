"""Give a clip's packets to decoders that require a container, or an elementary stream.

For a container, the packets are wrapped in a minimal MP4 with one video track and one chunk: ``ftyp``, ``moov``,
``mdat`` (ISO/IEC 14496-12 and 14496-15). Packets are in decode order; the frame with the n-th lowest index among those
given is shown n-th, at n frame times.

Some reader fails if one of the following is missing: unique presentation times from 0 (DALI omits earlier frames from
its index), signed composition offsets (version 1, no edit list), every key packet in ``stss``
(otherwise seeks go wrong), and the true size in ``stsd`` (otherwise DALI decodes frames to find it).

For an elementary stream, H.264 and HEVC packets are rewritten with start codes (Annex B). MP4 stores parameter sets
once, outside the packets, and a length before each NAL unit (ISO/IEC 14496-15). An elementary stream repeats the
parameter sets at every packet where decoding may start, and has a start code before each NAL unit (ITU-T H.264 and
H.265, annex B).
"""

from __future__ import annotations

import struct
from collections.abc import Set
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt

from fastvid.decode.request import EncodedClip
from fastvid.errors import DecodeError, FormatError
from fastvid.format.bitstream import nal_length_size, nal_units, parameter_sets
from fastvid.format.headers import declared_size
from fastvid.format.packets import StreamInfo
from fastvid.format.schema import Codec, Matrix, Range
from fastvid.runtime.arrays import BoolArray, IntArray, UInt8Array

# Sample entry and configuration box of each codec (14496-15; VP codecs: "VP Codec ISO Media File Format Binding").
_ENTRIES: Final = {
    Codec.H264: (b"avc1", b"avcC"),
    Codec.HEVC: (b"hvc1", b"hvcC"),
    Codec.VP9: (b"vp09", b"vpcC"),
    Codec.AV1: (b"av01", b"av1C"),
    Codec.MJPEG: (b"mp4v", b"esds"),
}
_ESDS_JPEG: Final = 0x6C  # object type of the MP4 registration authority


def minimal_mp4(
    info: StreamInfo,
    data: memoryview | bytes,
    starts: IntArray,
    sizes: IntArray,
    shows: IntArray,
    keys: BoolArray,
) -> bytes:
    """Return the bytes of an MP4 of the given packets.

    `data`: the packets' bytes. `starts`: first byte of each packet in `data`, int64 [P], P > 0. `sizes`: size of
    each packet in bytes, int64 [P]. `shows`: index of the frame that each packet shows, int64 [P], in decode order.
    `keys`: whether each packet is a key packet, bool [P].
    """
    count = len(shows)
    order = np.argsort(shows, kind="stable")
    if shows[order[0]] < 0:
        raise FormatError("minimal MP4 cannot contain packets that show no frame")
    if (np.diff(shows[order]) == 0).any():
        raise FormatError(f"two packets show frame {int(shows[order][np.argmin(np.diff(shows[order]))])}")
    ranks = np.empty(count, dtype=np.int64)
    ranks[order] = np.arange(count)
    scale, delta = info.fps.numerator, info.fps.denominator
    ftyp, stsd, size = _constant(info)

    tables = [stsd, _full(b"stts", struct.pack(">III", 1, count, delta))]
    offsets = (ranks - np.arange(count)) * delta
    if offsets.any():
        pairs = np.ones((count, 2), dtype=">i4")
        pairs[:, 1] = offsets
        tables.append(_full(b"ctts", struct.pack(">I", count) + pairs.tobytes(), version=1))
    if not keys.all():
        numbers = (np.flatnonzero(keys) + 1).astype(">u4")
        tables.append(_full(b"stss", struct.pack(">I", len(numbers)) + numbers.tobytes()))
    tables.append(_full(b"stsc", struct.pack(">IIII", 1, 1, count, 1)))
    tables.append(_full(b"stsz", struct.pack(">II", 0, count) + sizes.astype(">u4").tobytes()))
    tables.append(_full(b"stco", struct.pack(">II", 1, 0)))

    times = struct.pack(">II", scale, count * delta)
    mdhd = _full(b"mdhd", bytes(8), times, struct.pack(">HH", _LANGUAGE, 0))
    tkhd = _full(b"tkhd", bytes(8), struct.pack(">III", 1, 0, count * delta), bytes(16), _MATRIX, size, flags=3)
    media = _box(b"mdia", mdhd, _HDLR, _box(b"minf", _VMHD, _DINF, _box(b"stbl", *tables)))
    moov = _box(b"moov", _full(b"mvhd", bytes(8), times, _MVHD_REST), _box(b"trak", tkhd, media))
    view = memoryview(data)
    return b"".join(
        (
            ftyp,
            # The last field of moov is the chunk's offset: the chunk starts after the 8-byte header of mdat.
            moov[:-4],
            struct.pack(">I", len(ftyp) + len(moov) + 8),
            struct.pack(">I4s", 8 + int(sizes.sum()), b"mdat"),
            *(view[start : start + size] for start, size in zip(starts.tolist(), sizes.tolist(), strict=True)),
        )
    )


def _box(name: bytes, *parts: bytes) -> bytes:
    body = b"".join(parts)
    return struct.pack(">I4s", 8 + len(body), name) + body


def _full(name: bytes, *parts: bytes, version: int = 0, flags: int = 0) -> bytes:
    return _box(name, struct.pack(">I", version << 24 | flags), *parts)


@lru_cache(maxsize=256)
def _constant(info: StreamInfo) -> tuple[bytes, bytes, bytes]:
    """Return the parts that depend only on the stream: ftyp, stsd and the size fields of tkhd."""
    if info.codec not in _ENTRIES:
        raise FormatError(f"minimal MP4 cannot contain {info.codec.label}")
    entry, configuration = _ENTRIES[info.codec]
    if info.codec is Codec.VP9:
        config = _full(configuration, _vpcc(info), version=1)
    elif info.codec is Codec.MJPEG:
        config = _full(configuration, _esds())
    else:
        # The first byte is the version; in AV1 a marker bit precedes it.
        if info.extradata[:1] != (b"\x81" if info.codec is Codec.AV1 else b"\x01"):
            raise FormatError(f"extradata of {info.codec.label} is not a {configuration.decode()} record")
        config = _box(configuration, info.extradata)
    # The fields of a visual sample entry (14496-12, 12.1.3), in order: reserved and data reference 1; pre-defined and
    # reserved; width and height; 72 dpi twice; reserved; one frame per sample; no name; depth 24; pre-defined.
    visual = (
        struct.pack(">6xH16xHHIIIH", 1, info.width, info.height, 0x480000, 0x480000, 0, 1)
        + bytes(32)
        + struct.pack(">Hh", 24, -1)
    )
    colour = _box(b"colr", b"nclx", struct.pack(">HHHB", *_colour(info), (info.range is Range.FULL) << 7))
    stsd = _full(b"stsd", struct.pack(">I", 1), _box(entry, visual, config, colour))
    ftyp = _box(b"ftyp", b"isom", struct.pack(">I", 0x200), b"isomiso2mp41")
    return ftyp, stsd, struct.pack(">II", info.width << 16, info.height << 16)


def _colour(info: StreamInfo) -> tuple[int, int, int]:
    """Return H.273 primaries, transfer and matrix. No reader uses the first two, so they are set like the matrix."""
    known = info.matrix if info.matrix in (Matrix.BT709, Matrix.SMPTE170M, Matrix.SMPTE240M) else Matrix.UNKNOWN
    return int(known), int(known), int(info.matrix)


def _vpcc(info: StreamInfo) -> bytes:
    # Profile 0, level 3, 8 bits, 4:2:0 with chroma collocated with luma.
    return struct.pack(">BBBBBBH", 0, 30, 8 << 4 | 1 << 1 | (info.range is Range.FULL), *_colour(info), 0)


def _esds() -> bytes:
    # 14496-1: an ES descriptor (tag 3) with a decoder configuration (tag 4) of a visual stream (type 4), and a
    # synchronisation layer descriptor (tag 6) with the settings of MP4.
    decoder = struct.pack(">BBBBB3xII", 0x04, 13, _ESDS_JPEG, 4 << 2 | 1, 0, 0, 0)
    return struct.pack(">BBHB", 0x03, 3 + len(decoder) + 3, 1, 0) + decoder + b"\x06\x01\x02"


_LANGUAGE: Final = 0x55C4  # "und"
_MATRIX: Final = struct.pack(">9i", 0x10000, 0, 0, 0, 0x10000, 0, 0, 0, 0x40000000)
# Rate 1, volume 1, reserved, the unit matrix, pre-defined, next track 2.
_MVHD_REST: Final = struct.pack(">IHH8x", 0x10000, 0x100, 0) + _MATRIX + bytes(24) + struct.pack(">I", 2)
_HDLR: Final = _full(b"hdlr", bytes(4), b"vide", bytes(12), b"\0")
_VMHD: Final = _full(b"vmhd", bytes(8), flags=1)
_DINF: Final = _box(b"dinf", _full(b"dref", struct.pack(">I", 1), _full(b"url ", flags=1)))


_BT601: Final = frozenset({Matrix.SMPTE170M, Matrix.BT470BG, Matrix.UNKNOWN})

# Codecs whose packets state the picture size; for other codecs the extradata does.
_SELF_SIZED: Final = frozenset({Codec.VP9, Codec.MJPEG})


@dataclass(frozen=True, slots=True, eq=False)
class WrappedClip:
    """A clip in a container, and where its wanted frames are in it."""

    clip: EncodedClip
    mp4: bytes
    positions: npt.NDArray[np.int32]  # positions of the wanted frames in the container, sorted and unique, int32 [U]
    index: IntArray  # for each output frame its index into `positions`, int64 [T]

    @property
    def resized(self) -> bool:
        """Whether the crop has another size than the output."""
        request = self.clip.request
        return (request.box.height, request.box.width) != request.size

    @property
    def in_order(self) -> bool:
        """Whether the output shows each unique frame once, in the order of the container."""
        return len(self.index) == len(self.positions) and bool((np.diff(self.index) > 0).all())

    def pictures(self) -> list[UInt8Array]:
        """Return the packets of the wanted frames, for decoders of single pictures, uint8 [bytes] each."""
        data, order = np.frombuffer(self.clip.data, np.uint8), np.argsort(self.clip.shows)[self.positions]
        starts, sizes = self.clip.starts[order].tolist(), self.clip.sizes[order].tolist()
        return [data[start : start + size] for start, size in zip(starts, sizes, strict=True)]


def wrap(clip: EncodedClip, decoder: str, codecs: Set[Codec]) -> WrappedClip:
    """Wrap a clip in a container, after the checks that decoders of containers do not make themselves.

    `decoder`: its name, for messages. `codecs`: those that it decodes.
    """
    info = clip.info
    if info.codec not in codecs:
        known = ", ".join(sorted(codec.label for codec in codecs))
        raise DecodeError(f"{decoder} decodes {known}, not {info.codec.label}", hint="use pyav")
    # The range of JPEG need not be checked: JPEG pictures signal it themselves.
    if info.matrix not in _BT601 or (info.range is Range.FULL and info.codec is not Codec.MJPEG):
        colour = f"{info.matrix.name.lower()} {info.range.name.lower()}"
        raise DecodeError(f"{decoder} converts by limited BT.601, the stream is {colour}", hint="use pyav")
    if not clip.keys[0]:
        raise DecodeError("first packet of the plan is not a key packet")
    for start, size in zip(clip.starts.tolist(), clip.sizes.tolist(), strict=True):
        if not size:
            raise DecodeError("packet is empty")
        found = declared_size(info.codec, clip.data[start : start + size]) if info.codec in _SELF_SIZED else None
        # DALI allocates memory by the container's size and writes past it if the pictures are larger.
        if found not in (None, (info.width, info.height)):
            raise DecodeError(f"packet has pictures of {found}, the stream of {(info.width, info.height)}")
    # These decoders seek and decode again for a repeated frame, so request each frame once, in order.
    wanted, index = np.unique(clip.request.frames, return_inverse=True)
    shown = np.sort(clip.shows)
    positions = np.searchsorted(shown, wanted)
    if positions[-1] >= len(shown) or (shown[positions] != wanted).any():
        raise DecodeError("plan lacks the packets of some wanted frames")
    mp4 = minimal_mp4(info, clip.data, clip.starts, clip.sizes, clip.shows, clip.keys)
    return WrappedClip(clip, mp4, positions.astype(np.int32), index.astype(np.int64))


_START_CODE: Final = b"\0\0\0\1"
# nal_unit_type of an access unit delimiter, which must be the first unit (H.264 table 7-1, H.265 table 7-1).
_DELIMITER: Final = {Codec.H264: 9, Codec.HEVC: 35}


@dataclass(frozen=True, slots=True, eq=False)
class ElementaryStream:
    """A clip's packets in the form of a decoder that takes no container."""

    data: UInt8Array  # bytes of all packets, uint8
    starts: list[int]  # first byte of each packet in `data`
    sizes: list[int]  # size of each packet in bytes


def elementary_stream(clip: EncodedClip) -> ElementaryStream:
    """Return a clip's packets as the elementary stream of their codec.

    H.264 and HEVC are copied with start codes, and with the parameter sets of the extradata in each key packet. Packets
    of other codecs need no change and are not copied.
    """
    codec, extradata = clip.info.codec, clip.info.extradata
    starts, sizes = clip.starts.tolist(), clip.sizes.tolist()
    if codec not in _DELIMITER:
        return ElementaryStream(np.frombuffer(clip.data, np.uint8), starts, sizes)
    length_size = nal_length_size(codec, extradata)
    sets = _parameter_sets(codec, extradata)
    parts: list[bytes | memoryview] = []
    written: list[int] = []
    for start, size, key in zip(starts, sizes, clip.keys.tolist(), strict=True):
        packet = clip.data[start : start + size]
        before = len(parts)
        pending = sets if key else b""
        for unit in nal_units(packet, length_size):
            if pending and _type(codec, unit[0]) != _DELIMITER[codec]:
                parts.append(pending)
                pending = b""
            parts += (_START_CODE, unit)
        written.append(sum(map(len, parts[before:])))
    ends = np.cumsum(written).tolist()
    data = np.frombuffer(b"".join(parts), np.uint8)
    return ElementaryStream(data, [end - size for end, size in zip(ends, written, strict=True)], written)


@lru_cache(maxsize=256)
def _parameter_sets(codec: Codec, extradata: bytes) -> bytes:
    """Return the parameter sets of an avcC or hvcC record with start codes; Annex B extradata has them already."""
    if nal_length_size(codec, extradata) is None:
        return extradata
    try:
        return b"".join(_START_CODE + unit for unit in parameter_sets(codec, extradata))
    except IndexError as error:
        raise FormatError(f"extradata of {codec.label}, {len(extradata)} bytes, ends inside a parameter set") from error


def _type(codec: Codec, header: int) -> int:
    return header & 31 if codec is Codec.H264 else header >> 1 & 63
