"""One shard: a tar and its three sidecars, which are derived from it.

    data-000000.tar       the samples; the only file that is not derived
    data-000000.idx       index for DALI's webdataset reader
    data-000000.parquet   facts: properties of each sample's streams, for people and queries
    data-000000.pkt       index for the loader, read by range: header, streams, extradata, audio, packets

Instead of a tar, a shard may have a list of video files that the dataset does not contain, `fastvid.format.in_place`.

`index_shard` is the only function that derives the sidecars of a tar, for new shards as for repaired ones.
`OpenShards` keeps shards of a generation open within a limit of memory.
"""

from __future__ import annotations

import functools
import logging
import threading
import zlib
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from fastvid.errors import FastvidError, FormatError, UsageError
from fastvid.format.generations import Generation
from fastvid.format.in_place import (
    IndexedSample,
    ListedFile,
    Root,
    index_crc32,
    index_sample,
    pack_files,
    pack_index,
    read_files,
)
from fastvid.format.packets import TABLES, PacketTable, StreamInfo, stream_info
from fastvid.format.presentation import Coded
from fastvid.format.schema import (
    AUDIO,
    AUDIO_BLOCK,
    AUDIO_DTYPE,
    DESCRIBED_DTYPE,
    FLOW,
    IN_PLACE_SUFFIXES,
    PACKET_DTYPE,
    PICTURES,
    PKT_HEADER_DTYPE,
    PKT_MAGIC,
    SHARD_SUFFIXES,
    STREAM_DTYPE,
    RecordReader,
    StreamFlag,
    check_version,
    member_suffix,
)
from fastvid.format.selection import facts_parquet, has_audio
from fastvid.format.tar import (
    BlockReader,
    StreamReader,
    TarDigest,
    read_members,
    sample_groups,
    to_json,
    wds2idx,
    write_tar,
)
from fastvid.runtime import faults
from fastvid.runtime.values import sha256
from fastvid.storage import Storage
from fastvid.storage.urls import copy_file, open_file

_log = logging.getLogger(__name__)

_HEADERS: Final = RecordReader(PKT_HEADER_DTYPE, "Header")
# Readers of the rows of streams, by the size of a row: rows of version 2.0, and rows with a description.
_STREAMS: Final = {
    STREAM_DTYPE.itemsize: RecordReader(STREAM_DTYPE, "Stream"),
    DESCRIBED_DTYPE.itemsize: RecordReader(DESCRIBED_DTYPE, "DescribedStream"),
}
_AUDIO: Final = RecordReader(AUDIO_DTYPE, "AudioMember")
_STREAMS_AT: Final = PKT_HEADER_DTYPE.itemsize
_WHOLE: Final = int(StreamFlag.WHOLE)
_UNCHECKED: Final = int(StreamFlag.UNCHECKED)
_HEAD_BYTES: Final = 1 << 16  # read in one request: the index of 500 samples
_SHARD_BYTES: Final = 1000  # of a `Shard` without its index
_LISTED_BYTES: Final = 600  # of a `ListedFile` with a path of 100 bytes
_MOST_BYTES: Final = 2**63 - 1  # largest file size of the operating system
_RESTORE: Final = "restore the file from a copy of the dataset, or run `fastvid index DIR` to index the videos again"
_REBUILD: Final = "run `fastvid index DIR` to rebuild the sidecars of the dataset in DIR"


