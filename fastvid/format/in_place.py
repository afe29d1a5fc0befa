"""Index samples, pack the index of a shard, and list the files of a shard of videos in place.

A dataset of videos in place does not contain its videos, but lists their files:

    data-000000.files     one row for each stream of each sample: the path or URL of its file, and its version
    data-000000.parquet   facts, the properties of each sample's streams, as for any shard
    data-000000.pkt       index for the loader; offsets count from the start of the file

The list takes the place of the tar: the generation and the `.pkt` record its SHA-256. Files are named by absolute paths
or URLs below one root, which a reader may replace by another: the videos may have been moved.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from typing import Any, Final

import numpy as np
import pyarrow as pa

from fastvid.errors import FormatError, UsageError
from fastvid.format.mp4 import AudioInfo, index_m4a, index_mp4, settled
from fastvid.format.packets import StreamInfo
from fastvid.format.presentation import coded_of
from fastvid.format.schema import (
    AUDIO,
    AUDIO_BLOCK,
    AUDIO_DTYPE,
    DESCRIBED,
    DESCRIBED_DTYPE,
    FLOW,
    FORMAT_VERSION,
    PACKET_DTYPE,
    PICTURES,
    PKT_HEADER_DTYPE,
    PKT_MAGIC,
    STREAM_DTYPE,
    Matrix,
    Range,
    StreamFlag,
    from_parquet,
    member_suffix,
    to_parquet,
)
from fastvid.format.tar import TarMember
from fastvid.runtime.arrays import RecordArray
from fastvid.runtime.names import decode_name, encode_name
from fastvid.storage.protocol import Version
from fastvid.storage.urls import is_remote

FILES_SCHEMA: Final = pa.schema(
    [
        pa.field("key", pa.string(), nullable=False),
        pa.field("stream", pa.string(), nullable=False),
        pa.field("file", pa.string(), nullable=False),  # absolute path or URL; `encode_name` makes it valid Unicode
        pa.field("size", pa.int64(), nullable=False),  # bytes
        # The store's tag, or the time of the last change of a local file in nanoseconds; null if a server sends none.
        pa.field("tag", pa.string()),
        pa.field("modified", pa.string()),  # the server's date, for servers that send no tag
    ]
)


@dataclass(frozen=True, slots=True)
class ListedFile:
    """The file that contains a stream of a sample, and the version of it that was indexed."""

    key: str
    stream: str
    file: str  # absolute path or URL
    size: int  # size in bytes
    tag: str | None  # see FILES_SCHEMA
    modified: str | None = None  # see FILES_SCHEMA

    @property
    def version(self) -> Version:
        """The version of the file that was indexed."""
        return Version.parse(self.tag, self.modified, self.size)


@dataclass(frozen=True, slots=True)
class Root:
    """The folder or URL below which the videos of a dataset are."""

    listed: str  # in the list of files
    current: str  # where they are now

    def locate(self, file: str) -> str:
        """Return the current path or URL of a listed file."""
        if self.listed == self.current:
            return file
        if not file.startswith(f"{self.listed}/"):
            raise FormatError("listed file is not below the root of the dataset's videos", file=file, root=self.listed)
        return self.current + file[len(self.listed) :]


def pack_files(files: Iterable[ListedFile]) -> bytes:
    """Return the bytes of the list of a shard's files, sample by sample and in the order of the streams."""
    rows = [asdict(file) | {"file": encode_name(file.file)} for file in files]
    return to_parquet(pa.Table.from_pylist(rows, schema=FILES_SCHEMA))


def read_files(data: bytes | memoryview, *, file: str) -> list[ListedFile]:
    """Return the rows of a list of files; `file`: its name, for messages."""
    table = from_parquet(bytes(data), file=file)
    if table.schema != FILES_SCHEMA:
        raise FormatError("list of files has other columns than expected", file=file)
    columns = [column.to_pylist() for column in table.columns]
    columns[2] = list(map(decode_name, columns[2]))
    return [ListedFile(*row) for row in zip(*columns, strict=True)]


