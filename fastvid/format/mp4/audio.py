"""The audio track of a sample: an M4A in the tar, with its own packet tables. No packet is decoded.

Audio has no packet rows in `.pkt`: the M4A's own tables have them. `.pkt` has the M4A's position and the checksum of
each of its blocks, so that a reader checks what it reads of the tables and of the packets.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Final

import numpy as np

from fastvid.errors import FormatError
from fastvid.format.mp4.demux import (
    DECODER_CONFIG,
    DECODER_SPECIFIC,
    boxes,
    decode_times,
    descriptor,
    find_box,
    packet_offsets,
    packet_sizes,
)
from fastvid.format.stream_reader import BlockReader
from fastvid.runtime.arrays import IntArray

# Bytes of fixed fields before the boxes of an AudioSampleEntry (ISO/IEC 14496-12, 12.2.3).
_AUDIO_ENTRY: Final = 28
_CODECS: Final = {b"mp4a": "aac", b"alac": "alac"}
_OBJECT_AAC: Final = 0x40  # MP4 registration authority
_BOX_HEADER: Final = 16  # bytes of the longest box header
_MOST_SAMPLES: Final = 2**53  # exact as a float, and 6,000 years at 48 kHz


@dataclass(frozen=True, slots=True)
class AudioInfo:
    """The audio track of a sample, as in its facts."""

    codec: str
    sample_rate: int  # samples per second and channel
    channels: int
    num_samples: int  # samples per channel in all packets, including those before the start (encoder delay)
    num_packets: int
    extradata: bytes


@dataclass(frozen=True, slots=True, eq=False)
class AudioTrack:
    """The packets of an M4A's audio track, and the part of them that is heard."""

    info: AudioInfo
    offsets: IntArray  # first byte of each packet in the file, int64 [P]
    sizes: IntArray  # size of each packet in bytes, int64 [P]
    times: IntArray  # start of each packet and end of the last one, in samples of `info.sample_rate`, int64 [P + 1]
    start: int
    stop: int
    delay: Fraction  # seconds from the first frame of the video to the sample `start`


def index_m4a(data: memoryview | bytes) -> AudioInfo:
    """Read the description of an M4A's audio track."""
    return read_track(find_box(memoryview(data), b"moov", "file"), len(data)).info


def load_track(reader: BlockReader) -> AudioTrack:
    """Read the audio track of an M4A, of whose bytes only the tables are read."""
    at = 0
    while at + 8 <= reader.size:
        header = reader.bytes(at, min(_BOX_HEADER, reader.size - at))
        size, name = int.from_bytes(header[:4], "big"), bytes(header[4:8])
        size = int.from_bytes(header[8:16], "big") if size == 1 else size or reader.size - at
        if size < 8:
            break
        if name == b"moov":
            return read_track(find_box(reader.bytes(at, size), b"moov", "file"), reader.size)
        at += size
    raise FormatError("M4A has no moov box")


def read_track(moov: memoryview, file_size: int) -> AudioTrack:
    """Read the first audio track of an M4A.

    `file_size`: bytes of the file.
    """
    header = find_box(moov, b"mvhd", "moov")
    movie_scale = _number(header, 20 if header[0] else 12)
    for name, trak in boxes(moov):
        if name != b"trak":
            continue
        mdia = find_box(trak, b"mdia", "trak")
        if bytes(find_box(mdia, b"hdlr", "mdia")[8:12]) == b"soun":
            return _read_trak(trak, mdia, movie_scale, file_size)
    raise FormatError("M4A has no audio track")


def _read_trak(trak: memoryview, mdia: memoryview, movie_scale: int, file_size: int) -> AudioTrack:
    header = find_box(mdia, b"mdhd", "mdia")
    rate = _number(header, 20 if header[0] else 12)
    tables = dict(boxes(find_box(find_box(mdia, b"minf", "mdia"), b"stbl", "minf")))
    for required in (b"stsd", b"stts", b"stsc", b"stsz"):
        if required not in tables:
            raise FormatError(f"M4A has no {required.decode()} table")
    name, entry = next(iter(boxes(tables[b"stsd"][8:])), (b"", memoryview(b"")))
    codec = _CODECS.get(name)
    if codec is None or not rate or len(entry) < _AUDIO_ENTRY:
        raise FormatError(f"M4A has audio codec {name!r} at {rate} Hz; supported are mp4a (AAC) and alac")
    total = _total(tables[b"stts"])
    if total >= _MOST_SAMPLES:
        raise FormatError(f"M4A claims {total} audio samples")
    sizes = packet_sizes(tables[b"stsz"])
    offsets = packet_offsets(tables, sizes)
    if len(sizes) and (offsets.min() < 0 or int((offsets + sizes).max()) > file_size):
        raise FormatError("M4A sample table points outside the file")
    info = AudioInfo(
        codec=codec,
        sample_rate=rate,
        channels=int.from_bytes(entry[16:18], "big"),
        num_samples=total,
        num_packets=len(sizes),
        extradata=_extradata(codec, dict(boxes(entry[_AUDIO_ENTRY:]))),
    )
    times = np.append(decode_times(tables[b"stts"], len(sizes)), info.num_samples).astype(np.int64)
    delay, start, length = _edits(trak)
    stop = info.num_samples
    if length and movie_scale:
        stop = min(stop, start + -(-length * rate // movie_scale))
    return AudioTrack(info, offsets, sizes, times, start, stop, Fraction(delay, movie_scale or 1))


def _extradata(codec: str, inner: dict[bytes, memoryview]) -> bytes:
    if codec != "aac":
        return bytes(inner.get(b"alac", b""))
    if descriptor(inner.get(b"esds"), DECODER_CONFIG)[:1] != bytes([_OBJECT_AAC]):
        raise FormatError("elementary stream of the M4A is not AAC")
    return descriptor(inner.get(b"esds"), DECODER_SPECIFIC)


def _total(times: memoryview) -> int:
    runs = [(_number(times, 8 + 8 * run), _number(times, 12 + 8 * run)) for run in range(_number(times, 4))]
    return sum(count * step for count, step in runs)


def _edits(trak: memoryview) -> tuple[int, int, int]:
    """Return the delay in movie ticks, the first sample heard, and the length in movie ticks; 0 for the whole track."""
    edits = next((body for name, body in boxes(trak) if name == b"edts"), None)
    if edits is None:
        return 0, 0, 0
    table = find_box(edits, b"elst", "edts")
    width, delay, heard = 8 if len(table) and table[0] == 1 else 4, 0, list[tuple[int, int]]()
    for number in range(_number(table, 4)):
        at = 8 + number * (2 * width + 4)
        if at + 2 * width > len(table):
            raise FormatError("M4A edit list ends too early")
        length = int.from_bytes(table[at : at + width], "big")
        start = int.from_bytes(table[at + width : at + 2 * width], "big", signed=True)
        if start >= 0:
            heard.append((start, length))
        elif not heard:
            delay += length
    if len(heard) > 1:
        raise FormatError(f"M4A edit list has {len(heard)} segments, more than 1 is not supported")
    return (delay, *(heard[0] if heard else (0, 0)))


def _number(view: memoryview, position: int) -> int:
    if position + 4 > len(view):
        raise FormatError("M4A box ends too early")
    return int.from_bytes(view[position : position + 4], "big")