@dataclass(frozen=True, slots=True)
class ShardFolder:
    """What all shards of a generation have in common; `root`: of videos in place."""

    storage: Storage
    streams: tuple[str, ...] = (PICTURES, FLOW)
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

    __slots__ = (
        "_audio",
        "_copy",
        "_extradata",
        "_file",
        "_files",
        "_index",
        "_is_mute",
        "_num_packets",
        "_opening",
        "_packets",
        "_row_bytes",
        "_whole",
        "num_samples",
        "num_streams",
        "root",
        "stem",
        "storage",
        "streams",
        "tar_sha256",
    )

    def __init__(
        self,
        storage: Storage,
        stem: str,
        tar_sha256: str | None = None,
        *,
        streams: tuple[str, ...] = (PICTURES, FLOW),
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
        return f"{self.stem}.{(SHARD_SUFFIXES if self.root is None else IN_PLACE_SUFFIXES)[0]}"

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
        if header is None or header.magic != PKT_MAGIC:
            raise FormatError("file is not a packet sidecar", file=self._file, hint=_REBUILD)
        check_version(header.major, header.minor, file=self._file)
        if header.stream_bytes not in _STREAMS or header.packet_bytes != PACKET_DTYPE.itemsize:
            raise FormatError("packet sidecar has records of an unknown size", file=self._file, hint=_REBUILD)
        self._row_bytes = int(header.stream_bytes)
        self.num_samples, self.num_streams = int(header.num_samples), int(header.num_streams)
        self._extradata = _STREAMS_AT + self.num_samples * self.num_streams * self._row_bytes
        self._audio = self._extradata + header.extradata_bytes
        self._packets = self._audio + header.audio_bytes
        self._is_mute = False  # whether it is known that no sample has audio
        expected = self._packets + header.num_packets * PACKET_DTYPE.itemsize
        if expected != size:
            raise FormatError(
                f"packet sidecar has {size} bytes, its header says {expected}", file=self._file, hint=_REBUILD
            )
        self._num_packets = header.num_packets
        rest = self._packets - len(head)
        if self._copy is not None:
            self._index = self._copy[: self._packets]
        else:
            self._index = memoryview(bytes(head[: self._packets]) + bytes(self._bytes(len(head), max(rest, 0))))
        if index_crc32(self._index) != header.index_crc32:
            raise FormatError("packet sidecar does not match its checksum", file=self._file, hint=_REBUILD)
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
            return stream_info(
                record.codec,
                record.width,
                record.height,
                record.num_frames,
                record.fps_num,
                record.fps_den,
                self._part(record.extradata_offset, record.extradata_size),
                record.range,
                record.matrix,
                record.flags,
                record.flow_bound,
                coded,
                times,
            )
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
                raise FormatError("list of files is not the one that was indexed", file=self.data, hint=_RESTORE)
            self._files = read_files(content, file=self.data)
            if len(self._files) != self.num_samples * self.num_streams:
                raise FormatError(
                    f"list of {len(self._files)} files for {self.num_samples} samples of {self.num_streams} streams",
                    file=self.data,
                    hint=_RESTORE,
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
        first = self._audio + self.num_samples * AUDIO_DTYPE.itemsize + 4 * record.first_block
        stop = first + 4 * -(-record.member_size // AUDIO_BLOCK)
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
        record = _AUDIO.read(self._index, self._audio + row * AUDIO_DTYPE.itemsize)
        return record if record.member_size else None

    def _check_mute(self) -> None:
        """Raise FormatError if the shard has audio that the sidecar, written by an early fastvid, does not list."""
        if not self._is_mute:
            if has_audio(self.storage, self.stem):
                raise FormatError("packet sidecar does not list the shard's audio", file=self._file, hint=_REBUILD)
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
        return self._row_bytes != STREAM_DTYPE.itemsize

    def _invalid(self, why: object, row: int, stream: str) -> FormatError:
        message = f"packet sidecar has an invalid row: {why}"
        return FormatError(message, file=self._file, row=row, stream=stream, hint=_REBUILD)

    def _packet_table(self, record: Any) -> PacketTable:
        try:
            data = self._table(record)
        except FormatError:
            if not self.storage.discard(self._file):
                raise
            self._find()
            data = self._table(record)
        return PacketTable(np.frombuffer(bytes(data), PACKET_DTYPE), whole=bool(record.flags & _WHOLE))

    def _table(self, record: Any) -> memoryview:
        """Return the bytes of a stream's packet records, after verifying their checksum."""
        at = self._packets + record.first_packet * PACKET_DTYPE.itemsize
        data = self._bytes(at, record.num_packets * PACKET_DTYPE.itemsize)
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


_LAST: Final = {FLOW: 1, AUDIO: 2}  # order of the members that follow the pictures


def sample_members(meta: Mapping[str, Any], streams: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the tar members of a sample by suffix: JSON, then pictures or cameras, then flow, then sound."""
    names = sorted(streams, key=lambda name: _LAST.get(name, 0))
    return {"json": to_json(meta)} | {member_suffix(name): streams[name] for name in names}


def write_shard(
    storage: Storage,
    stem: str,
    samples: Iterable[tuple[str, Mapping[str, bytes]]],
    *,
    streams: tuple[str, ...] = (PICTURES,),
    scratch: Storage | None = None,
) -> TarDigest:
    """Write a tar, which appears only when it is complete, and then its sidecars.

    `samples`: keys, each with its members by suffix. `scratch`: where to write the files before they are copied.
    """
    place = storage if scratch is None else scratch
    with place.create(f"{stem}.tar") as file:
        digest = write_tar(file, samples)
        faults.reach("rename")
    index_shard(place, stem, streams=streams, tar_sha256=digest.sha256)
    if scratch is not None:
        for suffix in SHARD_SUFFIXES:
            copy_file(scratch, f"{stem}.{suffix}", storage)
            faults.reach("upload")
        for suffix in SHARD_SUFFIXES:
            scratch.delete(f"{stem}.{suffix}")
    return digest


def write_in_place(
    storage: Storage, stem: str, samples: Sequence[IndexedSample], files: Sequence[ListedFile], streams: tuple[str, ...]
) -> TarDigest:
    """Write a shard of videos in place, the list of files and then its sidecars; return the digest of the list."""
    listed = pack_files(files)
    digest = TarDigest(len(listed), sha256(listed), len(samples))
    pkt, rows = pack_index(samples, streams, digest.sha256, described=True)
    storage.write(f"{stem}.files", listed)
    faults.reach("sidecar")
    storage.write(f"{stem}.parquet", facts_parquet(samples, rows))
    storage.write(f"{stem}.pkt", pkt)
    return digest


def index_shard(
    storage: Storage,
    stem: str,
    *,
    streams: tuple[str, ...] = (PICTURES,),
    samples: Sequence[IndexedSample] | None = None,
    tar_sha256: str | None = None,
) -> list[IndexedSample]:
    """Derive the sidecars of a tar from its bytes and write them.

    `samples`: indexed samples of a tar that another tool wrote; by default the tar is read, which fastvid must have
    written.
    """
    view = storage.map(f"{stem}.tar")
    members = list(read_members(view))
    if samples is None:
        samples = []
        for key, group in sample_groups(members):
            try:
                samples.append(index_sample(view, key, group, streams))
            except FastvidError as error:
                raise error.at(shard=stem, key=key) from error
    storage.write(f"{stem}.idx", wds2idx(members))
    faults.reach("sidecar")
    pkt, rows = pack_index(samples, streams, tar_sha256 or sha256(view))
    storage.write(f"{stem}.parquet", facts_parquet(samples, rows))
    storage.write(f"{stem}.pkt", pkt)
    return list(samples)


MEMORY: Final = 256 * 2**20
"""Bytes of open shards in a process: the indexes of about 2,500 shards of 1,000 videos, or about 40 whole packet
sidecars, which a process keeps if storage is remote and the node has no cache."""


class OpenShards:
    """Opens shards when they are first used, and closes the least recently used ones. Thread-safe.

    Once the limit was reached, shards are opened without a copy of the whole sidecar, so that their packet tables are
    requested one by one.

    `limit`: total memory in bytes; at least one shard stays open.
    """

    def __init__(self, limit: int = MEMORY) -> None:
        self.limit = limit
        self._lock = threading.Lock()
        self._shards: OrderedDict[Hashable, tuple[Shard, int]] = OrderedDict()
        self._bytes = 0
        self._is_full = False

    def __contains__(self, key: Hashable) -> bool:
        return key in self._shards

    def __len__(self) -> int:
        return len(self._shards)

    def get(self, key: Hashable, make: Callable[[bool], Shard]) -> Shard:
        """Return the shard of a key; `make` opens it, and gets whether the whole sidecar may be kept in memory."""
        with self._lock:
            known = self._shards.get(key)
            if known is not None:
                self._count(key, known[0])
                return known[0]
        # No lock: several threads can open shards at once; if two open the same one, the first is kept.
        shard = make(not self._is_full)
        with self._lock:
            if key in self._shards:
                shard = self._shards[key][0]
            self._count(key, shard)
            while self._bytes > self.limit and len(self._shards) > 1:
                self._bytes -= self._shards.popitem(last=False)[1][1]
                self._is_full = True
        return shard

    def _count(self, key: Hashable, shard: Shard) -> None:
        """Make a shard the most recently used, and update its memory, which grows when it reads its list of files."""
        before = self._shards.pop(key, (shard, 0))[1]
        self._shards[key] = shard, shard.nbytes
        self._bytes += shard.nbytes - before


@functools.cache
def _warn_of_undescribed(url: str) -> None:
    """Warn, once per dataset, that videos in place were indexed by fastvid 0.2, which stored no description."""
    _log.warning(
        "%s was indexed by fastvid 0.2: its videos are shown as they are coded, not turned, cut or stretched, and at a"
        " constant rate; run `fastvid index DIR` to learn how they are shown",
        url,
    )


def open_shard(
    storage: Storage, generation: Generation, index: int, root: str | None = None, whole: bool = True
) -> Shard:
    """Open a shard after checking that its files have the sizes and numbers that the generation lists."""
    record, streams = generation.shards[index], generation.streams
    place = generation.root_of(record, root)
    shard = Shard(storage, record.name, record.sha256, streams=streams, root=place, whole=whole)
    found, expected = (shard.num_samples, shard.num_streams), (record.samples, len(streams))
    if found != expected:
        raise FormatError(
            f"packet sidecar contains {found[0]} samples of {found[1]} streams, the generation lists {expected[0]} of"
            f" {expected[1]}",
            shard=record.name,
            hint="run `fastvid index DIR` to rebuild the sidecars of the dataset in DIR",
        )
    if place is not None and not shard.is_described:
        _warn_of_undescribed(storage.url)
    if (size := storage.size(shard.data)) != record.bytes:
        raise FormatError(
            f"{record.data} has {size} bytes, the generation lists {record.bytes}",
            shard=record.name,
            hint="restore the file from a copy of the dataset; `fastvid verify DIR` finds all damage",
        )
    return shard
