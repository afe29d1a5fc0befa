"""Read from each packet's own headers whether it is a key packet, droppable or hidden.

Containers do not mark the packets that no other packet refers to (FFmpeg's MP4 demuxer does not either), and a wrong
"droppable" produces wrong pixels without an error. So when in doubt, every rule here treats a packet as a reference.

AV1's section numbers refer to its bitstream specification. A frame whose ``refresh_frame_flags`` are zero is stored in
no reference slot. Everything that a later frame can inherit (pixels, probabilities, motion, segmentation) comes from
these slots, so nothing refers to such a frame.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from fastvid.errors import FormatError
from fastvid.format.schema import Codec, PacketFlag
from fastvid.runtime.arrays import UInt32Array

Bytes = bytes | memoryview
Packets = Sequence[Bytes | None]

_VP9_SYNC: Final = 0x498342
_HEADER_BYTES: Final = 256  # more bytes than the header fields that are read here take in any codec
AV1_SEQUENCE_HEADER, _FRAME_HEADER, _FRAME = 1, 3, 6
_KEY_FRAME, _INTRA_ONLY, _SWITCH = 0, 2, 3
_SELECT: Final = 2  # seq_force_screen_content_tools and seq_force_integer_mv: signalled per frame
AV1C_FIELDS: Final = 4  # bytes before the OBUs in an av1C record


def av1_flags(extradata: bytes, packets: Packets, _whole: bool = True) -> list[int]:
    """Return the `PacketFlag` bits of each AV1 packet, which is a temporal unit."""
    sequence = None
    for kind, body in _units(extradata[AV1C_FIELDS:]):
        if kind == AV1_SEQUENCE_HEADER:
            sequence = _sequence(body)
    flags = []
    for number, packet in enumerate(packets):
        frames = []
        for kind, body in _units(packet or b""):
            if kind == AV1_SEQUENCE_HEADER:
                sequence = _sequence(body)
            elif kind in (_FRAME_HEADER, _FRAME):
                frames.append(_frame(body, sequence))
        if not frames:
            raise FormatError(f"packet {number} contains no AV1 frame")
        flag = 0
        if frames[0][0]:
            flag |= PacketFlag.KEY
        if not any(refreshes for _, refreshes in frames):
            flag |= PacketFlag.DROPPABLE
        flags.append(flag)
    return flags


@dataclass(frozen=True, slots=True)
class _Sequence:
    """The fields of an AV1 sequence header that frame headers depend on."""

    simple: bool  # whether these fields, and so frame headers, can be parsed
    screen_content_tools: int = 0
    integer_mv: int = 0
    frame_id_bits: int = 0
    order_hint_bits: int = 0


def obus(data: Bytes) -> Iterator[tuple[int, int, int, int]]:
    """Yield of each OBU of a packet (section 5.3) its type, first byte, first byte of its payload, and end."""
    view = memoryview(data)
    position = 0
    while position < len(view):
        start, header = position, view[position]
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
        yield header >> 3 & 15, start, position, position + size
        position += size


def _units(data: Bytes) -> Iterator[tuple[int, memoryview]]:
    """Yield the type and payload of each OBU of a packet."""
    return ((kind, memoryview(data)[at:stop]) for kind, _, at, stop in obus(data))


def _sequence(body: memoryview) -> _Sequence:
    """Parse a sequence header (section 5.5) as far as frame headers depend on it."""
    bits = Bits(body[:_HEADER_BYTES])
    bits.read(4)  # seq_profile, still_picture
    if bits.read(1):  # reduced_still_picture_header
        return _Sequence(simple=False)
    if bits.read(1):  # timing_info_present_flag
        bits.read(64)
        if bits.read(1):  # equal_picture_interval
            bits.read_golomb()
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


def _frame(body: memoryview, sequence: _Sequence | None) -> tuple[bool, bool]:
    """Return whether a frame is a key frame, and whether it is stored in a reference slot (section 5.9.2).

    A frame that cannot be parsed this far counts as a reference and not as a key frame.
    """
    if sequence is None or not sequence.simple:
        return False, True
    bits = Bits(body[:_HEADER_BYTES])
    if bits.read(1):  # show_existing_frame: refreshes slots if it shows a key frame, which this header does not say
        return False, True
    kind, shown = bits.read(2), bits.read(1)
    if kind == _KEY_FRAME and shown:
        return True, True
    if not shown:
        bits.read(1)  # showable_frame
    resilient = kind == _SWITCH or bits.read(1)
    bits.read(1)  # disable_cdf_update
    screen = bits.read(1) if sequence.screen_content_tools == _SELECT else sequence.screen_content_tools
    if screen and sequence.integer_mv == _SELECT:
        bits.read(1)
    bits.read(sequence.frame_id_bits)
    if kind == _SWITCH:
        return False, True
    bits.read(1 + sequence.order_hint_bits)  # frame_size_override_flag
    if kind not in (_KEY_FRAME, _INTRA_ONLY) and not resilient:
        bits.read(3)  # primary_ref_frame
    return False, bits.read(8) != 0


class Bits:
    """Reads a header bit by bit, most significant bit first. Give it the header's bytes, not those of a whole frame."""

    __slots__ = ("left", "value")

    def __init__(self, data: Bytes) -> None:
        self.value, self.left = int.from_bytes(data, "big"), 8 * len(data)

    def read(self, count: int) -> int:
        """Read the next `count` bits as an unsigned integer."""
        self.left -= count
        if self.left < 0:
            raise FormatError("frame header ends too early")
        return self.value >> self.left & (1 << count) - 1

    def read_golomb(self) -> int:
        """Read an unsigned Exp-Golomb code (H.264 section 9.1), which AV1 calls uvlc (section 4.10.3)."""
        zeros = 0
        while not self.read(1):
            zeros += 1
        return (1 << zeros) - 1 + self.read(zeros) if zeros < 32 else 2**32 - 1


