"""One shard: a tar and its three sidecars, which are derived from it.

    data-000000.tar       the samples; the only file that is not derived
    data-000000.idx       index for DALI's webdataset reader
    data-000000.parquet   facts: properties of each sample's streams, for people and queries
    data-000000.pkt       index for the loader, read by range: header, streams, extradata, audio, packets

Instead of a tar, a shard may have a list of video files that the dataset does not contain, `fastvid.format.in_place`.

`fastvid.format.writing` writes shards; here they are read, by `StreamReader` for the bytes of a video stream and
`BlockReader` for those of a sound.
"""

from __future__ import annotations

import struct
import zlib
from collections import namedtuple
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, Final, TypeVar

import numpy as np

from fastvid.errors import ChecksumError, FormatError, StorageError, UsageError
from fastvid.format import schema
from fastvid.format.in_place import ListedFile, Root, read_files
from fastvid.format.packets import TABLES, PacketTable, StreamInfo, stream_info
from fastvid.format.presentation import Coded
from fastvid.runtime.values import sha256
from fastvid.storage import Storage
from fastvid.storage.protocol import CHANGED, CHANGED_HINT, MOVED_HINT, Version, is_missing, is_replaced
from fastvid.storage.urls import open_file

_CODES: Final = {"u1": "B", "u2": "H", "u4": "I", "u8": "Q", "i4": "i", "f4": "f"}


class RecordReader:
    """Reads records of a packed little-endian dtype as Python numbers, in a tenth of the time of numpy arrays."""

    def __init__(self, dtype: np.dtype[Any], name: str) -> None:
        fields = dtype.names or ()
        codes = [_code(dtype[field]) for field in fields]
        self._struct = struct.Struct("<" + "".join(codes))
        assert self._struct.size == dtype.itemsize
        # Field names come from the dtype, so that each field is defined once.
        record: Any = namedtuple(name, fields)  # type: ignore[misc]
        self._make = record._make

    def read(self, data: memoryview, offset: int) -> Any:
        """Return the record at a byte offset as a named tuple."""
        return self._make(self._struct.unpack_from(data, offset))


def _code(field: np.dtype[Any]) -> str:
    if field.kind == "S":
        return f"{field.itemsize}s"
    return _CODES[field.str[1:]]


_HEADERS: Final = RecordReader(schema.PKT_HEADER_DTYPE, "Header")
# Readers of the rows of streams, by the size of a row: rows of version 2.0, and rows with a description.
_STREAMS: Final = {
    schema.STREAM_DTYPE.itemsize: RecordReader(schema.STREAM_DTYPE, "Stream"),
    schema.DESCRIBED_DTYPE.itemsize: RecordReader(schema.DESCRIBED_DTYPE, "DescribedStream"),
}
# What `stream_info` gets of a row.
_DESCRIBING: Final = attrgetter(
    "codec", "width", "height", "num_frames", "fps_num", "fps_den", "range", "matrix", "flags", "flow_bound"
)
_AUDIO: Final = RecordReader(schema.AUDIO_DTYPE, "AudioMember")
_STREAMS_AT: Final = schema.PKT_HEADER_DTYPE.itemsize
_WHOLE: Final = int(schema.StreamFlag.WHOLE)
_UNCHECKED: Final = int(schema.StreamFlag.UNCHECKED)
_HEAD_BYTES: Final = 1 << 16  # read in one request: the index of 500 samples
_SHARD_BYTES: Final = 1000  # of a `Shard` without its index
_LISTED_BYTES: Final = 600  # of a `ListedFile` with a path of 100 bytes
_MOST_BYTES: Final = 2**63 - 1  # largest file size of the operating system
_REBUILD: Final = "run `fastvid index DIR` to rebuild the sidecars of the dataset in DIR"
RESTORE: Final = "restore the file from a copy, or index the videos into a new folder: `fastvid index VIDEOS --out NEW`"
"""The hint if the list of the files of videos in place is damaged."""


