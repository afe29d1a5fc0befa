"""One shard: a tar and its three sidecars, which are derived from it.

    data-000000.tar       the samples; the only file that is not derived
    data-000000.idx       index for DALI's webdataset reader
    data-000000.parquet   facts for people and queries
    data-000000.pkt       index for the loader, memory-mapped: header, streams, extradata, packets

`index_shard` is the only function that derives sidecars, for new shards as for repaired ones.
"""

from __future__ import annotations

import functools
import json
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any, Final

import numpy as np

from fastvid.errors import FastvidError, FormatError, VersionError
from fastvid.format.audio import index_m4a
from fastvid.format.demux import index_mp4
from fastvid.format.facts import facts_parquet
from fastvid.format.indexed import IndexedAudio, IndexedSample, IndexedStream
from fastvid.format.packets import PacketTable, StreamInfo
from fastvid.format.records import RecordReader
from fastvid.format.schema import (
    FORMAT_VERSION,
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
)
from fastvid.format.stream_reader import StreamReader
from fastvid.format.tar import TarDigest, TarMember, read_members, sample_groups, to_json, wds2idx, write_tar
from fastvid.runtime import faults
from fastvid.runtime.arrays import RecordArray
from fastvid.storage import Storage
from fastvid.storage.protocol import advise_sparse
from fastvid.storage.transfer import copy_file

_HEADERS: Final = RecordReader(PKT_HEADER_DTYPE, "Header")
_STREAMS: Final = RecordReader(STREAM_DTYPE, "Stream")
_STREAMS_AT: Final = PKT_HEADER_DTYPE.itemsize
_WHOLE: Final = int(StreamFlag.WHOLE)

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
    index_shard(place, stem, streams=streams)
    if scratch is not None:
        for suffix in SHARD_SUFFIXES:
            copy_file(scratch, f"{stem}.{suffix}", storage)
            faults.reach("upload")
        for suffix in SHARD_SUFFIXES:
            scratch.delete(f"{stem}.{suffix}")
    return digest


