"""Find the two packets of a field-coded H.264 frame (PAFF), as camcorders and broadcasters write it.

Each field of such a frame has a packet of its own, except in MP4. A decoder shows one frame for both. Section numbers
refer to ITU-T H.264.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from fastvid.errors import FormatError
from fastvid.format.codecs.bitstream import Bytes, nal_length_size, nal_units
from fastvid.format.schema import Codec

_SLICE, _IDR, _SPS, _PPS = 1, 5, 7, 8
# profile_idc with a chroma format in the sequence parameter set (7.3.2.1.1).
_CHROMA_PROFILES: Final = frozenset({44, 83, 86, 100, 110, 118, 122, 128, 134, 135, 138, 139, 244})
# The fields of a slice header that are read end before.
_SLICE_BYTES: Final = 32


@dataclass(frozen=True, slots=True)
class _Sequence:
    frames_only: bool
    separate_planes: bool
    frame_num_bits: int


@dataclass(frozen=True, slots=True)
class _Field:
    bottom: bool
    frame_num: int


class FieldPairs:
    """Recognises second fields in a stream of packets."""

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
        field = fields[0]
        if first is not None and first.bottom != field.bottom and first.frame_num == field.frame_num:
            return True
        self._first = field
        return False

    def _fields(self, packet: Bytes) -> list[_Field | None]:
        """Return the field of each slice of a packet; None for a slice of a frame."""
        fields = []
        for unit in nal_units(packet, self._length_size):
            kind = unit[0] & 31
            if kind in (_SPS, _PPS):
                self._read_parameters(unit)
            elif kind in (_SLICE, _IDR):
                fields.append(self._field(_Bits(unit[:_SLICE_BYTES])))
        return fields

    def _field(self, bits: _Bits) -> _Field | None:
        bits.ue()  # first_mb_in_slice
        bits.ue()  # slice_type
        sequence = self._sequences[self._pictures[bits.ue()]]
        if sequence.separate_planes:
            bits.read(2)
        frame_num = bits.read(sequence.frame_num_bits)
        return None if sequence.frames_only or not bits.read(1) else _Field(bool(bits.read(1)), frame_num)

    def _read_configuration(self, extradata: bytes) -> None:
        try:
            if self._length_size is None:
                units = list(nal_units(extradata, None))
            else:
                # AVCDecoderConfigurationRecord, ISO/IEC 14496-15 section 5.3.3.
                units, position = [], 5
                for mask in (0x1F, 0xFF):
                    count = extradata[position] & mask
                    position += 1
                    for _ in range(count):
                        size = int.from_bytes(extradata[position : position + 2], "big")
                        units.append(memoryview(extradata)[position + 2 : position + 2 + size])
                        position += 2 + size
            for unit in units:
                self._read_parameters(unit)
        except (FormatError, IndexError):
            return

    def _read_parameters(self, unit: Bytes) -> None:
        if not len(unit) or unit[0] & 31 not in (_SPS, _PPS):
            return
        bits = _Bits(unit)
        if unit[0] & 31 == _PPS:
            number = bits.ue()
            self._pictures[number] = bits.ue()
        else:
            number, sequence = _read_sequence(bits)
            self._sequences[number] = sequence


def _read_sequence(bits: _Bits) -> tuple[int, _Sequence]:
    """Return the number and contents of a sequence parameter set (7.3.2.1.1)."""
    profile, _ = bits.read(8), bits.read(16)
    number, separate, lists = bits.ue(), False, 8
    if profile in _CHROMA_PROFILES:
        if bits.ue() == 3:
            separate, lists = bool(bits.read(1)), 12
        bits.ue()  # bit depths
        bits.ue()
        bits.read(1)
        if bits.read(1):
            for one in range(lists):
                if bits.read(1):
                    _skip_scaling_list(bits, 16 if one < 6 else 64)
    frame_num_bits = bits.ue() + 4
    order = bits.ue()
    if order == 0:
        bits.ue()
    elif order == 1:
        bits.read(1)
        bits.ue()  # two offsets; signed codes are as long as unsigned ones
        bits.ue()
        for _ in range(bits.ue()):
            bits.ue()
    bits.ue()  # reference frames
    bits.read(1)
    bits.ue()  # width and height
    bits.ue()
    return number, _Sequence(bool(bits.read(1)), separate, frame_num_bits)


def _skip_scaling_list(bits: _Bits, size: int) -> None:
    last = following = 8
    for _ in range(size):
        if following:
            code = bits.ue()
            following = (last + (code + 1) // 2 * (1 if code % 2 else -1)) % 256
        last = following or last


class _Bits:
    """Reads the bits of a NAL unit after its header byte; without emulation prevention bytes (7.4.1)."""

    __slots__ = ("left", "value")

    def __init__(self, unit: Bytes) -> None:
        data = bytes(unit[1:]).replace(b"\0\0\3", b"\0\0")
        self.value, self.left = int.from_bytes(data, "big"), 8 * len(data)

    def read(self, count: int) -> int:
        self.left -= count
        if self.left < 0:
            raise FormatError("H.264 header ends early")
        return self.value >> self.left & (1 << count) - 1

    def ue(self) -> int:
        """Read an unsigned Exp-Golomb code (9.1)."""
        zeros = 0
        while not self.read(1):
            zeros += 1
        return (1 << zeros) - 1 + self.read(zeros)