# Plain integers: combining members of a Flag takes microseconds, and this runs for every packet.
_KEY: Final = int(PacketFlag.KEY)
_DROPPABLE: Final = int(PacketFlag.DROPPABLE)
_HIDDEN: Final = int(PacketFlag.HIDDEN)

# Types of NAL units (ITU-T H.264 table 7-1, H.265 table 7-1): slices, and those of pictures at which a decoder discards
# all references (IDR).
_SLICES: Final = {Codec.H264: range(1, 6), Codec.HEVC: range(32)}
_IDR: Final = {Codec.H264: frozenset({5}), Codec.HEVC: frozenset({19, 20})}
_HEVC_SUB_LAYER_NON_REFERENCE: Final = frozenset({0, 2, 4, 6, 8, 10, 12, 14})
_HEVC_INTRA_RANDOM_ACCESS: Final = frozenset(range(16, 24))
_HEVC_LEADING: Final = frozenset({6, 7, 8, 9})


def packet_flags(codec: Codec, extradata: bytes, packets: Sequence[Bytes | None], *, whole: bool = True) -> UInt32Array:
    """Return the PacketFlag bits of every packet of a stream, uint32 [P].

    The first packet is KEY only if its own header says so.

    `whole`: whether all bytes of the packets are known; otherwise only their first bytes, or None for a packet that was
    not read. Not for AV1 and VP9, see `fastvid.format.headers`.
    """
    flags = _RULES[codec](extradata, packets, whole)
    return np.asarray(kept_parameters(codec, extradata, packets, flags, whole=whole), dtype=np.uint32)


def kept_parameters(
    codec: Codec, extradata: bytes, packets: Packets, flags: Sequence[int], *, whole: bool
) -> list[int]:
    """Return flags without DROPPABLE for packets that contain new parameter sets, which later packets need.

    `whole`: whether all bytes of the packets are known; otherwise only the parameter sets in the known bytes count.
    """
    return [
        flag & ~_DROPPABLE
        if flag & _DROPPABLE and packet is not None and changes_parameters(codec, extradata, packet, whole=whole)
        else flag
        for packet, flag in zip(packets, flags, strict=True)
    ]