def parse_root(listed: str, current: str | None) -> Root:
    """Return the root of a dataset's videos, from the listed one and the one given by the user who opens it, if any."""
    if current is None:
        return Root(listed, listed)
    if not current.strip("/"):
        raise UsageError(f"root of the videos is {current!r}", hint="give the folder or URL that replaces it")
    return Root(listed, current.rstrip("/") if is_remote(current) else os.path.abspath(current))


def common_root(files: Sequence[str]) -> str:
    """Return the longest folder or URL that all files are below, without a slash at its end."""
    folders = [file.split("/")[:-1] for file in (min(files), max(files))]
    same = 0
    while same < min(map(len, folders)) and folders[0][same] == folders[1][same]:
        same += 1
    return "/".join(folders[0][:same])


_CHECKSUM_AT: Final = PKT_HEADER_DTYPE.fields["index_crc32"][1]  # type: ignore[index]


@dataclass(frozen=True, slots=True)
class IndexedStream:
    """A video stream of an indexed sample: its tar member, description and packets."""

    name: str
    member: TarMember
    info: StreamInfo
    records: RecordArray


@dataclass(frozen=True, slots=True)
class IndexedAudio:
    """The audio track of an indexed sample, with the CRC-32 of each block of its member."""

    member: TarMember
    info: AudioInfo
    checksums: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class IndexedSample:
    """A sample's key, the content of its JSON, its video streams, and its audio track if it has one."""

    key: str
    meta: Mapping[str, Any]
    streams: tuple[IndexedStream, ...]
    audio: IndexedAudio | None = None


def index_sample(view: memoryview, key: str, members: Sequence[TarMember], streams: tuple[str, ...]) -> IndexedSample:
    """Index a sample that fastvid wrote: its JSON, and the packets of its MP4s."""
    by_suffix = {member.suffix: member for member in members}
    if "json" not in by_suffix:
        raise FormatError("sample has no JSON member")
    at = by_suffix["json"]
    try:
        meta = json.loads(bytes(view[at.offset : at.offset + at.size]))
    except (ValueError, RecursionError) as error:
        raise FormatError(f"cannot parse the sample's JSON: {error}") from error
    indexed = []
    for name in streams:
        member = by_suffix.get(member_suffix(name))
        if member is None:
            raise FormatError(f"sample has no {member_suffix(name)} member")
        # Facts of this stream alone: for example, depth may have been copied while the cameras were encoded.
        told = meta.get("streams", {}).get(name, {"proved": meta.get("proved")} if name == PICTURES else {})
        proved = told.get("proved")
        info, records = index_mp4(
            view[member.offset : member.offset + member.size],
            conforms=bool(told.get("conforms", meta.get("conforms", False))),
            whole=isinstance(proved, dict) and proved.get("whole") is True,
        )
        if "fps" in meta:
            # Use the exact rate that was encoded: the mean over rounded container ticks only approximates it.
            info = replace(info, fps=Fraction(meta["fps"]))
        if name == FLOW:
            info = replace(info, flow_bound=_flow_bound(meta))
        if proved is not None:
            info = proved_info(info, proved)
        indexed.append(IndexedStream(name, member, settled(info), records))
    sound = by_suffix.get(member_suffix(AUDIO))
    if sound is None:
        return IndexedSample(key, meta, tuple(indexed))
    data = view[sound.offset : sound.offset + sound.size]
    checksums = tuple(zlib.crc32(data[at : at + AUDIO_BLOCK]) for at in range(0, len(data), AUDIO_BLOCK))
    return IndexedSample(key, meta, tuple(indexed), IndexedAudio(sound, index_m4a(data), checksums))


def _flow_bound(meta: Mapping[str, Any]) -> float:
    try:
        # Rounded to float32, the type in the sidecar.
        return float(np.float32(meta["flow"]["bound"]))
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError("the sample's JSON has no valid flow bound (flow.bound)") from error


def proved_info(info: StreamInfo, proved: Mapping[str, Any]) -> StreamInfo:
    """Update a stream's description with facts found by decoding it, which an MP4's tables do not contain."""
    try:
        return replace(
            info,
            width=int(proved["width"]),
            height=int(proved["height"]),
            range=Range[proved["color_range"].upper()],
            matrix=Matrix[proved["color_matrix"].upper()],
            flags=info.flags | (StreamFlag.WHOLE if proved["whole"] else StreamFlag.NONE),
            coded=coded_of(proved.get("coded")),  # records of 0.2 have none
        )
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise FormatError(f"invalid stream facts (proved) in the sample's JSON: {error!r}") from error


