"""One shard: a tar and its three sidecars, which are derived from it.

    data-000000.tar       the samples; the only file that is not derived
    data-000000.idx       index for DALI's webdataset reader
    data-000000.parquet   facts for people and queries
    data-000000.pkt       index for the loader, read by range: header, streams, extradata, audio, packets

`index_shard` is the only function that derives sidecars, for new shards as for repaired ones.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any, Final

import numpy as np

from fastvid.errors import FastvidError, FormatError
from fastvid.format.facts import facts_parquet, has_audio
from fastvid.format.indexed import IndexedSample, index_crc32, index_sample, pack_index
from fastvid.format.packets import PacketTable, StreamInfo
from fastvid.format.records import RecordReader
from fastvid.format.schema import (
    AUDIO_BLOCK,
    AUDIO_DTYPE,
    MEMBER_SUFFIX,
    PACKET_DTYPE,
    PKT_HEADER_DTYPE,
    PKT_MAGIC,
    STREAM_DTYPE,
    VIDEO_STREAMS,
    Codec,
    Matrix,
    Range,
    StreamFlag,
    check_version,
)
from fastvid.format.stream_reader import BlockReader, StreamReader
from fastvid.format.tar import TarDigest, TarMember, read_members, sample_groups, to_json, wds2idx, write_tar
from fastvid.runtime import faults
from fastvid.runtime.hashing import sha256
from fastvid.storage import Storage
from fastvid.storage.transfer import copy_file

_HEADERS: Final = RecordReader(PKT_HEADER_DTYPE, "Header")
_STREAMS: Final = RecordReader(STREAM_DTYPE, "Stream")
_AUDIO: Final = RecordReader(AUDIO_DTYPE, "AudioMember")
_STREAMS_AT: Final = PKT_HEADER_DTYPE.itemsize
_WHOLE: Final = int(StreamFlag.WHOLE)
_MOST_BYTES: Final = 2**63 - 1  # of a file, for the operating system
_REBUILD: Final = "run `fastvid index DIR` to rebuild the sidecars of the dataset in DIR"

SHARD_SUFFIXES: Final = ("tar", "idx", "parquet", "pkt")
"""Suffixes of a shard's files, the tar first."""


Indexer = Callable[[memoryview, str, Sequence[TarMember], tuple[str, ...]], IndexedSample | None]
"""Indexes one sample, given the tar, the sample's key, its members and the wanted streams. None omits the sample from
the sidecars; it stays in the tar."""