def nal_units(packet: Bytes, length_size: int | None, *, whole: bool = True) -> Iterator[Bytes]:
    """Yield the NAL units of a packet, split by length prefixes of `length_size` bytes, or for None by start codes.

    `whole`: whether all bytes of the packet are known; otherwise the last unit may be incomplete.
    """
    view = memoryview(packet)
    if length_size is None:
        yield from _annex_b(view)
        return
    position = 0
    while position + length_size <= len(view):
        size = int.from_bytes(view[position : position + length_size], "big")
        position += length_size
        if whole and position + size > len(view):
            raise FormatError(f"NAL unit of {size} bytes exceeds its packet of {len(view)} bytes")
        if size and position < len(view):
            yield view[position : position + size]
        position += size


def nal_type(codec: Codec, unit: Bytes) -> int:
    """Return the type of a NAL unit of H.264 or HEVC."""
    return unit[0] & 31 if codec is Codec.H264 else unit[0] >> 1 & 63


def nal_length_size(codec: Codec, extradata: bytes) -> int | None:
    """Return the size of NAL length prefixes, or None for Annex B (start codes), as in AVI and MPEG-TS."""
    if len(extradata) < 7 or extradata[0] != 1:
        return None
    return (extradata[4 if codec is Codec.H264 else 21] & 3) + 1


PARAMETER_SETS: Final = {Codec.H264: frozenset({7, 8, 13, 15}), Codec.HEVC: frozenset({32, 33, 34})}
"""Types of NAL units: sequence and picture parameter sets, extensions, subsets (H.264 table 7-1, H.265 table 7-1)."""


def changes_parameters(codec: Codec, extradata: bytes, packet: Bytes, *, whole: bool = True) -> bool:
    """Return whether a packet contains parameter sets that the decoder's configuration record does not.

    `whole`: whether all bytes of the packet are known; otherwise only the known bytes are searched.
    """
    if codec is Codec.AV1:
        return any(kind == AV1_SEQUENCE_HEADER and bytes(body) not in extradata for kind, body in _units(packet))
    kinds = PARAMETER_SETS.get(codec)
    if kinds is None:
        return False
    units = nal_units(packet, nal_length_size(codec, extradata), whole=whole)
    return any(nal_type(codec, unit) in kinds and bytes(unit) not in extradata for unit in units)


def begins_afresh(codec: Codec, extradata: bytes, packet: Bytes) -> bool:
    """Return whether a decoder discards all references and derived state at a packet: an IDR picture, or a key frame.

    `codec`: H.264, HEVC or VP9.
    """
    if codec is Codec.VP9:
        return begins_with_vp9_key(packet)
    (slices,) = _slices(codec, extradata, [packet], whole=False)
    return bool(slices) and all(nal_type(codec, unit) in _IDR[codec] for unit in slices)


def parameter_sets(codec: Codec, record: bytes) -> Iterator[bytes]:
    """Yield the parameter sets of a decoder configuration record (14496-15, 5.3.3.1.2 for H.264, 8.3.3.1.2 for HEVC).

    Raises IndexError if the record ends inside one.
    """
    at = 5 if codec is Codec.H264 else 23
    for array in range(2 if codec is Codec.H264 else record[22]):
        if codec is Codec.H264:
            count, at = record[at] & (0xFF if array else 0x1F), at + 1
        else:
            count, at = record[at + 1] << 8 | record[at + 2], at + 3
        for _ in range(count):
            end = at + 2 + (record[at] << 8 | record[at + 1])
            if end > len(record):
                raise IndexError(end)
            yield record[at + 2 : end]
            at = end


def has_arithmetic_coding(extradata: bytes) -> bool:
    """Return whether H.264 pictures are coded by CABAC, according to the first picture parameter set of the record."""
    with contextlib.suppress(FormatError, IndexError):
        for unit in parameter_sets(Codec.H264, extradata) if nal_length_size(Codec.H264, extradata) else ():
            if unit and unit[0] & 31 == 8:  # a picture parameter set
                bits = unit_bits(unit)
                bits.read_golomb()  # number of this parameter set
                bits.read_golomb()  # number of its sequence parameter set
                return bool(bits.read(1))
    return False


def unit_bits(unit: Bytes) -> Bits:
    """Return the bits of an H.264 NAL unit after its header byte, without emulation prevention bytes (7.4.1)."""
    return Bits(bytes(unit[1:]).replace(b"\0\0\3", b"\0\0"))