def pack_index(
    samples: Sequence[IndexedSample], streams: tuple[str, ...], tar_sha256: str, *, described: bool = False
) -> tuple[bytes, RecordArray]:
    """Return the bytes of a `.pkt`, and its STREAM_DTYPE or DESCRIBED_DTYPE rows [N], one per video stream.

    `described`: whether to store how each stream is shown and when, even if none differs from the default.
    """
    flat = [stream for sample in samples for stream in sample.streams]
    described = described or any(stream.info.coded or stream.info.times for stream in flat)
    rows = np.zeros(len(samples) * len(streams), dtype=DESCRIBED_DTYPE if described else STREAM_DTYPE)
    places: dict[bytes, int] = {}
    section, packets, first = bytearray(), [], 0

    def place(data: bytes) -> int:
        if data not in places:
            places[data] = len(section)
            section.extend(data)
        return places[data]

    for row, stream in zip(rows, flat, strict=True):
        info = stream.info
        row["member_offset"], row["member_size"] = stream.member.offset, stream.member.size
        row["first_packet"], row["num_packets"], row["num_frames"] = first, len(stream.records), info.num_frames
        row["extradata_offset"], row["extradata_size"] = place(info.extradata), len(info.extradata)
        row["fps_num"], row["fps_den"] = info.fps.numerator, info.fps.denominator
        row["width"], row["height"] = info.width, info.height
        row["flow_bound"] = info.flow_bound
        row["codec"], row["range"], row["matrix"], row["flags"] = info.codec, info.range, info.matrix, info.flags
        if described:
            _describe(row, info)
            times = b"" if info.times is None else info.times.data
            row["times_offset"], row["times_size"] = place(times) if times else 0, len(times)
        packets.append(stream.records.tobytes())
        row["packets_crc32"] = zlib.crc32(packets[-1])
        first += len(stream.records)
    section += bytes(-len(section) % 8)  # keeps the following sections aligned
    audio = _pack_audio(samples)
    header = np.zeros(1, dtype=PKT_HEADER_DTYPE)
    header["magic"] = PKT_MAGIC
    header["major"], header["minor"] = FORMAT_VERSION[0], DESCRIBED if described else FORMAT_VERSION[1]
    header["num_samples"], header["num_streams"] = len(samples), len(streams)
    header["stream_bytes"], header["packet_bytes"] = rows.itemsize, PACKET_DTYPE.itemsize
    header["extradata_bytes"], header["num_packets"], header["audio_bytes"] = len(section), first, len(audio)
    header["tar_sha256"] = bytes.fromhex(tar_sha256)
    header["index_crc32"] = index_crc32(header.tobytes() + rows.tobytes() + section + audio)
    return b"".join([header.tobytes(), rows.tobytes(), section, audio, *packets]), rows


def _describe(row: np.void, info: StreamInfo) -> None:
    """Store in a row how decoded pictures become the shown ones."""
    coded = info.coded
    if coded is not None:
        row["coded_width"], row["coded_height"] = coded.width, coded.height
        row["crop_y"], row["crop_x"], row["crop_height"], row["crop_width"] = coded.crop
        row["turn"], row["mirror"] = coded.turn, coded.mirror


def _pack_audio(samples: Sequence[IndexedSample]) -> bytes:
    """Return the audio section; empty if no sample has audio."""
    rows, checksums = np.zeros(len(samples), dtype=AUDIO_DTYPE), list[int]()
    for row, sample in zip(rows, samples, strict=True):
        row["first_block"] = len(checksums)
        if sample.audio is not None:
            row["member_offset"], row["member_size"] = sample.audio.member.offset, sample.audio.member.size
            checksums += sample.audio.checksums
    return rows.tobytes() + np.asarray(checksums, "<u4").tobytes() if checksums else b""


def index_crc32(index: bytes | memoryview) -> int:
    """Return the CRC-32 of a sidecar's index, all of it except the field of the CRC-32 itself."""
    return zlib.crc32(index[PKT_HEADER_DTYPE.itemsize :], zlib.crc32(index[:_CHECKSUM_AT]))
