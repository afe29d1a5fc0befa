"""Where the packets of a video are, when they are shown and where decoding may start, as its container says.

Of a plain MP4 only the tables are read: two or three small reads, wherever they are in the file. Files of every other
container are read from end to end by FFmpeg's demuxer, because they have no table of all packets; no copy is stored.

`FileReader` reads parts of a file on a disk or in an object store.
"""

from __future__ import annotations

import io
import os
import zlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, Final

import numpy as np

from fastvid.decode.clips import coalesce, room_for
from fastvid.errors import FormatError, SourceError
from fastvid.format.headers import WHOLE_PACKETS, FieldPairs
from fastvid.format.mp4 import Declared, Track, find_moov, frame_rate, read_moov
from fastvid.format.presentation import usual_step
from fastvid.format.schema import Codec
from fastvid.media.container import Demuxed, check_fragments, check_pixels, open_demuxer
from fastvid.media.describe import declared
from fastvid.media.ffmpeg import Limits
from fastvid.media.probe import HEAD_BYTES as CONTAINER_BYTES
from fastvid.media.probe import sniff
from fastvid.media.prove import decoded_codec, found_at, nearest_rate
from fastvid.media.reasons import Reason, unusable
from fastvid.runtime.arrays import BoolArray, IntArray, UInt32Array
from fastvid.runtime.values import sha256_of_pieces
from fastvid.storage import Storage
from fastvid.storage.protocol import Version
from fastvid.storage.urls import open_file

BLOCK: Final = 1 << 16
"""Smallest read in bytes: it contains the tables of most MP4s of a minute."""

AHEAD: Final = 1 << 22
"""Largest size of a read in bytes when a file is read from end to end."""

KEPT: Final = 1 << 26
"""Most bytes of a file that are cached: a packet is compared with the bytes that the demuxer has just read."""


