"""Read the PacketFlags of AV1 temporal units from their OBU headers.

Section numbers refer to the AV1 bitstream specification. A frame whose ``refresh_frame_flags`` are zero is stored in no
reference slot. Everything that a later frame can inherit (pixels, probabilities, motion, segmentation) comes from these
slots, so nothing refers to such a frame.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from fastvid.errors import FormatError
from fastvid.format.schema import PacketFlag

Bytes = bytes | memoryview

_SEQUENCE_HEADER, _FRAME_HEADER, _FRAME = 1, 3, 6
_KEY_FRAME, _INTRA_ONLY, _SWITCH = 0, 2, 3
_SELECT: Final = 2  # seq_force_screen_content_tools and seq_force_integer_mv: signalled per frame
_AV1C_FIELDS: Final = 4  # bytes before the OBUs in an av1C record


def av1_flags(extradata: bytes, packets: Sequence[Bytes]) -> list[int]:
    """Return the PacketFlag of each temporal unit."""
    sequence = None
    for kind, body in _units(extradata[_AV1C_FIELDS:]):
        if kind == _SEQUENCE_HEADER:
            sequence = _sequence(body)
    flags = []
    for number, packet in enumerate(packets):
        frames = []
        for kind, body in _units(packet):
            if kind == _SEQUENCE_HEADER:
                sequence = _sequence(body)
            elif kind in (_FRAME_HEADER, _FRAME):
                frames.append(_frame(body, sequence))
        if not frames:
            raise FormatError(f"packet {number} contains no AV1 frame")
        flag = 0
        if frames[0].key:
            flag |= PacketFlag.KEY
        if not any(frame.refreshes for frame in frames):
            flag |= PacketFlag.DROPPABLE
        flags.append(flag)
    return flags


@dataclass(frozen=True, slots=True)
class _Sequence:
    """The fields of the sequence header that a frame header depends on."""

    simple: bool
    screen_content_tools: int = 0
    integer_mv: int = 0
    frame_id_bits: int = 0
    order_hint_bits: int = 0


@dataclass(frozen=True, slots=True)
class _Frame:
    key: bool
    refreshes: bool


def _units(data: Bytes) -> Iterator[tuple[int, memoryview]]:
    """Yield the type and payload of each OBU, section 5.3."""
    view, position = memoryview(data), 0
    while position < len(view):
        header = view[position]
        position += 1 + (header >> 2 & 1)
        size = len(view) - position
        if header >> 1 & 1:
            size, shift, more = 0, 0, True
            while more:
                if position >= len(view) or shift > 49:
                    raise FormatError("AV1 OBU ends inside its size field")
                size |= (view[position] & 0x7F) << shift
                more, shift, position = bool(view[position] & 0x80), shift + 7, position + 1
        if position + size > len(view):
            raise FormatError(f"AV1 OBU of {size} bytes exceeds its packet of {len(view)} bytes")
        yield header >> 3 & 15, view[position : position + size]
        position += size


def _sequence(body: memoryview) -> _Sequence:
    """Parse a sequence header (section 5.5) as far as frame headers depend on it."""
    bits = Bits(body)
    bits.read(4)  # seq_profile, still_picture
    if bits.read(1):  # reduced_still_picture_header
        return _Sequence(simple=False)
    if bits.read(1):  # timing_info_present_flag
        bits.read(64)
        if bits.read(1):  # equal_picture_interval
            bits.read_uvlc()
        if bits.read(1):  # decoder_model_info_present_flag
            return _Sequence(simple=False)
    delays = bits.read(1)
    for _ in range(bits.read(5) + 1):
        bits.read(12)
        if bits.read(5) > 7:  # seq_level_idx
            bits.read(1)
        if delays and bits.read(1):
            bits.read(4)
    width, height = bits.read(4) + 1, bits.read(4) + 1
    bits.read(width + height)
    frame_id_bits = 0
    if bits.read(1):
        delta = bits.read(4) + 2
        frame_id_bits = bits.read(3) + delta + 1
    bits.read(3)
    bits.read(4)
    ordered = bits.read(1)
    if ordered:
        bits.read(2)
    screen = _SELECT if bits.read(1) else bits.read(1)
    integer = (_SELECT if bits.read(1) else bits.read(1)) if screen else _SELECT
    return _Sequence(True, screen, integer, frame_id_bits, bits.read(3) + 1 if ordered else 0)


def _frame(body: memoryview, sequence: _Sequence | None) -> _Frame:
    """Parse a frame header (section 5.9.2) up to refresh_frame_flags.

    A frame that cannot be parsed this far counts as a reference and not as a key frame.
    """
    if sequence is None or not sequence.simple:
        return _Frame(key=False, refreshes=True)
    bits = Bits(body)
    if bits.read(1):  # show_existing_frame: if it shows a key frame, which only other headers tell, it refreshes slots
        return _Frame(key=False, refreshes=True)
    kind, shown = bits.read(2), bits.read(1)
    if kind == _KEY_FRAME and shown:
        return _Frame(key=True, refreshes=True)
    if not shown:
        bits.read(1)  # showable_frame
    resilient = kind == _SWITCH or bits.read(1)
    bits.read(1)  # disable_cdf_update
    screen = bits.read(1) if sequence.screen_content_tools == _SELECT else sequence.screen_content_tools
    if screen and sequence.integer_mv == _SELECT:
        bits.read(1)
    bits.read(sequence.frame_id_bits)
    if kind == _SWITCH:
        return _Frame(key=False, refreshes=True)
    bits.read(1 + sequence.order_hint_bits)  # frame_size_override_flag
    if kind not in (_KEY_FRAME, _INTRA_ONLY) and not resilient:
        bits.read(3)  # primary_ref_frame
    return _Frame(key=False, refreshes=bits.read(8) != 0)


class Bits:
    """Reads a header bit by bit, most significant bit first."""

    __slots__ = ("position", "view")

    def __init__(self, view: memoryview) -> None:
        self.view, self.position = view, 0

    def read(self, count: int) -> int:
        """Read the next `count` bits as an unsigned integer."""
        value = 0
        for _ in range(count):
            byte, bit = divmod(self.position, 8)
            if byte >= len(self.view):
                raise FormatError("frame header ends too early")
            value = value << 1 | self.view[byte] >> 7 - bit & 1
            self.position += 1
        return value

    def read_uvlc(self) -> int:
        """Read a variable-length unsigned integer, section 4.10.3."""
        zeros = 0
        while not self.read(1):
            zeros += 1
        return (1 << zeros) - 1 + self.read(zeros) if zeros < 32 else 2**32 - 1