def _slices(codec: Codec, extradata: bytes, packets: Packets, whole: bool) -> Iterator[list[Bytes]]:
    """Yield the slices of each packet; none if the known bytes of one that is not `whole` contain none."""
    length_size = nal_length_size(codec, extradata)
    for number, packet in enumerate(packets):
        units = () if packet is None else nal_units(packet, length_size, whole=whole)
        # The header of an HEVC unit has two bytes, but a unit of a damaged stream may have only one.
        slices = [unit for unit in units if len(unit) > 1 and nal_type(codec, unit) in _SLICES[codec]]
        if whole and not slices:
            raise FormatError(f"packet {number} contains no {'H.264' if codec is Codec.H264 else 'HEVC'} slice")
        yield slices


def _h264(extradata: bytes, packets: Packets, whole: bool) -> list[int]:
    flags = []
    for slices in _slices(Codec.H264, extradata, packets, whole):
        # All slices of an IDR picture are IDR, except those of a second field, which refers at most to the first field.
        key = slices and nal_type(Codec.H264, slices[0]) in _IDR[Codec.H264]
        # nal_ref_idc is zero in all slices of a picture or in none (7.4.1), but a packet may have two fields.
        droppable = slices and not any(unit[0] >> 5 & 3 for unit in slices)
        flags.append((_KEY if key else 0) | (_DROPPABLE if droppable else 0))
    return flags


def _hevc(extradata: bytes, packets: Packets, whole: bool) -> list[int]:
    pictures = list(_slices(Codec.HEVC, extradata, packets, whole))
    types = [{nal_type(Codec.HEVC, unit) for unit in slices} for slices in pictures]
    layers = [min((unit[1] & 7) - 1 for unit in slices) if slices else None for slices in pictures]
    # A picture that its own sub-layer does not refer to may still be a reference of higher sub-layers. The highest is
    # known only if every packet's is.
    highest = None if None in layers else max(layer for layer in layers if layer is not None)
    flags = []
    for number, (kinds, layer) in enumerate(zip(types, layers, strict=True)):
        # Leading pictures that follow a random access point need the GOP before it.
        is_last, following = number + 1 == len(types), types[number + 1 : number + 2]
        closed = is_last or (following[0] and not following[0] & _HEVC_LEADING)
        key = kinds and (kinds <= _IDR[Codec.HEVC] or (kinds <= _HEVC_INTRA_RANDOM_ACCESS and closed))
        droppable = kinds and kinds <= _HEVC_SUB_LAYER_NON_REFERENCE and layer == highest
        flags.append((_KEY if key else 0) | (_DROPPABLE if droppable else 0))
    return flags


def _vp9(_extradata: bytes, packets: Packets, _whole: bool) -> list[int]:
    frames = [[Vp9Frame(frame) for frame in vp9_superframe(memoryview(packet or b""))] for packet in packets]
    flags = []
    for number, packet_frames in enumerate(frames):
        if not packet_frames:
            raise FormatError(f"packet {number} contains no VP9 frame")
        flag = 0
        if packet_frames[0].key and not packet_frames[0].show_existing:
            flag |= _KEY
        if not any(frame.shown for frame in packet_frames):
            flag |= _HIDDEN
        # A frame inherits motion vectors, probabilities and segmentation from the previously decoded frame, reference
        # or not. Only a frame that resets them (key or error-resilient) does not depend on its predecessor.
        following = frames[number + 1][0] if number + 1 < len(frames) else None
        if not any(frame.refreshes for frame in packet_frames) and (following is None or following.independent):
            flag |= _DROPPABLE
        flags.append(flag)
    return flags


def vp9_superframe(packet: memoryview) -> list[memoryview]:
    """Split a VP9 packet into its frames, annex B of the bitstream specification."""
    if not len(packet):
        return []
    marker = packet[-1]
    if marker & 0xE0 != 0xC0:
        return [packet]
    count, width = (marker & 7) + 1, (marker >> 3 & 3) + 1
    index = 2 + count * width
    if len(packet) < index or packet[-index] != marker:
        return [packet]
    frames, position = [], 0
    for number in range(count):
        start = len(packet) - index + 1 + number * width
        size = int.from_bytes(packet[start : start + width], "little")
        if position + size > len(packet) - index:
            raise FormatError(f"VP9 frame of {size} bytes exceeds its packet of {len(packet)} bytes")
        if size:
            frames.append(packet[position : position + size])
        position += size
    return frames