T = TypeVar("T")


class StreamReader:
    """Reads one stream of a sample. Call it with ranges: (offset in the stream, writable view to fill).

    `start`: first byte of the stream in the file. `size`: bytes of the stream. `version`: the version that the file
    must have; None for any. `content`: identifies the bytes of the file in the node's cache of videos. `listed`: path
    or URL of a video in place, which may change. `gap`: packets at most this many bytes apart are better read together,
    see `Storage`.
    """

    __slots__ = ("_content", "_file", "_storage", "_version", "gap", "listed", "requests", "size", "start")

    def __init__(
        self,
        storage: Storage,
        file: str,
        start: int,
        size: int,
        version: Version | None = None,
        content: str = "",
        listed: str = "",
    ) -> None:
        self._storage, self._file, self.start, self._version = storage, file, start, version
        self.listed = listed
        self._content = content
        self.size, self.gap, self.requests = size, storage.gap, 0

    @property
    def source(self) -> Hashable:
        """Key of the file that `read_file` reads, equal for streams of one file; None if the node caches its bytes."""
        if self._storage.units is not None and self._content:
            return None
        return id(self._storage), self._file, self._version

    def __call__(self, ranges: Sequence[tuple[int, memoryview]]) -> None:
        units = self._storage.units
        if units is None or not self._content:
            self._fetch(ranges)
        else:
            units.read(f"{self._content}\0{self.start}", self.size, ranges, self._fetch)

    def checked(self, read: Callable[[], T]) -> T:
        """Call a function that reads and checks; if its check fails and the node's cache may be damaged, call it again.

        For a video in place, the error says that its file changed, or how to name the place that it was moved to.
        """
        try:
            return self._read_again(read)
        except ChecksumError as error:
            if not self.listed:
                raise
            raise ChecksumError(f"{CHANGED}: {error.message}", file=self.listed, hint=CHANGED_HINT) from error
        except StorageError as error:
            if self.listed and is_replaced(error):
                self._storage.discard(self._file)  # who opens the dataset again reads the new version
            if self.listed and is_missing(error):
                error.hint = MOVED_HINT
            raise

    def _read_again(self, read: Callable[[], T]) -> T:
        try:
            return read()
        except ChecksumError:
            if self._content and (units := self._storage.units) is not None:
                units.forget(f"{self._content}\0{self.start}", self.size)
            elif not self.listed or not self._storage.discard(self._file):  # an open handle of a replaced file
                raise
            return read()

    def whole(self) -> bytes:
        """Return all bytes of the stream."""
        data = bytearray(self.size)
        self([(0, memoryview(data))])
        return bytes(data)

    def read_file(self, ranges: Sequence[tuple[int, memoryview]]) -> None:
        """Read ranges of the file, given as offsets in the file; they may be outside the stream."""
        self.requests += len(ranges)
        self._storage.read_into(self._file, ranges, self._version)

    def _fetch(self, ranges: Sequence[tuple[int, memoryview]]) -> None:
        self.read_file([(self.start + offset, view) for offset, view in ranges])


