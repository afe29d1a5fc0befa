"""Reads what the sample tables of an M4A say of its sound. No packet is decoded.

Sound has no rows in `.pkt`: an M4A is a few hundred kilobytes that lie in one piece, and holds its own packet tables.
The facts say where it lies in the tar, so that a reader needs nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from fastvid.errors import FormatError
from fastvid.format.demux import DECODER_CONFIG, DECODER_SPECIFIC, boxes, descriptor, find_box

# An AudioSampleEntry's fixed fields end here and its boxes begin (ISO/IEC 14496-12, 12.2.3).
_AUDIO_ENTRY: Final = 28
_CODECS: Final = {b"mp4a": "aac", b"alac": "alac"}
_OBJECT_AAC: Final = 0x40  # MP4 registration authority


@dataclass(frozen=True, slots=True)
class AudioInfo:
    """The sound of a sample.

    Attributes:
        codec: FFmpeg's name of the codec: "aac" or "alac".
        sample_rate: Samples a second of each channel.
        channels: Channels.
        num_samples: Samples of each channel that the packets hold, those before the start (encoder delay) included.
        num_packets: Packets.
        extradata: The decoder's configuration record (AudioSpecificConfig, ALAC magic cookie).
    """

    codec: str
    sample_rate: int
    channels: int
    num_samples: int
    num_packets: int
    extradata: bytes


def index_m4a(data: memoryview | bytes) -> AudioInfo:
    """The sound of an M4A.

    Raises:
        FormatError: The file is no plain M4A with one audio track, or holds another codec.
    """
    view = memoryview(data)
    for name, trak in boxes(find_box(view, b"moov", "file")):
        if name != b"trak":
            continue
        mdia = find_box(trak, b"mdia", "trak")
        if bytes(find_box(mdia, b"hdlr", "mdia")[8:12]) == b"soun":
            return _read_track(mdia)
    raise FormatError("the M4A has no audio track")


def _read_track(mdia: memoryview) -> AudioInfo:
    header = find_box(mdia, b"mdhd", "mdia")
    rate = _number(header, 20 if header[0] else 12)
    tables = dict(boxes(find_box(find_box(mdia, b"minf", "mdia"), b"stbl", "minf")))
    for required in (b"stsd", b"stts", b"stsz"):
        if required not in tables:
            raise FormatError(f"the M4A lacks its {required.decode()} table")
    name, entry = next(iter(boxes(tables[b"stsd"][8:])), (b"", memoryview(b"")))
    codec = _CODECS.get(name)
    if codec is None or not rate or len(entry) < _AUDIO_ENTRY:
        raise FormatError(f"audio codec {name!r} at {rate} samples a second is not one that an M4A of fastvid holds")
    inner = dict(boxes(entry[_AUDIO_ENTRY:]))
    times = tables[b"stts"]
    runs = [(_number(times, 8 + 8 * run), _number(times, 12 + 8 * run)) for run in range(_number(times, 4))]
    if codec == "aac":
        if descriptor(inner.get(b"esds"), DECODER_CONFIG)[:1] != bytes([_OBJECT_AAC]):
            raise FormatError("the M4A's elementary stream is not AAC")
        extradata = descriptor(inner.get(b"esds"), DECODER_SPECIFIC)
    else:
        extradata = bytes(inner.get(b"alac", b""))
    return AudioInfo(
        codec=codec,
        sample_rate=rate,
        channels=int.from_bytes(entry[16:18], "big"),
        num_samples=sum(count * step for count, step in runs),
        num_packets=_number(tables[b"stsz"], 8),
        extradata=extradata,
    )


def _number(view: memoryview, position: int) -> int:
    if position + 4 > len(view):
        raise FormatError("an M4A box ends too early")
    return int.from_bytes(view[position : position + 4], "big")
