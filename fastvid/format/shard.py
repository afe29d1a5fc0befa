"""One shard: a tar and the three sidecars that are computed from it.

    data-000000.tar       the only original
    data-000000.idx       for DALI's webdataset reader
    data-000000.parquet   facts for people and queries
    data-000000.pkt       what the loader needs, memory-mapped: header, streams, extradata, packets

Sidecars are always derived from the tar by `index_shard`, when it is written and when it is repaired, so they cannot
disagree about how.
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
from fastvid.format.records import Records
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
from fastvid.format.tar import Member, TarDigest, read_members, sample_groups, to_json, wds2idx, write_tar
from fastvid.runtime import faults
from fastvid.runtime.arrays import RecordArray
from fastvid.storage import Storage
from fastvid.storage.protocol import advise_sparse
from fastvid.storage.transfer import copy_file

_HEADERS: Final = Records(PKT_HEADER_DTYPE, "Header")
_STREAMS: Final = Records(STREAM_DTYPE, "Stream")
_STREAMS_AT: Final = PKT_HEADER_DTYPE.itemsize
_WHOLE: Final = int(StreamFlag.WHOLE)

SHARD_SUFFIXES: Final = ("tar", "idx", "parquet", "pkt")
"""Files of a shard, the original first."""


Indexer = Callable[[memoryview, str, Sequence[Member], tuple[str, ...]], IndexedSample | None]
"""Finds the video streams of one sample: called with the tar, the sample's key, its members and the streams that are
wanted. None leaves the sample out of the sidecars; it stays in the tar."""


def sample_members(meta: Mapping[str, Any], streams: Mapping[str, bytes]) -> dict[str, bytes]:
    """The tar members of a sample by suffix: its JSON first, then its streams in their fixed order."""
    return {"json": to_json(meta)} | {MEMBER_SUFFIX[name]: streams[name] for name in MEMBER_SUFFIX if name in streams}


def write_shard(
    storage: Storage,
    stem: str,
    samples: Iterable[tuple[str, Mapping[str, bytes]]],
    *,
    streams: tuple[str, ...] = ("rgb",),
    scratch: Storage | None = None,
) -> TarDigest:
    """Writes a tar and its sidecars. The tar appears whole, and before its sidecars.

    Args:
        storage: The dataset's folder.
        stem: Such as ``data-000000``.
        samples: Keys with members by suffix, as `sample_members` builds them; read once, in order.
        streams: The video streams that every sample has.
        scratch: A local folder in which the shard is made first, for a storage from which it would have to be read
            back to be indexed; nothing stays there.

    Raises:
        UsageError: A key breaks the grammar or comes twice.
        FormatError: A member that should be a video cannot be indexed.
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
    """Computes the sidecars of a tar from its bytes and writes them.

    Args:
        storage: The dataset's folder.
        stem: Such as ``data-000000``.
        streams: The video streams that every sample has.
        indexer: Finds packets in tars that other tools wrote; by default `index_sample`, for fastvid's own.

    Raises:
        FormatError: The tar is broken, or a sample lacks its JSON or a stream.
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
    """Whether all sidecars of a shard are there."""
    return all(storage.exists(f"{stem}.{suffix}") for suffix in ("idx", "parquet", "pkt"))


class Shard:
    """The packet sidecar of one shard, mapped; finding a clip's packets reads one stream row and its packets.

    Args:
        storage: The dataset's folder.
        stem: Such as ``data-000000``.

    Raises:
        StorageError: The sidecar is missing.
        VersionError: It is of a newer major version.
        FormatError: It is no packet sidecar, or its size contradicts its header.
    """

    __slots__ = ("_extradata", "_packets", "_view", "num_samples", "num_streams", "stem", "storage", "tar")

    def __init__(self, storage: Storage, stem: str) -> None:
        self.storage, self.stem, self.tar = storage, stem, f"{stem}.tar"
        name = f"{stem}.pkt"
        view = storage.map(name)
        advise_sparse(view)
        header = _HEADERS.read(view, 0) if len(view) >= PKT_HEADER_DTYPE.itemsize else None
        if header is None or header.magic != PKT_MAGIC:
            raise FormatError("file is no packet sidecar", file=name, hint="rebuild it with `fastvid index`")
        if header.major > FORMAT_VERSION[0]:
            raise VersionError(
                f"packet sidecar version {header.major}.{header.minor} is newer than {FORMAT_VERSION[0]}",
                file=name,
                hint="upgrade fastvid",
            )
        if header.stream_bytes != STREAM_DTYPE.itemsize or header.packet_bytes != PACKET_DTYPE.itemsize:
            raise FormatError("packet sidecar has records of another size", file=name)
        self.num_samples, self.num_streams = header.num_samples, header.num_streams
        extradata = _STREAMS_AT + self.num_samples * self.num_streams * STREAM_DTYPE.itemsize
        packets = extradata + header.extradata_bytes
        size = packets + header.num_packets * PACKET_DTYPE.itemsize
        if size != len(view):
            raise FormatError(
                f"packet sidecar has {len(view)} bytes, its header promises {size}",
                file=name,
                hint="rebuild it with `fastvid index`",
            )
        self._view, self._extradata = view, extradata
        self._packets = np.frombuffer(view, PACKET_DTYPE, count=header.num_packets, offset=packets)

    def __repr__(self) -> str:
        return f"Shard({self.stem!r}, {self.num_samples} samples)"

    def check(self) -> None:
        """Compares the sidecar with its own checksum.

        Raises:
            FormatError: They differ.
        """
        view = self.storage.map(f"{self.stem}.pkt")
        if zlib.crc32(view[_STREAMS_AT:]) != _HEADERS.read(view, 0).body_crc32:
            raise FormatError("packet sidecar does not match its checksum", file=f"{self.stem}.pkt")

    def info(self, row: int, stream: str = "rgb") -> StreamInfo:
        """What a decoder must know of a stream."""
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
        """The packets of a stream, a view of the map."""
        record = self._record(row, stream)
        records = self._packets[record.first_packet : record.first_packet + record.num_packets]
        try:
            return PacketTable(records, whole=bool(record.flags & _WHOLE))
        except FormatError as error:
            raise error.at(shard=self.stem, row=row, stream=stream) from error

    def member(self, row: int, stream: str = "rgb") -> tuple[int, int]:
        """First byte and bytes of the stream's member inside the tar."""
        record = self._record(row, stream)
        return record.member_offset, record.member_size

    def reader(self, row: int, stream: str = "rgb") -> StreamReader:
        """Reads the stream's bytes."""
        return StreamReader(self.storage, self.tar, *self.member(row, stream))

    def _record(self, row: int, stream: str) -> Any:
        number = VIDEO_STREAMS.index(stream)
        if not 0 <= row < self.num_samples or number >= self.num_streams:
            raise FormatError(f"shard has no stream {stream!r} of sample {row}", shard=self.stem)
        return _STREAMS.read(self._view, _STREAMS_AT + (row * self.num_streams + number) * STREAM_DTYPE.itemsize)