def index_shard(
    storage: Storage, stem: str, *, streams: tuple[str, ...] = ("rgb",), indexer: Indexer | None = None
) -> list[IndexedSample]:
    """Derive the sidecars of a tar from its bytes and write them.

    Args:
        storage: The dataset's folder.
        stem: Stem of the file names, such as ``data-000000``.
        streams: The video streams that every sample has.
        indexer: Indexes samples of tars that other tools wrote; by default `index_sample`, for fastvid's own.

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
    pkt, rows = _pack(samples, streams)
    storage.write(f"{stem}.parquet", facts_parquet(samples, rows))
    storage.write(f"{stem}.pkt", pkt)
    return samples


def has_sidecars(storage: Storage, stem: str) -> bool:
    """Return whether all sidecars of a shard exist."""
    return all(storage.exists(f"{stem}.{suffix}") for suffix in ("idx", "parquet", "pkt"))


class Shard:
    """The memory-mapped packet sidecar of one shard; a look-up reads one stream record and its packets.

    Args:
        storage: The dataset's folder.
        stem: Stem of the file names, such as ``data-000000``.

    Raises:
        StorageError: If the sidecar is missing.
        VersionError: If it has a newer major version.
        FormatError: If the file is not a packet sidecar, or its size contradicts its header.
    """

    __slots__ = ("_extradata", "_packets", "_view", "num_samples", "num_streams", "stem", "storage", "tar")

    def __init__(self, storage: Storage, stem: str) -> None:
        self.storage, self.stem, self.tar = storage, stem, f"{stem}.tar"
        name = f"{stem}.pkt"
        view = storage.map(name)
        advise_sparse(view)
        header = _HEADERS.read(view, 0) if len(view) >= PKT_HEADER_DTYPE.itemsize else None
        if header is None or header.magic != PKT_MAGIC:
            raise FormatError("file is not a packet sidecar", file=name, hint="run `fastvid index` to rebuild it")
        if header.major > FORMAT_VERSION[0]:
            raise VersionError(
                f"packet sidecar version {header.major}.{header.minor} is newer than {FORMAT_VERSION[0]}",
                file=name,
                hint="upgrade fastvid",
            )
        if header.stream_bytes != STREAM_DTYPE.itemsize or header.packet_bytes != PACKET_DTYPE.itemsize:
            raise FormatError("packet sidecar has records of an unknown size", file=name)
        self.num_samples, self.num_streams = header.num_samples, header.num_streams
        extradata = _STREAMS_AT + self.num_samples * self.num_streams * STREAM_DTYPE.itemsize
        packets = extradata + header.extradata_bytes
        size = packets + header.num_packets * PACKET_DTYPE.itemsize
        if size != len(view):
            raise FormatError(
                f"packet sidecar has {len(view)} bytes, its header says {size}",
                file=name,
                hint="run `fastvid index` to rebuild it",
            )
        self._view, self._extradata = view, extradata
        self._packets = np.frombuffer(view, PACKET_DTYPE, count=header.num_packets, offset=packets)

    def __repr__(self) -> str:
        return f"Shard({self.stem!r}, {self.num_samples} samples)"

    def check(self) -> None:
        """Verify the sidecar's own checksum.

        Raises:
            FormatError: If the checksum differs.
        """
        view = self.storage.map(f"{self.stem}.pkt")
        if zlib.crc32(view[_STREAMS_AT:]) != _HEADERS.read(view, 0).body_crc32:
            raise FormatError("packet sidecar does not match its checksum", file=f"{self.stem}.pkt")

    def info(self, row: int, stream: str = "rgb") -> StreamInfo:
        """Return the description of a stream of the sample at `row`."""
        record = self._record(row, stream)
        start = self._extradata + record.extradata_offset
        return _stream_info(
            record.codec,
            record.width,
            record.height,
            record.num_frames,
            record.fps_num,
            record.fps_den,
            bytes(self._view[start : start + record.extradata_size]),
            record.range,
            record.matrix,
            record.flags,
            record.flow_bound,
        )

    def table(self, row: int, stream: str = "rgb") -> PacketTable:
        """Return the packets of a stream, as a view of the memory map."""
        record = self._record(row, stream)
        records = self._packets[record.first_packet : record.first_packet + record.num_packets]
        try:
            return PacketTable(records, whole=bool(record.flags & _WHOLE))
        except FormatError as error:
            raise error.at(shard=self.stem, row=row, stream=stream) from error

    def member(self, row: int, stream: str = "rgb") -> tuple[int, int]:
        """Return the offset and size, in bytes, of a stream's member in the tar."""
        record = self._record(row, stream)
        return record.member_offset, record.member_size

    def reader(self, row: int, stream: str = "rgb") -> StreamReader:
        """Reads the stream's bytes."""
        return StreamReader(self.storage, self.tar, *self.member(row, stream))

    def _record(self, row: int, stream: str) -> Any:
        number = VIDEO_STREAMS.index(stream)
        if not 0 <= row < self.num_samples or number >= self.num_streams:
            raise FormatError(f"shard has no stream {stream!r} for sample {row}", shard=self.stem)
        return _STREAMS.read(self._view, _STREAMS_AT + (row * self.num_streams + number) * STREAM_DTYPE.itemsize)


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