class BlockReader:
    """Reads ranges of a tar member whose blocks of `AUDIO_BLOCK` bytes have checksums; reads each block only once."""

    __slots__ = ("_blocks", "_checksums", "_read", "bytes_read", "size")

    def __init__(self, read: StreamReader, checksums: Sequence[int]) -> None:
        self._read, self._checksums = read, checksums
        self.size, self.bytes_read = read.size, 0
        self._blocks: dict[int, bytes] = {}

    @property
    def requests(self) -> int:
        """Number of ranges that were read."""
        return self._read.requests

    def bytes(self, offset: int, length: int) -> memoryview:
        """Return `length` bytes from `offset` in the member; ChecksumError if one of their blocks is damaged."""
        if offset < 0 or length < 0 or offset + length > self.size:
            raise FormatError(f"bytes {offset} to {offset + length} are outside the {self.size} bytes of the M4A")
        if not length:
            return memoryview(b"")
        first, last = offset // schema.AUDIO_BLOCK, (offset + length - 1) // schema.AUDIO_BLOCK
        missing = [block for block in range(first, last + 1) if block not in self._blocks]
        if missing:
            self._load(missing[0], missing[-1])
        joined = b"".join(self._blocks[block] for block in range(first, last + 1))
        return memoryview(joined)[offset - first * schema.AUDIO_BLOCK :][:length]

    def _load(self, first: int, last: int) -> None:
        start, stop = first * schema.AUDIO_BLOCK, min((last + 1) * schema.AUDIO_BLOCK, self.size)
        data = bytearray(stop - start)
        self._read.checked(partial(self._fill, start, data))
        for block in range(first, last + 1):
            self._blocks[block] = bytes(data[(block - first) * schema.AUDIO_BLOCK :][: schema.AUDIO_BLOCK])

    def _fill(self, start: int, data: bytearray) -> None:
        self._read([(start, memoryview(data))])
        self.bytes_read += len(data)
        for at in range(0, len(data), schema.AUDIO_BLOCK):
            block, found = (start + at) // schema.AUDIO_BLOCK, zlib.crc32(data[at : at + schema.AUDIO_BLOCK])
            if found != self._checksums[block]:
                raise ChecksumError(
                    f"audio has checksum {found:08x}, the index says {self._checksums[block]:08x}",
                    hint="run `fastvid verify`: the shard was damaged or replaced",
                    block=block,
                )


@dataclass(frozen=True, slots=True)
class ShardFolder:
    """What all shards of a generation have in common; `root`: of videos in place."""

    storage: Storage
    streams: tuple[str, ...] = (schema.PICTURES, schema.FLOW)
    root: Root | None = None

    def open(self, stem: str, tar_sha256: str | None = None, *, whole: bool = True) -> Shard:
        """Open a shard; for the arguments see `Shard`."""
        return Shard(self.storage, stem, tar_sha256, streams=self.streams, root=self.root, whole=whole)


