"""Read from a packet's first bytes its flags, its picture size, and whether it is one field of a frame.

Flags are read from the first bytes (heads) of packets when a video is indexed without reading all of it. As in
`fastvid.format.bitstream`, when in doubt a packet counts as a reference and not as a key packet: it may then be decoded
more often than necessary, but is never omitted wrongly.

Each field of a field-coded H.264 frame (PAFF, as camcorders and broadcasters write it) has a packet of its own, except
in MP4; a decoder shows one frame for both. Section numbers refer to ITU-T H.264.

The picture size is for decoders that trust the container: DALI on a CPU writes past its buffer if VP9 pictures are
larger than the container says.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from fastvid.errors import FormatError
from fastvid.format import bitstream
from fastvid.format.bitstream import Bits, Bytes, Packets, nal_length_size, nal_units, unit_bits
from fastvid.format.schema import Codec, PacketFlag
from fastvid.runtime.arrays import UInt8Array

_SLICE, _IDR, _SPS, _PPS = 1, 5, 7, 8
# profile_idc with a chroma format in the sequence parameter set (7.3.2.1.1).
_CHROMA_PROFILES: Final = frozenset({44, 83, 86, 100, 110, 118, 122, 128, 134, 135, 138, 139, 244})
# More bytes than the fields of a slice header that are read take.
_SLICE_BYTES: Final = 32


@dataclass(frozen=True, slots=True)
class _Sequence:
    frames_only: bool
    separate_planes: bool
    frame_num_bits: int


_Field = tuple[bool, int]  # whether it is a bottom field, and frame_num


class FieldPairs:
    """Recognises packets that are the second field of a frame, in a stream of packets."""

    def __init__(self, codec: str, extradata: bytes) -> None:
        self._active = codec == Codec.H264.label
        self._length_size = nal_length_size(Codec.H264, extradata)
        self._sequences: dict[int, _Sequence] = {}
        self._pictures: dict[int, int] = {}  # picture parameter set -> sequence parameter set
        self._first: _Field | None = None
        if self._active:
            self._read_configuration(extradata)

    @property
    def possible(self) -> bool:
        """Whether the stream may contain fields or field-coded macroblocks."""
        return any(not sequence.frames_only for sequence in self._sequences.values())

    def completes(self, packet: Bytes) -> bool:
        """Return whether a packet is the second field of the frame that the previous packet began.

        Call it for every packet in decode order.
        """
        if not self._active or (self._sequences and not self.possible):
            return False
        try:
            fields = self._fields(packet)
        except (FormatError, IndexError, KeyError):
            fields = []
        first, self._first = self._first, None
        if not fields or fields[0] is None or any(field != fields[0] for field in fields):
            return False
        is_bottom, frame_num = fields[0]
        if first == (not is_bottom, frame_num):
            return True
        self._first = fields[0]
        return False

    def _fields(self, packet: Bytes) -> list[_Field | None]:
        """Return the field of each slice of a packet; None for a slice of a frame."""
        fields = []
        for unit in nal_units(packet, self._length_size):
            kind = unit[0] & 31
            if kind in (_SPS, _PPS):
                self._read_parameters(unit)
            elif kind in (_SLICE, _IDR):
                fields.append(self._field(unit_bits(unit[:_SLICE_BYTES])))
        return fields

    def _field(self, bits: Bits) -> _Field | None:
        bits.read_golomb()  # first_mb_in_slice
        bits.read_golomb()  # slice_type
        sequence = self._sequences[self._pictures[bits.read_golomb()]]
        if sequence.separate_planes:
            bits.read(2)
        frame_num = bits.read(sequence.frame_num_bits)
        return None if sequence.frames_only or not bits.read(1) else (bool(bits.read(1)), frame_num)

    def _read_configuration(self, extradata: bytes) -> None:
        try:
            is_record = self._length_size is not None
            for unit in bitstream.parameter_sets(Codec.H264, extradata) if is_record else nal_units(extradata, None):
                self._read_parameters(unit)
        except (FormatError, IndexError):
            return

    def _read_parameters(self, unit: Bytes) -> None:
        if not len(unit) or unit[0] & 31 not in (_SPS, _PPS):
            return
        bits = unit_bits(unit)
        if unit[0] & 31 == _PPS:
            number = bits.read_golomb()
            self._pictures[number] = bits.read_golomb()
        else:
            number, sequence = _read_sequence(bits)
            self._sequences[number] = sequence


def _read_sequence(bits: Bits) -> tuple[int, _Sequence]:
    """Return the number of a sequence parameter set and the fields of it that are needed (7.3.2.1.1)."""
    profile, _ = bits.read(8), bits.read(16)
    number, separate, lists = bits.read_golomb(), False, 8
    if profile in _CHROMA_PROFILES:
        if bits.read_golomb() == 3:
            separate, lists = bool(bits.read(1)), 12
        bits.read_golomb()  # bit depths
        bits.read_golomb()
        bits.read(1)
        if bits.read(1):
            for one in range(lists):
                if bits.read(1):
                    _skip_scaling_list(bits, 16 if one < 6 else 64)
    frame_num_bits = bits.read_golomb() + 4
    order = bits.read_golomb()
    if order == 0:
        bits.read_golomb()
    elif order == 1:
        bits.read(1)
        bits.read_golomb()  # two offsets; signed codes are as long as unsigned ones
        bits.read_golomb()
        for _ in range(bits.read_golomb()):
            bits.read_golomb()
    bits.read_golomb()  # reference frames
    bits.read(1)
    bits.read_golomb()  # width and height
    bits.read_golomb()
    return number, _Sequence(bool(bits.read(1)), separate, frame_num_bits)


def _skip_scaling_list(bits: Bits, size: int) -> None:
    last = following = 8
    for _ in range(size):
        if following:
            code = bits.read_golomb()
            following = (last + (code + 1) // 2 * (1 if code % 2 else -1)) % 256
        last = following or last


# Start-of-frame markers of JPEG (ITU-T T.81 table B.1): C0 to CF except the markers of tables and extensions.
_JPEG_FRAME: Final = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_JPEG_SCAN: Final = 0xDA


def declared_size(codec: Codec, packet: memoryview) -> tuple[int, int] | None:
    """Return width and height of a packet's pictures in pixels; None if they are those of an earlier picture."""
    if codec is Codec.MJPEG:
        return _jpeg_size(packet)
    assert codec is Codec.VP9
    sizes = {bitstream.Vp9Frame(frame).read_size() for frame in bitstream.vp9_superframe(packet)} - {None}
    if len(sizes) > 1:
        raise FormatError(f"pictures of one packet have different sizes: {sorted(filter(None, sizes))}")
    return sizes.pop() if sizes else None