def sample_members(meta: Mapping[str, Any], streams: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the tar members of a sample by suffix: its JSON first, then its streams in their fixed order."""
    return {"json": to_json(meta)} | {MEMBER_SUFFIX[name]: streams[name] for name in MEMBER_SUFFIX if name in streams}


def write_shard(
    storage: Storage,
    stem: str,
    samples: Iterable[tuple[str, Mapping[str, bytes]]],
    *,
    streams: tuple[str, ...] = ("rgb",),
    scratch: Storage | None = None,
) -> TarDigest:
    """Write a tar and its sidecars. The tar appears whole, before its sidecars.

    Args:
        storage: The dataset's folder.
        stem: Stem of the file names, such as ``data-000000``.
        samples: Keys with members by suffix, as built by `sample_members`; read once, in order.
        streams: The video streams that every sample has.
        scratch: A local folder in which to build the shard before uploading it, for a remote storage, which would have
            to be read back for indexing. Its files are deleted afterwards.

    Raises:
        UsageError: If a key violates the grammar or is duplicated.
        FormatError: If a video member cannot be indexed.
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


def index_shard(
    storage: Storage,
    stem: str,
    *,
    streams: tuple[str, ...] = ("rgb",),
    indexer: Indexer | None = None,
    tar_sha256: str | None = None,
) -> list[IndexedSample]:
    """Derive the sidecars of a tar from its bytes and write them.

    Args:
        storage: The dataset's folder.
        stem: Stem of the file names, such as ``data-000000``.
        streams: The video streams that every sample has.
        indexer: Indexes samples of tars that other tools wrote; by default `index_sample`, for fastvid's own.
        tar_sha256: SHA-256 of the tar, hex, if the caller knows it; computed by default.

    Raises:
        FormatError: If the tar is malformed, or a sample has no JSON or no video of a stream.
    """
    view = storage.map(f"{stem}.tar")
    members = list(read_members(view))
    samples = []
    for key, group in sample_groups(members):
        try:
            sample = (indexer or index_sample)(view, key, group, streams)
        except FastvidError as error:
            raise error.at(shard=stem, key=key) from error
        if sample is not None:
            samples.append(sample)
    storage.write(f"{stem}.idx", wds2idx(members))
    faults.reach("sidecar")
    pkt, rows = pack_index(samples, streams, tar_sha256 or sha256(view))
    storage.write(f"{stem}.parquet", facts_parquet(samples, rows))
    storage.write(f"{stem}.pkt", pkt)
    return samples


def has_sidecars(storage: Storage, stem: str) -> bool:
    """Return whether all sidecars of a shard exist."""
    return all(storage.exists(f"{stem}.{suffix}") for suffix in ("idx", "parquet", "pkt"))


class Shard:
    """A shard's packet sidecar, and through it any packet of the tar.

    Opening reads and checks the index: the header, the streams, the extradata and the position and checksums of audio,
    about 70 bytes of memory per sample and stream, and 24 per sample and 4 per second of audio. Packet tables, 20 bytes
    per packet, are read and checked when they are used. On a local disk nothing else is in memory and nothing is
    mapped, so a file that is cut while it is open is an error. From remote storage every process keeps the whole file,
    about 6 MB per 1,000 samples of 300 frames, and checks all of it on opening.

    Args:
        storage: The dataset's folder.
        stem: Stem of the file names, such as ``data-000000``.
        tar_sha256: SHA-256 that the tar must have had when the sidecar was computed, hex; any by default.

    Raises:
        StorageError: If the sidecar is missing.
        VersionError: If its major version is not supported.
        FormatError: If the file is not a packet sidecar, is damaged, or belongs to another tar.
    """

    __slots__ = (
        "_audio",
        "_copy",
        "_extradata",
        "_file",
        "_index",
        "_is_mute",
        "_num_packets",
        "_packets",
        "num_samples",
        "num_streams",
        "stem",
        "storage",
        "tar",
        "tar_sha256",
    )

    def __init__(self, storage: Storage, stem: str, tar_sha256: str | None = None) -> None:
        self.storage, self.stem, self.tar, self._file = storage, stem, f"{stem}.tar", f"{stem}.pkt"
        try:
            self._open(tar_sha256)
        except FormatError:
            # A copy of a remote file may be wrong, and a handle may belong to a replaced file: read once more.
            if not storage.discard(self._file):
                raise
            self._open(tar_sha256)

    def __repr__(self) -> str:
        return f"Shard({self.stem!r}, {self.num_samples} samples)"

    def __reduce__(self) -> tuple[object, ...]:
        return Shard, (self.storage, self.stem, self.tar_sha256)

    def _open(self, tar_sha256: str | None) -> None:
        self._copy = self.storage.map(self._file) if self.storage.copies else None
        size = self.storage.size(self._file) if self._copy is None else len(self._copy)
        header = _HEADERS.read(self._bytes(0, _STREAMS_AT), 0) if size >= _STREAMS_AT else None
        if header is None or header.magic != PKT_MAGIC:
            raise FormatError("file is not a packet sidecar", file=self._file, hint=_REBUILD)
        check_version(header.major, header.minor, file=self._file)
        if header.stream_bytes != STREAM_DTYPE.itemsize or header.packet_bytes != PACKET_DTYPE.itemsize:
            raise FormatError("packet sidecar has records of an unknown size", file=self._file, hint=_REBUILD)
        self.num_samples, self.num_streams = header.num_samples, header.num_streams
        self._extradata = _STREAMS_AT + self.num_samples * self.num_streams * STREAM_DTYPE.itemsize
        self._audio = self._extradata + header.extradata_bytes
        self._packets = self._audio + header.audio_bytes
        self._is_mute = False  # known
        expected = self._packets + header.num_packets * PACKET_DTYPE.itemsize
        if expected != size:
            raise FormatError(
                f"packet sidecar has {size} bytes, its header says {expected}", file=self._file, hint=_REBUILD
            )
        self._num_packets = header.num_packets
        self._index = self._bytes(0, self._packets)
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
        """Verify the checksums of all packet tables; those of the rest were verified when the shard was opened.

        Raises:
            FormatError: If a checksum differs.
        """
        for number in range(self.num_samples * self.num_streams):
            self._table(_STREAMS.read(self._index, _STREAMS_AT + number * STREAM_DTYPE.itemsize))

    def info(self, row: int, stream: str = "rgb") -> StreamInfo:
        """Return the description of a stream of the sample at `row`."""
        record = self._record(row, stream)
        start = self._extradata + record.extradata_offset
        try:
            return _stream_info(
                record.codec,
                record.width,
                record.height,
                record.num_frames,
                record.fps_num,
                record.fps_den,
                bytes(self._index[start : start + record.extradata_size]),
                record.range,
                record.matrix,
                record.flags,
                record.flow_bound,
            )
        except (ValueError, ZeroDivisionError) as error:
            raise self._invalid(error, row, stream) from error

    def table(self, row: int, stream: str = "rgb") -> PacketTable:
        """Read the packets of a stream.

        Raises:
            StorageError: If the sidecar was deleted or cut after it was opened.
            FormatError: If the packets do not match their checksum.
        """
        record = self._record(row, stream)
        try:
            records = np.frombuffer(self._table(record), PACKET_DTYPE)
            return PacketTable(records, whole=bool(record.flags & _WHOLE))
        except FormatError as error:
            raise error.at(shard=self.stem, row=row, stream=stream) from error

    def member(self, row: int, stream: str = "rgb") -> tuple[int, int]:
        """Return the offset and size, in bytes, of a stream's member in the tar."""
        record = self._record(row, stream)
        return record.member_offset, record.member_size

    def reader(self, row: int, stream: str = "rgb") -> StreamReader:
        """Return a reader of the stream's bytes."""
        return StreamReader(self.storage, self.tar, *self.member(row, stream))

    def audio(self, row: int) -> BlockReader | None:
        """Return a reader of a sample's M4A; None if the sample has no audio.

        Raises:
            StorageError: If the shard has no audio section, and no facts either.
            FormatError: If the sidecar is older than the audio section, or its row is invalid.
        """
        record = self._audio_record(row)
        if record is None:
            return None
        first = self._audio + self.num_samples * AUDIO_DTYPE.itemsize + 4 * record.first_block
        stop = first + 4 * -(-record.member_size // AUDIO_BLOCK)
        if stop > self._packets or record.member_offset + record.member_size > _MOST_BYTES:
            raise self._invalid("it points outside the shard", row, "audio")
        reader = StreamReader(self.storage, self.tar, record.member_offset, record.member_size)
        return BlockReader(reader, np.frombuffer(self._index[first:stop], "<u4").tolist())

    def audio_member(self, row: int) -> tuple[int, int] | None:
        """Return the offset and size, in bytes, of a sample's M4A in the tar; None if the sample has no audio.

        Raises:
            StorageError: If the shard has no audio section, and no facts either.
            FormatError: If the sidecar is older than the audio section.
        """
        record = self._audio_record(row)
        return None if record is None else (record.member_offset, record.member_size)

    def _audio_record(self, row: int) -> Any:
        if self._packets == self._audio:
            self._check_mute()
            return None
        record = _AUDIO.read(self._index, self._audio + row * AUDIO_DTYPE.itemsize)
        return record if record.member_size else None

    def _check_mute(self) -> None:
        """Check that a shard without an audio section has no audio, rather than a sidecar older than the section."""
        if not self._is_mute:
            if has_audio(self.storage, self.stem):
                raise FormatError("packet sidecar does not list the shard's audio", file=self._file, hint=_REBUILD)
            self._is_mute = True

    def _record(self, row: int, stream: str) -> Any:
        number = VIDEO_STREAMS.index(stream)
        if not 0 <= row < self.num_samples or number >= self.num_streams:
            raise FormatError(f"shard has no stream {stream!r} for sample {row}", shard=self.stem)
        record = _STREAMS.read(self._index, _STREAMS_AT + (row * self.num_streams + number) * STREAM_DTYPE.itemsize)
        if (
            record.first_packet + record.num_packets > self._num_packets
            or record.extradata_offset + record.extradata_size > self._audio - self._extradata
            or record.member_offset + record.member_size > _MOST_BYTES
        ):
            raise self._invalid("it points outside the shard", row, stream)
        return record

    def _invalid(self, why: object, row: int, stream: str) -> FormatError:
        message = f"packet sidecar has an invalid row: {why}"
        return FormatError(message, file=self._file, row=row, stream=stream, hint=_REBUILD)

    def _table(self, record: Any) -> memoryview:
        """Return the bytes of a stream's packet records after checking them."""
        at = self._packets + record.first_packet * PACKET_DTYPE.itemsize
        data = self._bytes(at, record.num_packets * PACKET_DTYPE.itemsize)
        if zlib.crc32(data) != record.packets_crc32:
            raise FormatError("packet table does not match its checksum", file=self._file, hint=_REBUILD)
        return data

    def _bytes(self, offset: int, size: int) -> memoryview:
        if self._copy is not None:
            return self._copy[offset : offset + size]
        data = memoryview(bytearray(size))
        self.storage.read_into(self._file, [(offset, data)])
        return data.toreadonly()


# Cached: few combinations occur in a dataset, and each conversion to an enum costs as much as a cache look-up.
@functools.lru_cache(maxsize=4096)
def _stream_info(
    codec: int,
    width: int,
    height: int,
    num_frames: int,
    fps_num: int,
    fps_den: int,
    extradata: bytes,
    range_: int,
    matrix: int,
    flags: int,
    flow_bound: float,
) -> StreamInfo:
    if min(width, height) < 2 or fps_num < 1:
        raise ValueError(f"pictures of {width}x{height} at {fps_num}/{fps_den} frames per second")
    return StreamInfo(
        codec=Codec(codec),
        width=width,
        height=height,
        num_frames=num_frames,
        fps=Fraction(fps_num, fps_den),
        extradata=extradata,
        range=Range(range_),
        matrix=Matrix(matrix),
        flags=StreamFlag(flags),
        flow_bound=flow_bound,
    )
