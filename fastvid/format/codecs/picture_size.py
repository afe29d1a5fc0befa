"""Read the picture size from a packet's own headers.

For decoders that trust the container: DALI on a CPU writes past its buffer if VP9 pictures are larger than the
container says.
"""

from __future__ import annotations

from typing import Final

from fastvid.errors import FormatError
from fastvid.format.codecs.bitstream import vp9_superframe
from fastvid.format.schema import Codec

# Start-of-frame markers of JPEG (ITU-T T.81 table B.1): C0 to CF except the markers of tables and extensions.
_JPEG_FRAME: Final = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_JPEG_SCAN: Final = 0xDA
_VP9_SYNC: Final = 0x498342


def declared_size(codec: Codec, packet: memoryview) -> tuple[int, int] | None:
    """Return the width and height of a packet's pictures; None if inherited from an earlier picture."""
    if codec is Codec.MJPEG:
        return _jpeg_size(packet)
    assert codec is Codec.VP9
    sizes = {_vp9_size(frame) for frame in vp9_superframe(packet)} - {None}
    if len(sizes) > 1:
        raise FormatError(f"pictures of one packet have different sizes: {sorted(filter(None, sizes))}")
    return sizes.pop() if sizes else None


def _jpeg_size(packet: memoryview) -> tuple[int, int]:
    position = 2
    while position + 9 <= len(packet) and packet[position] == 0xFF:
        marker = packet[position + 1]
        if marker in _JPEG_FRAME:
            height = int.from_bytes(packet[position + 5 : position + 7], "big")
            return int.from_bytes(packet[position + 7 : position + 9], "big"), height
        if marker == _JPEG_SCAN:
            break
        # Fill bytes may precede a marker.
        position += 1 if marker == 0xFF else 2 + int.from_bytes(packet[position + 2 : position + 4], "big")
    raise FormatError("JPEG picture has no frame header")


def _vp9_size(frame: memoryview) -> tuple[int, int] | None:
    """Parse a VP9 frame header (bitstream specification, section 6.2) up to the frame size."""
    header = _HeaderBits(frame)
    if header.read(2) != 2:
        raise FormatError("VP9 frame has no frame marker")
    if header.read(2):
        raise FormatError("VP9 pictures are not 8-bit 4:2:0 (profile 0)")
    if header.read(1):  # show_existing_frame
        return None
    inter, shown, resilient = header.read(1), header.read(1), header.read(1)
    if not inter:
        if header.read(24) != _VP9_SYNC:
            raise FormatError("VP9 key frame has no sync code")
        header.read(4)  # colour space and range
        return header.size()
    intra_only = 0 if shown else header.read(1)
    if not resilient:
        header.read(2)  # reset_frame_context
    if intra_only:
        header.read(24 + 8)  # sync code, refresh_frame_flags
        return header.size()
    header.read(8 + 3 * 4)  # refresh_frame_flags, three references with their signs
    for _ in range(3):
        if header.read(1):  # found_ref: inherits the size of that reference
            return None
    return header.size()


class _HeaderBits:
    """Reads bits from the start of a frame, most significant bit first."""

    __slots__ = ("left", "value")

    def __init__(self, frame: memoryview) -> None:
        # The size field ends at most 66 bits in; missing bytes read as 0.
        first = bytes(frame[:12]).ljust(12, b"\0")
        self.value, self.left = int.from_bytes(first, "big"), 96

    def read(self, count: int) -> int:
        self.left -= count
        return self.value >> self.left & (1 << count) - 1

    def size(self) -> tuple[int, int]:
        return self.read(16) + 1, self.read(16) + 1
