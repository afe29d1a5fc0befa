"""Read the PacketFlags of packets from their first bytes only, for videos that are indexed without being read whole.

As in `fastvid.format.codecs.bitstream`, whatever the bytes at hand do not tell counts as a reference that is no key
packet: such a packet is decoded more often than necessary, never left out wrongly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from fastvid.errors import FormatError
from fastvid.format.codecs.av1 import av1_flags
from fastvid.format.codecs.bitstream import (
    HEVC_INTRA_RANDOM_ACCESS,
    HEVC_LEADING,
    HEVC_SUB_LAYER_NON_REFERENCE,
    Bytes,
    Vp9Frame,
    nal_length_size,
    packet_flags,
)
from fastvid.format.codecs.fields import FieldPairs
from fastvid.format.schema import Codec, PacketFlag
from fastvid.runtime.arrays import UInt8Array

HEAD_BYTES: Final = 256
"""First bytes of a packet that tell its flags, if no long supplemental information precedes its first slice."""

KEY_HEAD_BYTES: Final = 4096
"""The same for key packets: encoders write their options before the first slice, x265 up to 3 kB."""

WHOLE_PACKETS: Final = frozenset({Codec.VP9})
"""Codecs whose packets say at their end what they contain (VP9's superframe index)."""

_KEY: Final = int(PacketFlag.KEY)
_DROPPABLE: Final = int(PacketFlag.DROPPABLE)
_H264_SLICES: Final = range(1, 6)
_H264_IDR: Final = 5
# AV1 bitstream specification: type of a sequence header; bytes before the OBUs of an av1C record; and more bytes than a
# frame's OBU needs up to refresh_frame_flags.
_AV1_SEQUENCE: Final = 1
_AV1C_FIELDS: Final = 4
_AV1_HEADER_BYTES: Final = 32
_HEVC_SLICES: Final = range(32)
_HEVC_IDR: Final = frozenset({19, 20})


def flags_of_heads(codec: Codec, extradata: bytes, heads: Sequence[Bytes | None], sizes: Sequence[int]) -> UInt8Array:
    """Return the PacketFlag of each packet, uint8 [P].

    `heads`: first bytes of each packet in decode order, all of a shorter one; None for a packet that was not read.
    `sizes`: size of each packet in bytes.
    """
    rule = _RULES.get(codec)
    flags = [0] * len(heads) if rule is None else rule(extradata, heads, sizes)
    return np.asarray(flags, dtype=np.uint8)


def _h264(extradata: bytes, heads: Sequence[Bytes | None], _sizes: Sequence[int]) -> list[int]:
    length_size = nal_length_size(Codec.H264, extradata)
    # The second field of a picture may be a reference where the first is none, and is far behind.
    fields = FieldPairs(Codec.H264.label, extradata).possible
    flags = [0] * len(heads)
    for number in [number for number, head in enumerate(heads) if head is not None]:
        header = _first_unit(heads[number], length_size, lambda unit: unit[0] & 31 in _H264_SLICES)
        if header is not None:
            flags[number] |= _KEY if header[0] & 31 == _H264_IDR else 0
            # nal_ref_idc is zero in all slices of a picture or in none (7.4.1).
            flags[number] |= 0 if header[0] >> 5 & 3 or fields else _DROPPABLE
    return flags


def _hevc(extradata: bytes, heads: Sequence[Bytes | None], _sizes: Sequence[int]) -> list[int]:
    length_size = nal_length_size(Codec.HEVC, extradata)
    units = [_first_unit(head, length_size, lambda unit: unit[0] >> 1 & 63 in _HEVC_SLICES) for head in heads]
    kinds = [None if unit is None else unit[0] >> 1 & 63 for unit in units]
    layers = [None if unit is None else (unit[1] & 7) - 1 for unit in units]
    # The highest sub-layer is known only if all packets are: a lower one may be a reference of a higher one.
    highest = None if None in layers else max(layer for layer in layers if layer is not None)
    flags = []
    for number, (kind, layer) in enumerate(zip(kinds, layers, strict=True)):
        flag = 0
        following = kinds[number + 1] if number + 1 < len(kinds) else -1
        if kind in _HEVC_IDR or (
            kind in HEVC_INTRA_RANDOM_ACCESS and following is not None and following not in HEVC_LEADING
        ):
            flag |= _KEY
        if kind in HEVC_SUB_LAYER_NON_REFERENCE and layer == highest:
            flag |= _DROPPABLE
        flags.append(flag)
    return flags


def _av1(extradata: bytes, heads: Sequence[Bytes | None], sizes: Sequence[int]) -> list[int]:
    flags = []
    for head, size in zip(heads, sizes, strict=True):
        flag = 0
        if head is not None:
            # Of a packet with one frame the head is enough; zeros stand for the rest of the frame's data.
            packet = bytes(head) + bytes(max(size - len(head), 0))
            sequence, is_enough = _av1_head(packet, len(head))
            extradata = sequence or extradata
            if is_enough:
                try:
                    (flag,) = av1_flags(extradata, [packet])
                except FormatError:
                    flag = 0
        flags.append(flag)
    return flags


def _av1_head(packet: bytes, known: int) -> tuple[bytes, bool]:
    """Return the configuration record of a sequence header in the known bytes of a temporal unit, or nothing; and
    whether they tell the unit's flags: its last OBU begins in them, so that no other frame follows."""
    position, sequence = 0, b""
    while position < known:
        start, header = position, packet[position]
        position += 1 + (header >> 2 & 1)
        size, shift, more = len(packet) - position, 0, bool(header >> 1 & 1)
        if more:
            size = 0
        while more and position < known:
            size |= (packet[position] & 0x7F) << shift
            more, shift, position = bool(packet[position] & 0x80), shift + 7, position + 1
        position += size
        if more or position > len(packet):
            break
        if header >> 3 & 15 == _AV1_SEQUENCE and position <= known:
            sequence = bytes(_AV1C_FIELDS) + packet[start:position]
        if position == len(packet):
            return sequence, start + _AV1_HEADER_BYTES <= known or position <= known
    return sequence, False


def _vp9(extradata: bytes, heads: Sequence[Bytes | None], sizes: Sequence[int]) -> list[int]:
    if all(head is not None and len(head) == size for head, size in zip(heads, sizes, strict=True)):
        found: list[int] = packet_flags(Codec.VP9, extradata, [head or b"" for head in heads]).tolist()
        return found
    return [_KEY if _begins_with_vp9_key(head) else 0 for head in heads]


def _begins_with_vp9_key(head: Bytes | None) -> bool:
    try:
        return bool(head) and Vp9Frame(memoryview(head or b"")).key
    except FormatError:
        return False


def _vp8(extradata: bytes, heads: Sequence[Bytes | None], _sizes: Sequence[int]) -> list[int]:
    return [0 if not head else int(packet_flags(Codec.VP8, extradata, [head])[0]) for head in heads]


def _intra(_extradata: bytes, heads: Sequence[Bytes | None], _sizes: Sequence[int]) -> list[int]:
    return [_KEY | _DROPPABLE] * len(heads)


def shortened(codec: Codec, extradata: bytes, head: bytes) -> bytes:
    """Return the head of a packet as a packet that ends there: a decoder refuses a NAL unit that exceeds its packet."""
    length_size = nal_length_size(codec, extradata) if codec in (Codec.H264, Codec.HEVC) else None
    if length_size is None:
        return head
    position = 0
    while position + length_size < len(head):
        size = int.from_bytes(head[position : position + length_size], "big")
        left = len(head) - position - length_size
        if size > left:
            return head[:position] + left.to_bytes(length_size, "big") + head[position + length_size :]
        position += length_size + size
    return head[:position]


def _first_unit(head: Bytes | None, length_size: int | None, wanted: Callable[[memoryview], bool]) -> memoryview | None:
    """Return the first two bytes of the first NAL unit that is wanted; None if the head ends before it."""
    if head is None:
        return None
    view, position = memoryview(head), 0
    if length_size is None:
        data = bytes(view)
        position = data.find(b"\0\0\1")
        while position >= 0 and position + 5 <= len(view):
            unit = view[position + 3 : position + 5]
            if wanted(unit):
                return unit
            position = data.find(b"\0\0\1", position + 3)
        return None
    while position + length_size + 2 <= len(view):
        size = int.from_bytes(view[position : position + length_size], "big")
        position += length_size
        if size > 1 and wanted(view[position : position + 2]):
            return view[position : position + 2]
        position += size
    return None


_RULES: Final[dict[Codec, Callable[[bytes, Sequence[Bytes | None], Sequence[int]], list[int]]]] = {
    Codec.AV1: _av1,
    Codec.H264: _h264,
    Codec.HEVC: _hevc,
    Codec.MJPEG: _intra,
    Codec.VP8: _vp8,
    Codec.VP9: _vp9,
}