class Vp9Frame:
    """The first fields of a VP9 uncompressed frame header (bitstream specification, section 6.2)."""

    __slots__ = ("_bits", "independent", "intra_only", "key", "profile", "refreshes", "show_existing", "shown")

    def __init__(self, frame: memoryview) -> None:
        self._bits = bits = Bits(frame[:_HEADER_BYTES])
        if bits.read(2) != 2:
            raise FormatError("VP9 frame has no frame marker")
        self.profile = bits.read(1) | bits.read(1) << 1
        if self.profile == 3:
            bits.read(1)
        self.show_existing = bool(bits.read(1))
        if self.show_existing:
            self.key, self.shown, self.refreshes, self.independent = False, True, False, False
            return
        self.key = not bits.read(1)
        self.shown = bool(bits.read(1))
        resilient = bool(bits.read(1))
        self.independent = self.key or resilient
        self.intra_only = False
        if self.key:
            self.refreshes = True
            return
        self.intra_only = False if self.shown else bool(bits.read(1))
        if not resilient:
            bits.read(2)  # reset_frame_context
        if self.intra_only:
            bits.read(24)  # frame_sync_code
            if self.profile:
                # In profiles 1 to 3 bit depth and chroma format follow; do not parse them, count it as a reference.
                self.refreshes = True
                return
        self.refreshes = bits.read(8) != 0

    def read_size(self) -> tuple[int, int] | None:
        """Return width and height in pixels; None for the size of an earlier picture. Call it once: it reads on."""
        bits = self._bits
        if self.profile:
            raise FormatError("VP9 pictures are not 8-bit 4:2:0 (profile 0)")
        if self.show_existing:
            return None
        if self.key:
            if bits.read(24) != _VP9_SYNC:
                raise FormatError("VP9 key frame has no sync code")
            bits.read(4)  # colour space and range
        elif not self.intra_only:
            bits.read(3 * 4)  # three references with their signs
            if any(bits.read(1) for _ in range(3)):  # found_ref: inherits the size of that reference
                return None
        return bits.read(16) + 1, bits.read(16) + 1


def begins_with_vp9_key(head: Bytes | None) -> bool:
    """Return whether the first frame of a VP9 packet is a key frame."""
    try:
        return bool(head) and Vp9Frame(memoryview(head or b"")).key
    except FormatError:
        return False


def _intra(_extradata: bytes, packets: Packets, _whole: bool) -> list[int]:
    return [_KEY | _DROPPABLE] * len(packets)


def _vp8(_extradata: bytes, packets: Packets, whole: bool) -> list[int]:
    # RFC 6386 section 9.1: bit 0 is clear in a key frame, bit 4 is set in a shown one. Which references a frame updates
    # is arithmetic-coded, so every frame counts as a reference.
    if whole and not all(packets):
        raise FormatError(f"packet {[bool(packet) for packet in packets].index(False)} is empty")
    firsts = [packet[0] if packet else None for packet in packets]
    return [0 if first is None else (0 if first & 1 else _KEY) | (0 if first & 16 else _HIDDEN) for first in firsts]


def _annex_b(view: memoryview) -> Iterator[memoryview]:
    data = bytes(view)
    start = data.find(b"\x00\x00\x01")
    while start >= 0:
        start += 3
        stop = data.find(b"\x00\x00\x01", start)
        unit = view[start : stop if stop >= 0 else len(data)]
        if len(unit):
            yield unit
        start = stop


_RULES: Final[dict[Codec, Callable[[bytes, Packets, bool], list[int]]]] = {
    Codec.AV1: av1_flags,
    Codec.H264: _h264,
    Codec.HEVC: _hevc,
    Codec.MJPEG: _intra,
    Codec.VP8: _vp8,
    Codec.VP9: _vp9,
}


def can_plan(codec: Codec) -> bool:
    """Return whether this module parses the codec; for other codecs, all packets before a frame are decoded."""
    return codec in _RULES
