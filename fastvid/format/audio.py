"""Read the audio track's description from an M4A's sample tables. No packet is decoded.

Audio has no rows in `.pkt`: an M4A is one piece of a few hundred kilobytes with its own packet tables. The facts store
its position in the tar, which is all that a reader needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from fastvid.errors import FormatError
from fastvid.format.demux import DECODER_CONFIG, DECODER_SPECIFIC, boxes, descriptor, find_box

# Bytes of fixed fields before the boxes of an AudioSampleEntry (ISO/IEC 14496-12, 12.2.3).
_AUDIO_ENTRY: Final = 28
_CODECS: Final = {b"mp4a": "aac", b"alac": "alac"}
_OBJECT_AAC: Final = 0x40  # MP4 registration authority


@dataclass(frozen=True, slots=True)
class AudioInfo:
    """The audio track of a sample.

    Attributes:
        codec: FFmpeg's name of the codec: "aac" or "alac".
        sample_rate: Samples per second and channel.
        channels: Number of channels.
        num_samples: Samples per channel in all packets, including those before the start (encoder delay).
        num_packets: Number of packets.
        extradata: The decoder's configuration record (AudioSpecificConfig, ALAC magic cookie).
    """

    codec: str
    sample_rate: int
    channels: int
    num_samples: int
    num_packets: int
    extradata: bytes


def index_m4a(data: memoryview | bytes) -> AudioInfo:
    """Read the audio track of an M4A.

    Raises:
        FormatError: If the file is not a plain M4A with one audio track, or contains another codec.
    """
    view = memoryview(data)
    for name, trak in boxes(find_box(view, b"moov", "file")):
        if name != b"trak":
            continue
        mdia = find_box(trak, b"mdia", "trak")
        if bytes(find_box(mdia, b"hdlr", "mdia")[8:12]) == b"soun":
            return _read_track(mdia)
    raise FormatError("M4A has no audio track")


def _read_track(mdia: memoryview) -> AudioInfo:
    header = find_box(mdia, b"mdhd", "mdia")
    rate = _number(header, 20 if header[0] else 12)
    tables = dict(boxes(find_box(find_box(mdia, b"minf", "mdia"), b"stbl", "minf")))
    for required in (b"stsd", b"stts", b"stsz"):
        if required not in tables:
            raise FormatError(f"M4A has no {required.decode()} table")
    name, entry = next(iter(boxes(tables[b"stsd"][8:])), (b"", memoryview(b"")))
    codec = _CODECS.get(name)
    if codec is None or not rate or len(entry) < _AUDIO_ENTRY:
        raise FormatError(f"M4A has audio codec {name!r} at {rate} Hz; supported are mp4a (AAC) and alac")
    inner = dict(boxes(entry[_AUDIO_ENTRY:]))
    times = tables[b"stts"]
    runs = [(_number(times, 8 + 8 * run), _number(times, 12 + 8 * run)) for run in range(_number(times, 4))]
    if codec == "aac":
        if descriptor(inner.get(b"esds"), DECODER_CONFIG)[:1] != bytes([_OBJECT_AAC]):
            raise FormatError("elementary stream of the M4A is not AAC")
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
        raise FormatError("M4A box ends too early")
    return int.from_bytes(view[position : position + 4], "big")