def _jpeg_size(packet: memoryview) -> tuple[int, int]:
    for code, start, _ in jpeg_segments(packet):
        if code in _JPEG_FRAME and start + 5 <= len(packet):
            height = int.from_bytes(packet[start + 1 : start + 3], "big")
            return int.from_bytes(packet[start + 3 : start + 5], "big"), height
    raise FormatError("JPEG picture has no frame header")


def jpeg_segments(packet: memoryview) -> Iterator[tuple[int, int, int]]:
    """Yield code, first byte of the content, and end of each segment of a JPEG header, up to the start of the scan."""
    position = 2
    while position + 4 <= len(packet) and packet[position] == 0xFF:
        code = packet[position + 1]
        if code == 0xFF:  # fill bytes may precede a marker
            position += 1
            continue
        start, position = position + 4, position + 2 + int.from_bytes(packet[position + 2 : position + 4], "big")
        yield code, start, position
        if code == _JPEG_SCAN:
            return


HEAD_BYTES: Final = 256
"""First bytes of a packet from which its flags are read; enough unless long messages precede its first slice."""

KEY_HEAD_BYTES: Final = 4096
"""The same for key packets: encoders write their options into a message before the first slice, x265 up to 3 kB."""

WHOLE_PACKETS: Final = frozenset({Codec.VP9})
"""Codecs whose packets must be read whole, because the end says which frames they contain (superframe index of VP9)."""

_KEY: Final = int(PacketFlag.KEY)
_DROPPABLE: Final = np.uint32(PacketFlag.DROPPABLE)
# More bytes than an AV1 frame needs, from the start of its OBU to refresh_frame_flags.
_AV1_HEADER_BYTES: Final = 32


def flags_of_heads(codec: Codec, extradata: bytes, heads: Packets, sizes: Sequence[int]) -> UInt8Array:
    """Return the PacketFlag bits of each packet, uint8 [P].

    `heads`: first bytes of each packet in decode order, all bytes of a shorter one; None for a packet that was not
    read. `sizes`: size of each packet in bytes.
    """
    if not bitstream.can_plan(codec):
        return np.zeros(len(heads), np.uint8)
    if codec in (Codec.AV1, Codec.VP9):
        flags = (_av1 if codec is Codec.AV1 else _vp9)(extradata, heads, sizes)
        return np.asarray(bitstream.kept_parameters(codec, extradata, heads, flags, whole=False), dtype=np.uint8)
    found = bitstream.packet_flags(codec, extradata, heads, whole=False)
    # With fields, the second one may be a reference although the first is not, and begins after the bytes of the head.
    if FieldPairs(codec.label, extradata).possible:
        found &= ~_DROPPABLE
    return found.astype(np.uint8)


def _av1(extradata: bytes, heads: Packets, sizes: Sequence[int]) -> list[int]:
    flags = []
    for head, size in zip(heads, sizes, strict=True):
        flag = 0
        if head is not None:
            # The head of a packet with one frame is enough; zeros replace the rest of the frame's data.
            packet = bytes(head) + bytes(max(size - len(head), 0))
            sequence, is_enough = _av1_head(packet, len(head))
            extradata = sequence or extradata
            if is_enough:
                try:
                    (flag,) = bitstream.av1_flags(extradata, [packet])
                except FormatError:
                    flag = 0
        flags.append(flag)
    return flags


def _av1_head(packet: bytes, known: int) -> tuple[bytes, bool]:
    """Search the `known` first bytes of a temporal unit.

    Returns the configuration record of a sequence header, empty if there is none, and whether these bytes determine
    the unit's flags: whether its last OBU begins in them, so that no other frame follows.
    """
    sequence = b""
    with contextlib.suppress(FormatError):
        for kind, start, at, stop in bitstream.obus(packet):
            if at > known:
                break
            if kind == bitstream.AV1_SEQUENCE_HEADER and stop <= known:
                sequence = bytes(bitstream.AV1C_FIELDS) + packet[start:stop]
            if stop == len(packet):
                return sequence, start + _AV1_HEADER_BYTES <= known or stop <= known
    return sequence, False


def _vp9(extradata: bytes, heads: Packets, sizes: Sequence[int]) -> list[int]:
    if all(head is not None and len(head) == size for head, size in zip(heads, sizes, strict=True)):
        found: list[int] = bitstream.packet_flags(Codec.VP9, extradata, [head or b"" for head in heads]).tolist()
        return found
    return [_KEY if bitstream.begins_with_vp9_key(head) else 0 for head in heads]


def shortened(codec: Codec, extradata: bytes, head: bytes) -> bytes:
    """Return the head of a packet with the length of its last NAL unit shortened to end there.

    Decoders reject a NAL unit that is longer than its packet.
    """
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