class Shard:
    """A shard's packet sidecar, and through it any packet of the tar.

    Opening reads and checks the index: header, streams, extradata, and the positions and checksums of audio. It takes
    about 70 bytes of memory per stream of a sample, and for audio 24 per sample and 4 per second. Packet tables, 20
    bytes per packet, are read and checked when they are used. Files are not mapped, so truncating one while it is open
    causes an error, not a crash. From remote storage without a node cache the whole sidecar is kept in memory and
    checked on opening, about 6 MB per 1,000 samples of 300 frames, unless the caller passes `whole=False`.
    """

    def __init__(
        self,
        storage: Storage,
        stem: str,
        tar_sha256: str | None = None,
        *,
        streams: tuple[str, ...] = (schema.PICTURES, schema.FLOW),
        root: Root | None = None,
        whole: bool = True,
    ) -> None:
        self.storage, self.stem, self._file = storage, stem, f"{stem}.pkt"
        self.streams, self.root, self._whole = streams, root, whole
        self._files: list[ListedFile] | None = None
        try:
            self._open(tar_sha256)
        except FormatError:
            # A cached copy of a remote file may be damaged, and an open handle may be of a replaced file: read again.
            if not storage.discard(self._file):
                raise
            self._open(tar_sha256)

    def __repr__(self) -> str:
        return f"Shard({self.stem!r}, {self.num_samples} samples)"

    def __reduce__(self) -> tuple[object, ...]:
        return self.folder.open, (self.stem, self.tar_sha256)

    @property
    def folder(self) -> ShardFolder:
        """What this shard has in common with the other shards of its generation."""
        return ShardFolder(self.storage, self.streams, self.root)

    @property
    def nbytes(self) -> int:
        """Memory of this object in bytes."""
        files = 0 if self._files is None else _LISTED_BYTES * len(self._files)
        return _SHARD_BYTES + len(self._index if self._copy is None else self._copy) + files

    @property
    def data(self) -> str:
        """Name of the tar, or of the list of files of a shard of videos in place."""
        return f"{self.stem}.{(schema.SHARD_SUFFIXES if self.root is None else schema.IN_PLACE_SUFFIXES)[0]}"

    def _find(self) -> None:
        """Decide from where the sidecar is read: its storage, the node's cache, or a copy in memory."""
        kept = not self.storage.copies or self.storage.keep(self._file)
        self._copy = self.storage.map(self._file) if self._whole and not kept else None

    def _open(self, tar_sha256: str | None) -> None:
        self._find()
        self._opening = object()
        size = self.storage.size(self._file) if self._copy is None else len(self._copy)
        head = self._bytes(0, min(size, _HEAD_BYTES if self.storage.copies else _STREAMS_AT))
        header = _HEADERS.read(head, 0) if size >= _STREAMS_AT else None
        if header is None or header.magic != schema.PKT_MAGIC:
            raise self._broken("file is not a packet sidecar")
        schema.check_version(header.major, header.minor, file=self._file)
        if header.stream_bytes not in _STREAMS or header.packet_bytes != schema.PACKET_DTYPE.itemsize:
            raise self._broken("packet sidecar has records of an unknown size")
        self._row_bytes = int(header.stream_bytes)
        self.num_samples, self.num_streams = int(header.num_samples), int(header.num_streams)
        self._extradata = _STREAMS_AT + self.num_samples * self.num_streams * self._row_bytes
        self._audio = self._extradata + header.extradata_bytes
        self._packets = self._audio + header.audio_bytes
        self._is_mute = False  # whether it is known that no sample has audio
        expected = self._packets + header.num_packets * schema.PACKET_DTYPE.itemsize
        if expected != size:
            raise self._broken(f"packet sidecar has {size} bytes, its header says {expected}")
        self._num_packets = header.num_packets
        rest = self._packets - len(head)
        if self._copy is not None:
            self._index = self._copy[: self._packets]
        else:
            self._index = memoryview(bytes(head[: self._packets]) + bytes(self._bytes(len(head), max(rest, 0))))
        if schema.index_crc32(self._index) != header.index_crc32:
            raise self._broken("packet sidecar does not match its checksum")
        self.tar_sha256 = header.tar_sha256.hex()
        if tar_sha256 not in (None, self.tar_sha256):
            raise FormatError(
                f"packet sidecar was computed from a tar with SHA-256 {self.tar_sha256[:12]}..., the generation lists"
                f" {str(tar_sha256)[:12]}...",
                file=self._file,
                hint="open the dataset again if it was created anew, otherwise restore the shard's files from a copy",
            )
        if self._copy is not None:
            self.check()

    def check(self) -> None:
        """Verify the checksums of all packet tables; everything else was verified when the shard was opened."""
        for number in range(self.num_samples * self.num_streams):
            self._table(self._row(number))

    def info(self, row: int, stream: str = "") -> StreamInfo:
        """Return the description of a stream of the sample at `row`; "" means the first stream."""
        record = self._record(row, stream)
        coded, times = self._description(record)
        try:
            extradata = self._part(record.extradata_offset, record.extradata_size)
            return stream_info(_DESCRIBING(record), extradata, coded, times)
        except (ValueError, ZeroDivisionError) as error:
            raise self._invalid(error, row, stream) from error

    def _part(self, offset: int, size: int) -> bytes:
        """Return bytes of the extradata section, which also contains the times of frames."""
        start = self._extradata + offset
        return bytes(self._index[start : start + size])

    def _description(self, record: Any) -> tuple[Coded | None, bytes]:
        """Return how decoded pictures become the shown ones, and packed times of frames, see `StreamInfo`."""
        if not self.is_described:
            return None, b""
        coded = None
        if record.coded_width:
            crop = (record.crop_y, record.crop_x, record.crop_height, record.crop_width)
            coded = Coded(record.coded_width, record.coded_height, crop, record.turn, bool(record.mirror))
        return coded, self._part(record.times_offset, record.times_size)

    def table(self, row: int, stream: str = "") -> PacketTable:
        """Return the packets of a stream; they are read and checked unless they were used a short time ago."""
        return self._kept_table(self._record(row, stream), row, stream)

    def stream(self, row: int, stream: str = "") -> tuple[StreamReader, PacketTable]:
        """Return the results of `reader` and `table` together, looking up the stream only once."""
        record = self._record(row, stream)
        return self._reader(record, row, stream), self._kept_table(record, row, stream)

    def _kept_table(self, record: Any, row: int, stream: str) -> PacketTable:
        try:
            key = (self._opening, row, stream)
            return TABLES.get(key) or TABLES.add(key, self._packet_table(record))
        except FormatError as error:
            raise error.at(shard=self.stem, row=row, stream=stream) from error

    def member(self, row: int, stream: str = "") -> tuple[int, int]:
        """Return offset and size in bytes of a stream's member in the tar, or of its part of a file in place."""
        record = self._record(row, stream)
        return record.member_offset, record.member_size

    def reader(self, row: int, stream: str = "") -> StreamReader:
        """Return a reader of the stream's bytes."""
        return self._reader(self._record(row, stream), row, stream)

    def _reader(self, record: Any, row: int, stream: str) -> StreamReader:
        place = record.member_offset, record.member_size
        if self.root is None:
            return StreamReader(self.storage, self.data, *place, content=self.tar_sha256)
        listed = self.file(row, stream)
        # Checksums detect any change of the file; without checksums its version must be the one that was indexed.
        version = listed.version if record.flags & _UNCHECKED else None
        content = repr((listed.file, listed.size, listed.tag, listed.modified))
        file = self.root.locate(listed.file)
        return StreamReader(*open_file(file), *place, version, content, file)

    def file(self, row: int, stream: str = "") -> ListedFile:
        """Return the file that contains a stream, in a shard of videos in place."""
        if self._files is None:
            content = self.storage.read(self.data)
            if sha256(content) != self.tar_sha256:
                raise FormatError("list of files is not the one that was indexed", file=self.data, hint=RESTORE)
            self._files = read_files(content, file=self.data)
            if len(self._files) != self.num_samples * self.num_streams:
                raise FormatError(
                    f"list of {len(self._files)} files for {self.num_samples} samples of {self.num_streams} streams",
                    file=self.data,
                    hint=RESTORE,
                )
        return self._files[self._number(row, stream)]

    def are_near(self, one: tuple[int, str], other: tuple[int, str]) -> bool:
        """Return whether reading two streams, given as (row, stream), in one pass may save a request.

        Nothing is read to find out; when it is not known, the answer is False.
        """
        if self.root is not None:
            files = self._files
            return one == other or (
                files is not None and files[self._number(*one)].file == files[self._number(*other)].file
            )
        (start, size), (begin, length), gap = self.member(*one), self.member(*other), self.storage.gap
        return start <= begin + length + gap and begin <= start + size + gap

    def audio(self, row: int) -> BlockReader | None:
        """Return a reader of a sample's M4A, None if the sample has no audio; UsageError for videos in place."""
        if self.root is not None:
            raise UsageError("videos in place are indexed without their sound", hint="run `fastvid shard --audio aac`")
        record = self._audio_record(row)
        if record is None:
            return None
        first = self._audio + self.num_samples * schema.AUDIO_DTYPE.itemsize + 4 * record.first_block
        stop = first + 4 * -(-record.member_size // schema.AUDIO_BLOCK)
        if stop > self._packets or record.member_offset + record.member_size > _MOST_BYTES:
            raise self._invalid("it points outside the shard", row, "audio")
        place = record.member_offset, record.member_size
        reader = StreamReader(self.storage, self.data, *place, content=self.tar_sha256)
        return BlockReader(reader, np.frombuffer(self._index[first:stop], "<u4").tolist())

    def audio_member(self, row: int) -> tuple[int, int] | None:
        """Return the offset and size, in bytes, of a sample's M4A in the tar; None if the sample has no audio."""
        record = self._audio_record(row)
        return None if record is None else (record.member_offset, record.member_size)

    def _audio_record(self, row: int) -> Any:
        if self._packets == self._audio:
            self._check_mute()
            return None
        record = _AUDIO.read(self._index, self._audio + row * schema.AUDIO_DTYPE.itemsize)
        return record if record.member_size else None

    def _check_mute(self) -> None:
        """Raise FormatError if the shard has audio that the sidecar, written by an early fastvid, does not list."""
        if not self._is_mute:
            if schema.AUDIO in schema.read_facts(self.storage, self.stem, ["stream"])["stream"].to_pylist():
                raise self._broken("packet sidecar does not list the shard's audio")
            self._is_mute = True

    def _number(self, row: int, stream: str) -> int:
        """Return the row in the stream section of a stream of a sample."""
        names = self.streams[: self.num_streams]
        if not 0 <= row < self.num_samples or (stream and stream not in names):
            known = f"use one of {', '.join(names)}" if names else "restore the generation's record from a copy"
            place = f"{self.storage.url}/{self._file}"
            raise FormatError(f"shard has no stream {stream!r} for sample {row}", file=place, hint=known)
        number: int = names.index(stream) if stream else 0
        return row * self.num_streams + number

    def _record(self, row: int, stream: str) -> Any:
        record = self._row(self._number(row, stream))
        section = self._audio - self._extradata
        if (
            record.first_packet + record.num_packets > self._num_packets
            or record.extradata_offset + record.extradata_size > section
            or record.member_offset + record.member_size > _MOST_BYTES
            or (self.is_described and record.times_offset + record.times_size > section)
            or (self.is_described and record.num_frames > record.num_packets)
        ):
            raise self._invalid("it points outside the shard", row, stream)
        return record

    def _row(self, number: int) -> Any:
        """Return a row of the stream section."""
        return _STREAMS[self._row_bytes].read(self._index, _STREAMS_AT + number * self._row_bytes)

    @property
    def is_described(self) -> bool:
        """Whether the sidecar stores orientation, crop and times of its streams. What fastvid encoded needs none."""
        return self._row_bytes != schema.STREAM_DTYPE.itemsize

    @property
    def _hint(self) -> str:
        # Only the index says which part of its file a video in place is.
        return _REBUILD if self.root is None else RESTORE

    def _broken(self, message: str) -> FormatError:
        return FormatError(message, file=self._file, hint=self._hint)

    def _invalid(self, why: object, row: int, stream: str) -> FormatError:
        message = f"packet sidecar has an invalid row: {why}"
        return FormatError(message, file=self._file, row=row, stream=stream, hint=self._hint)

    def _packet_table(self, record: Any) -> PacketTable:
        try:
            data = self._table(record)
        except FormatError:
            if not self.storage.discard(self._file):
                raise
            self._find()
            data = self._table(record)
        return PacketTable(np.frombuffer(bytes(data), schema.PACKET_DTYPE), whole=bool(record.flags & _WHOLE))

    def _table(self, record: Any) -> memoryview:
        """Return the bytes of a stream's packet records, after verifying their checksum."""
        at = self._packets + record.first_packet * schema.PACKET_DTYPE.itemsize
        data = self._bytes(at, record.num_packets * schema.PACKET_DTYPE.itemsize)
        if zlib.crc32(data) != record.packets_crc32:
            raise FormatError("packet table does not match its checksum", file=self._file, hint=_REBUILD)
        return data

    def _bytes(self, offset: int, size: int) -> memoryview:
        if self._copy is not None:
            return self._copy[offset : offset + size]
        data = memoryview(bytearray(size))
        if size:
            self.storage.read_into(self._file, [(offset, data)])
        return data.toreadonly()