class FileReader(io.RawIOBase):
    """One version of a file, local or remote: read by ranges, or by a demuxer like an open file. Caches blocks.

    `head`: the file's first bytes, if they were read together with the version. Attribute `size`: in bytes.
    """

    def __init__(self, storage: Storage, name: str, version: Version, *, head: bytes | memoryview = b"") -> None:
        super().__init__()
        self._storage, self._name = storage, name
        self.version, self.size = version, version.size
        self._blocks: OrderedDict[int, bytes] = OrderedDict()
        self._keep(0, memoryview(head))
        self._place = self._begun = self._expected = 0  # where to read, where reads in a row began, where they ended

    @classmethod
    def open(cls, location: str) -> FileReader:
        """Open the current version of a file, given by its absolute path or URL."""
        storage, name = open_file(location)
        begun = storage.begin(name, BLOCK)
        if begun is None:
            raise SourceError("the file is not there", reason=Reason.MISSING)
        version, head = begun
        return cls(storage, name, version, head=head)

    @property
    def is_local(self) -> bool:
        """Whether the file is on a disk, where small reads are cheap."""
        return self._storage.concurrency == 1

    def part(self, offset: int, size: int, *, ahead: int = 0) -> bytes:
        """Return a range of the file, truncated at the file's end. Reads and caches whole blocks.

        `offset`: first byte. `size`: number of bytes. `ahead`: if blocks are missing from the cache, also read the
        following ones up to this many bytes after `offset`.
        """
        stop = min(offset + size, self.size)
        if offset >= stop:
            return b""
        first, last = offset // BLOCK, (stop - 1) // BLOCK
        missing = [block for block in range(first, last + 1) if block not in self._blocks]
        if missing:
            follows = (min(offset + ahead, self.size) - 1) // BLOCK
            self._load(missing[0], max(missing[-1], follows))
        joined = b"".join(self._kept(block) for block in range(first, last + 1))
        return joined[offset - first * BLOCK : stop - first * BLOCK]

    def sha256(self) -> str:
        """Return the SHA-256 of the file, in hex, without caching its bytes."""
        places = ((at, min(KEPT, self.size - at)) for at in range(0, self.size, KEPT))
        return sha256_of_pieces(piece for place in places for piece in self.parts([place]))

    def whole(self) -> bytes:
        """Return all bytes of the file, without caching them."""
        (data,) = self.parts([(0, self.size)]) if self.size else (b"",)
        return data

    def parts(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return several ranges, given as (offset, size), with one read of the storage, which may be many requests.

        Ranges in the cache are not read again; those that are read are not cached.
        """
        missing = [one for one in ranges if not self._in_blocks(*one)]
        data, starts = memoryview(b""), list[int]()
        if missing:
            starts, runs = coalesce([at for at, _ in missing], [size for _, size in missing], self._storage.gap)
            data, places = room_for(runs, None)
            self._storage.read_into(self._name, places, self.version)
        read = dict(zip(missing, starts, strict=True))
        return [bytes(data[read[one] :][: one[1]]) if one in read else self.part(*one) for one in ranges]

    def readable(self) -> bool:
        """See `io.IOBase`."""
        return True

    def seekable(self) -> bool:
        """See `io.IOBase`."""
        return True

    def tell(self) -> int:
        """See `io.IOBase`."""
        return self._place

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """See `io.IOBase`."""
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self.size}[whence]
        self._place = max(0, start + offset)
        return self._place

    def readinto(self, buffer: memoryview, /) -> int:  # type: ignore[override]
        """See `io.RawIOBase`. Read ahead as many bytes as reads have followed each other."""
        view = memoryview(buffer)
        if not 0 <= self._place - self._expected <= BLOCK:
            self._begun = self._place
        data = self.part(self._place, len(view), ahead=max(2 * BLOCK, min(self._place - self._begun, AHEAD)))
        view[: len(data)] = data
        self._place += len(data)
        self._expected = self._place
        return len(data)

    def _load(self, first: int, last: int) -> None:
        start, stop = first * BLOCK, min((last + 1) * BLOCK, self.size)
        data = memoryview(bytearray(stop - start))
        self._storage.read_into(self._name, [(start, data)], self.version)
        self._keep(first, data)

    def _keep(self, first: int, data: memoryview) -> None:
        """Cache the complete blocks in `data`, which begins with block `first`; an incomplete last one is left out."""
        last = first + len(data) // BLOCK if first * BLOCK + len(data) < self.size else first - (-len(data) // BLOCK)
        for block in range(first, last):
            self._blocks[block] = bytes(data[(block - first) * BLOCK :][:BLOCK])
        most = max(KEPT // BLOCK, last - first)
        while len(self._blocks) > most:
            self._blocks.popitem(last=False)

    def _in_blocks(self, offset: int, size: int) -> bool:
        """Return whether all blocks of a range are cached; False if it is empty or exceeds the file."""
        if size < 1 or offset + size > self.size:
            return False
        return all(block in self._blocks for block in range(offset // BLOCK, (offset + size - 1) // BLOCK + 1))

    def _kept(self, block: int) -> bytes:
        if block not in self._blocks:
            self._load(block, block)
        return self._blocks[block]


# How many first bytes of each demuxed packet are kept, to parse its headers.
_KEPT_HEAD: Final = 4096
# Bytes read with the header of a box: the tables of several minutes of video.
_TABLES_AHEAD: Final = 1 << 18


@dataclass(frozen=True, slots=True)
class Tables:
    """The packets of a file's first video stream, in decode order."""

    container: str
    codec: Codec
    extradata: bytes
    rate: Fraction  # mean frames per second of the shown frames
    time_base: Fraction  # seconds per tick
    offsets: IntArray  # first byte of each packet in the file, int64 [P]
    sizes: IntArray  # size of each packet in bytes, int64 [P]
    pts: IntArray  # presentation time of each packet in ticks, int64 [P]
    shown: BoolArray  # whether the packet's frame is shown, bool [P]: an edit list hides others
    sync: BoolArray  # whether the container calls it a key packet, bool [P]
    heads: Sequence[bytes | None]  # first bytes of each packet, None for those not read
    checksums: UInt32Array | None = None  # CRC-32 of each packet, uint32 [P]; None if the packets were not read
    declared: Declared = field(default_factory=Declared)
    aspect: Fraction | None = None  # width of a pixel divided by its height, if FFmpeg's demuxer knows it
    disposable: BoolArray | None = None  # whether the container says that nothing refers to the packet, bool [P]


def read_tables(file: FileReader, limits: Limits) -> Tables:
    """Read the packet tables of a file, from its MP4 tables or with FFmpeg's demuxer."""
    container, track = sniff(file.part(0, CONTAINER_BYTES)), None
    if container == "mov":
        try:
            # After the frames come the tables and little else: read them at once.
            moov = find_moov(lambda at, n: file.part(at, n, ahead=_TABLES_AHEAD if at else 0), file.size)
            track = read_moov(moov, file.size)
        except FormatError:
            check_fragments(file.part, file.size)  # fragments, several edits and what else only a full demuxer reads
    said = declared(container, file.part, file.size)
    if track is not None:
        return replace(_from_track(track, container, limits), declared=said)
    return _demuxed(file, container, limits, said)


def _from_track(track: Track, container: str, limits: Limits) -> Tables:
    count = len(track.sizes)
    check_pixels(track.width, track.height, limits)
    if count > limits.max_frames:
        raise SourceError(f"file has more than {limits.max_frames} frames", reason=Reason.TOO_LONG)
    if not track.shown.any():
        raise SourceError(f"none of the {count} packets shows a frame", reason=Reason.NO_FRAMES)
    return Tables(
        container=container,
        codec=track.codec,
        extradata=track.extradata,
        rate=_rate(track.pts, track.shown, track.timescale, track.last),
        time_base=Fraction(1, track.timescale),
        offsets=track.offsets,
        sizes=track.sizes,
        pts=track.pts,
        shown=track.shown,
        sync=track.sync,
        heads=[None] * count,
        disposable=track.disposable,
    )


# What is recorded of each demuxed packet: attributes of `Tables`.
_NOTED: Final = np.dtype(
    [("offsets", "i8"), ("sizes", "i8"), ("pts", "i8"), ("shown", "?"), ("sync", "?"), ("checksums", "u4")]
)


def _demuxed(file: FileReader, container: str, limits: Limits, said: Declared) -> Tables:
    """Return the packets that FFmpeg's demuxer finds, reading the file from end to end."""
    noted, heads, last = list[tuple[Any, ...]](), list[bytes | None](), 0
    with open_demuxer(file, container) as source:
        demuxed = Demuxed(container, source, limits)
        codec = decoded_codec(demuxed.stream)
        kept = limits.memory_bytes if codec in WHOLE_PACKETS else _KEPT_HEAD
        fields = FieldPairs(codec.label, demuxed.extradata)
        for packet in demuxed:
            if packet.size:
                data, number = bytes(packet), len(noted)
                _check(packet, number, is_second=fields.completes(memoryview(data)))
                at = found_at(file.part, data, number, packet.pos, sum(noted[-1][:2]) if noted else 0)
                times = packet.pts, not packet.is_discard, packet.is_keyframe
                noted.append((at, len(data), *times, zlib.crc32(data)))
                heads.append(data[:kept])
                last = packet.duration or last
        demuxed.check(file.part, file.size)
        context = demuxed.stream.codec_context
        names = context.color_primaries, context.color_trc, context.colorspace, context.color_range
        primaries, transfer, matrix, range_ = map(int, names)
    table = np.array(noted, _NOTED)
    if not table["shown"].any():
        raise SourceError(f"none of the {len(table)} packets shows a frame", reason=Reason.NO_FRAMES)
    rate, time_base = demuxed.rate, demuxed.time_base
    count = int(np.count_nonzero(table["shown"]))
    if time_base.numerator == 1 and (last or count > 1):
        measured = _rate(table["pts"], table["shown"], time_base.denominator, last)
        rate = nearest_rate(measured, rate, count, time_base)
    columns: dict[str, Any] = {name: np.ascontiguousarray(table[name]) for name in _NOTED.names or ()}
    said = replace(said, colours=(primaries, transfer, matrix, range_))
    known: dict[str, Any] = {"heads": heads, "aspect": demuxed.aspect, "declared": said}
    return Tables(container, codec, demuxed.extradata, rate, time_base, **columns, **known)


def _check(packet: Any, number: int, *, is_second: bool) -> None:
    if packet.is_corrupt:
        raise SourceError(f"packet {number} is truncated", reason=Reason.TRUNCATED)
    if packet.pts is None:
        raise unusable(f"packet {number} has no time")
    if is_second and number:
        raise unusable("its frames are pairs of fields")


def with_heads(tables: Tables, heads: Sequence[bytes | None]) -> Tables:
    """Return tables with the first bytes of the packets; with checksums if `heads` contains every packet whole."""
    whole = all(head is not None and len(head) == size for head, size in zip(heads, tables.sizes.tolist(), strict=True))
    checksums = np.asarray([zlib.crc32(head or b"") for head in heads], np.uint32) if whole else None
    return replace(tables, heads=heads, checksums=checksums)


def _rate(pts: IntArray, shown: BoolArray, ticks: int, only: int) -> Fraction:
    """Return the mean rate of the shown frames. `only`: duration in ticks of the frame if the video has just one."""
    times = np.sort(pts[shown])
    return frame_rate(times, ticks, last=usual_step(np.diff(times), only))
