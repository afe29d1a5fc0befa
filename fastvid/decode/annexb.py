"""Rewrite a clip's H.264 or HEVC packets with start codes, for decoders that read an elementary stream (Annex B).

MP4 stores parameter sets once, outside the packets, and a length before each NAL unit (ISO/IEC 14496-15). An elementary
stream repeats the parameter sets at every packet where decoding may start, and has a start code before each NAL unit
(ITU-T H.264 and H.265, annex B).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np

from fastvid.decode.request import EncodedClip
from fastvid.errors import FormatError
from fastvid.format.codecs.bitstream import nal_length_size, nal_units
from fastvid.format.schema import Codec
from fastvid.runtime.arrays import UInt8Array

_START_CODE: Final = b"\0\0\0\1"
# nal_unit_type of an access unit delimiter, which must be the first unit (H.264 table 7-1, H.265 table 7-1).
_DELIMITER: Final = {Codec.H264: 9, Codec.HEVC: 35}


@dataclass(frozen=True, slots=True, eq=False)
class ElementaryStream:
    """Packets of a clip as a decoder without a container takes them."""

    data: UInt8Array  # their bytes, uint8
    starts: list[int]  # first byte of each packet in `data`
    sizes: list[int]  # size of each packet in bytes


def elementary_stream(clip: EncodedClip) -> ElementaryStream:
    """Return a clip's packets in the elementary stream of its codec.

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
    units = _avcc(extradata) if codec is Codec.H264 else _hvcc(extradata)
    try:
        return b"".join(_START_CODE + unit for unit in units)
    except IndexError as error:
        raise FormatError(f"extradata of {codec.label}, {len(extradata)} bytes, ends inside a parameter set") from error


def _avcc(record: bytes) -> Iterator[bytes]:
    """Yield the units of an AVCDecoderConfigurationRecord (14496-15, 5.3.3.1.2): sequence, then picture sets."""
    at = 5
    for mask in (0x1F, 0xFF):
        count, at = record[at] & mask, at + 1
        for _ in range(count):
            unit, at = _unit(record, at)
            yield unit


def _hvcc(record: bytes) -> Iterator[bytes]:
    """Yield the units of an HEVCDecoderConfigurationRecord (14496-15, 8.3.3.1.2), array by array."""
    at = 23
    for _ in range(record[22]):
        count, at = record[at + 1] << 8 | record[at + 2], at + 3
        for _ in range(count):
            unit, at = _unit(record, at)
            yield unit


def _unit(record: bytes, at: int) -> tuple[bytes, int]:
    end = at + 2 + (record[at] << 8 | record[at + 1])
    if end > len(record):
        raise IndexError(end)
    return record[at + 2 : end], end


def _type(codec: Codec, header: int) -> int:
    return header & 31 if codec is Codec.H264 else header >> 1 & 63