def index_sample(view: memoryview, key: str, members: Sequence[TarMember], streams: tuple[str, ...]) -> IndexedSample:
    """Index a sample that fastvid wrote: its JSON, and the packets of its MP4s.

    Raises:
        FormatError: If the sample has no JSON or no video of a stream, or an MP4 cannot be indexed.
    """
    by_suffix = {member.suffix: member for member in members}
    if "json" not in by_suffix:
        raise FormatError("sample has no JSON member")
    at = by_suffix["json"]
    try:
        meta = json.loads(bytes(view[at.offset : at.offset + at.size]))
    except ValueError as error:
        raise FormatError(f"cannot parse the sample's JSON: {error}") from error
    indexed = []
    for name in streams:
        member = by_suffix.get(MEMBER_SUFFIX[name])
        if member is None:
            raise FormatError(f"sample has no {MEMBER_SUFFIX[name]} member")
        proved = meta.get("proved") if name == "rgb" else None
        info, records = index_mp4(
            view[member.offset : member.offset + member.size],
            conforms=bool(meta.get("conforms", False)),
            whole=isinstance(proved, dict) and proved.get("whole") is True,
        )
        if "fps" in meta:
            # Use the profile's exact rate: the mean over rounded container ticks only approximates it.
            info = replace(info, fps=Fraction(meta["fps"]))
        if name == "flow":
            info = replace(info, flow_bound=_flow_bound(meta))
        if proved is not None:
            info = proved_info(info, proved)
        indexed.append(IndexedStream(name, member, info, records))
    sound = by_suffix.get(MEMBER_SUFFIX["audio"])
    if sound is None:
        return IndexedSample(key, meta, tuple(indexed))
    heard = index_m4a(view[sound.offset : sound.offset + sound.size])
    return IndexedSample(key, meta, tuple(indexed), IndexedAudio(sound, heard))


def _flow_bound(meta: Mapping[str, Any]) -> float:
    try:
        # Round to float32, the type in the sidecar.
        return float(np.float32(meta["flow"]["bound"]))
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError("the sample's JSON has no valid flow bound (flow.bound)") from error


def proved_info(info: StreamInfo, proved: Mapping[str, Any]) -> StreamInfo:
    """Update a stream's description with facts found by decoding it, which the MP4's tables cannot tell.

    Args:
        info: The description from the tables.
        proved: ``width``, ``height``, ``color_range``, ``color_matrix`` and ``whole``, from the sample's JSON.

    Raises:
        FormatError: If one of them is missing or invalid.
    """
    try:
        return replace(
            info,
            width=int(proved["width"]),
            height=int(proved["height"]),
            range=Range[proved["color_range"].upper()],
            matrix=Matrix[proved["color_matrix"].upper()],
            flags=info.flags | (StreamFlag.WHOLE if proved["whole"] else StreamFlag.NONE),
        )
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise FormatError(f"invalid stream facts (proved) in the sample's JSON: {error!r}") from error


def _pack(samples: list[IndexedSample], streams: tuple[str, ...]) -> tuple[bytes, RecordArray]:
    rows = np.zeros(len(samples) * len(streams), dtype=STREAM_DTYPE)
    extradata: dict[bytes, int] = {}
    section, packets, first = bytearray(), [], 0
    flat = [stream for sample in samples for stream in sample.streams]
    for row, stream in zip(rows, flat, strict=True):
        info = stream.info
        if info.extradata not in extradata:
            extradata[info.extradata] = len(section)
            section += info.extradata
        row["member_offset"], row["member_size"] = stream.member.offset, stream.member.size
        row["first_packet"], row["num_packets"], row["num_frames"] = first, len(stream.records), info.num_frames
        row["extradata_offset"], row["extradata_size"] = extradata[info.extradata], len(info.extradata)
        row["fps_num"], row["fps_den"] = info.fps.numerator, info.fps.denominator
        row["width"], row["height"] = info.width, info.height
        row["flow_bound"] = info.flow_bound
        row["codec"], row["range"], row["matrix"], row["flags"] = info.codec, info.range, info.matrix, info.flags
        packets.append(stream.records)
        first += len(stream.records)
    section += bytes(-len(section) % 8)  # keeps the packet section aligned
    body = rows.tobytes() + bytes(section) + b"".join(records.tobytes() for records in packets)
    header = np.zeros(1, dtype=PKT_HEADER_DTYPE)
    header["magic"] = PKT_MAGIC
    header["major"], header["minor"] = FORMAT_VERSION
    header["num_samples"], header["num_streams"] = len(samples), len(streams)
    header["stream_bytes"], header["packet_bytes"] = STREAM_DTYPE.itemsize, PACKET_DTYPE.itemsize
    header["extradata_bytes"], header["num_packets"], header["body_crc32"] = len(section), first, zlib.crc32(body)
    return header.tobytes() + body, rows