# Streams of a dataset differ in few of these, and each enumeration costs as much as the look-up.
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


def index_sample(view: memoryview, key: str, members: Sequence[Member], streams: tuple[str, ...]) -> IndexedSample:
    """Reads a sample that fastvid wrote: its JSON, and the packets of its MP4s.

    Raises:
        FormatError: It lacks its JSON or a stream, or an MP4 cannot be indexed.
    """
    by_suffix = {member.suffix: member for member in members}
    if "json" not in by_suffix:
        raise FormatError("sample has no JSON member")
    at = by_suffix["json"]
    try:
        meta = json.loads(bytes(view[at.offset : at.offset + at.size]))
    except ValueError as error:
        raise FormatError(f"the sample's JSON does not parse: {error}") from error
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
            # The profile set the rate; a mean over rounded container ticks could only come near it.
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
        # As float32, which is what the sidecar holds.
        return float(np.float32(meta["flow"]["bound"]))
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError("the sample's JSON does not say what its flow is bounded by") from error


def proved_info(info: StreamInfo, proved: Mapping[str, Any]) -> StreamInfo:
    """A stream with what decoding it has shown, where an MP4's tables say less.

    Args:
        info: What the tables say.
        proved: ``width``, ``height``, ``color_range``, ``color_matrix`` and ``whole``, as a sample's JSON has them.

    Raises:
        FormatError: One is missing or cannot be.
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
        raise FormatError(f"what the sample's JSON says of its stream does not parse: {error!r}") from error


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
