"""Index samples, the input of the sidecars, and pack the index of a shard into the bytes of its `.pkt`."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Final

import numpy as np

from fastvid.errors import FormatError
from fastvid.format.mp4.audio import AudioInfo, index_m4a
from fastvid.format.mp4.demux import index_mp4
from fastvid.format.packets import StreamInfo
from fastvid.format.schema import (
    AUDIO,
    AUDIO_BLOCK,
    AUDIO_DTYPE,
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
    member_suffix,
)
from fastvid.format.tar import TarMember
from fastvid.runtime.arrays import RecordArray

_CHECKSUM_AT: Final = PKT_HEADER_DTYPE.fields["index_crc32"][1]  # type: ignore[index]


@dataclass(frozen=True, slots=True)
class IndexedStream:
    """A video stream of an indexed sample."""

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
    """A sample's key, parsed JSON, video streams and, if it has one, audio track."""

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
        # What a stream has of its own, such as depth that was copied beside cameras that were encoded.
        told = meta.get("streams", {}).get(name, {"proved": meta.get("proved")} if name == PICTURES else {})
        proved = told.get("proved")
        info, records = index_mp4(
            view[member.offset : member.offset + member.size],
            conforms=bool(told.get("conforms", meta.get("conforms", False))),
            whole=isinstance(proved, dict) and proved.get("whole") is True,
        )
        if "fps" in meta:
            # Use the profile's exact rate: the mean over rounded container ticks only approximates it.
            info = replace(info, fps=Fraction(meta["fps"]))
        if name == FLOW:
            info = replace(info, flow_bound=_flow_bound(meta))
        if proved is not None:
            info = proved_info(info, proved)
        indexed.append(IndexedStream(name, member, info, records))
    sound = by_suffix.get(member_suffix(AUDIO))
    if sound is None:
        return IndexedSample(key, meta, tuple(indexed))
    data = view[sound.offset : sound.offset + sound.size]
    checksums = tuple(zlib.crc32(data[at : at + AUDIO_BLOCK]) for at in range(0, len(data), AUDIO_BLOCK))
    return IndexedSample(key, meta, tuple(indexed), IndexedAudio(sound, index_m4a(data), checksums))


def _flow_bound(meta: Mapping[str, Any]) -> float:
    try:
        # Round to float32, the type in the sidecar.
        return float(np.float32(meta["flow"]["bound"]))
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError("the sample's JSON has no valid flow bound (flow.bound)") from error


def proved_info(info: StreamInfo, proved: Mapping[str, Any]) -> StreamInfo:
    """Update a stream's description with facts found by decoding it, which the MP4's tables cannot tell."""
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


def pack_index(
    samples: Sequence[IndexedSample], streams: tuple[str, ...], tar_sha256: str
) -> tuple[bytes, RecordArray]:
    """Return the bytes of a `.pkt`, and its STREAM_DTYPE rows [N], one per video stream."""
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
        packets.append(stream.records.tobytes())
        row["packets_crc32"] = zlib.crc32(packets[-1])
        first += len(stream.records)
    section += bytes(-len(section) % 8)  # keeps the following sections aligned
    audio = _pack_audio(samples)
    header = np.zeros(1, dtype=PKT_HEADER_DTYPE)
    header["magic"] = PKT_MAGIC
    header["major"], header["minor"] = FORMAT_VERSION
    header["num_samples"], header["num_streams"] = len(samples), len(streams)
    header["stream_bytes"], header["packet_bytes"] = STREAM_DTYPE.itemsize, PACKET_DTYPE.itemsize
    header["extradata_bytes"], header["num_packets"], header["audio_bytes"] = len(section), first, len(audio)
    header["tar_sha256"] = bytes.fromhex(tar_sha256)
    header["index_crc32"] = index_crc32(header.tobytes() + rows.tobytes() + section + audio)
    return b"".join([header.tobytes(), rows.tobytes(), section, audio, *packets]), rows


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
    """Return the checksum of a sidecar's index: all of it except the checksum itself."""
    return zlib.crc32(index[PKT_HEADER_DTYPE.itemsize :], zlib.crc32(index[:_CHECKSUM_AT]))
