"""Write field-coded H.264 (PAFF) bit by bit, which no encoder here can: a picture of every field, raw macroblocks.

Each frame is an I field of its even lines, then a P field of its odd lines (ITU-T H.264, 7.3.3).
"""

from collections.abc import Iterator

import numpy as np

from tests.golden.films import _IDR, _INTRA_IN_P, _PCM, _SLICE, _SPS, MB, _Bits, _picture_parameters

_KEY_EVERY = 12


def paff(frames: np.ndarray) -> list[bytes]:
    """Return the fields of luma frames, uint8 [N, H, W], as Annex B access units, two for each frame."""
    fields = []
    for number, frame in enumerate(np.clip(frames, 16, 235)):
        for bottom in (0, 1):
            key = number % _KEY_EVERY == 0 and not bottom
            bits = _Bits()
            bits.put(8, 3 << 5 | (_IDR if key else _SLICE))
            bits.ue(0, 5 if bottom else 7, 0)
            bits.put(4, number % _KEY_EVERY)
            bits.put(2, 2 | bottom)  # a field
            if key:
                bits.ue(number // _KEY_EVERY % 2)
            bits.put(8, 2 * (number % _KEY_EVERY) + bottom)
            if bottom:
                bits.put(2, 0)  # the usual references
            bits.put(2 if key else 1, 0)
            bits.ue(0, 1)  # no change of the quantiser, no deblocking
            for block in _blocks(frame[bottom::2]):
                bits.ue(*((0, _INTRA_IN_P + _PCM) if bottom else (_PCM,)))  # no skipped macroblock before it
                bits.raw(block)
            start = b"\0\0\0\1"
            head = b"".join(start + unit for unit in _parameters(*frames.shape[1:])) if key else b""
            fields.append(start + bytes([9, 0xF0]) + head + start + bits.end())
    return fields


def _blocks(field: np.ndarray) -> Iterator[bytes]:
    for top in range(0, field.shape[0], MB):
        for left in range(0, field.shape[1], MB):
            yield field[top : top + MB, left : left + MB].tobytes() + bytes([128]) * 128


def _parameters(height: int, width: int) -> tuple[bytes, bytes]:
    sps = _Bits()
    for byte in (3 << 5 | _SPS, 77, 0, 30):
        sps.put(8, byte)
    sps.ue(0, 0, 0, 4, 2)  # set, 4 bits of frame number, 8 bits of display order, two references
    sps.put(1, 0)
    sps.ue(width // MB - 1, height // MB // 2 - 1)
    # Fields allowed, no field macroblocks, direct 8x8, no cropping; VUI: no aspect, overscan, colour and chroma place.
    sps.put(9, 0b001010000)
    sps.put(1, 1)  # timing: 50 fields a second
    sps.put(32, 1)
    sps.put(32, 50)
    sps.put(1, 1)
    sps.put(4, 0)  # no HRD twice, no picture structure, no restrictions
    return sps.end(), _picture_parameters()
