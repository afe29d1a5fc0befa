"""Write shards: a tar, or a list of video files, and the sidecars that are derived from it.

`index_shard` is the only function that derives the sidecars of a tar, for new shards as for repaired ones: it indexes
the samples, then packs their index, and the facts, properties of each sample's streams in one Parquet row per stream.
`listed_samples` reads the samples of a shard of videos in place, so that another shard can be written of them.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Final

import numpy as np
import pyarrow as pa

from fastvid.errors import FastvidError, FormatError
from fastvid.format import schema
from fastvid.format.in_place import ListedFile, pack_files
from fastvid.format.mp4 import AudioInfo, index_m4a, index_mp4
from fastvid.format.packets import StreamInfo
from fastvid.format.presentation import coded_of
from fastvid.format.shard import Shard
from fastvid.format.tar import TarDigest, TarMember, read_members, sample_groups, to_json, wds2idx, write_tar
from fastvid.runtime import faults
from fastvid.runtime.arrays import RecordArray
from fastvid.runtime.values import sha256
from fastvid.storage import Storage
from fastvid.storage.urls import copy_file

# Rows per row group: reading one row's facts then decodes a few hundred rows, not a whole shard.
_ROW_GROUP: Final = 100

# Entries of a sample's JSON that its facts contain; rows of audio omit the last one.
META_FIELDS: Final = ("source_id", "source_sha256", "parent", "start_seconds", "end_seconds", "pix_fmt")


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
        member = by_suffix.get(schema.member_suffix(name))
        if member is None:
            raise FormatError(f"sample has no {schema.member_suffix(name)} member")
        # Facts of this stream alone: for example, depth may have been copied while the cameras were encoded.
        told = meta.get("streams", {}).get(name, {"proved": meta.get("proved")} if name == schema.PICTURES else {})
        proved = told.get("proved")
        info, records = index_mp4(
            view[member.offset : member.offset + member.size],
            conforms=bool(told.get("conforms", meta.get("conforms", False))),
            whole=isinstance(proved, dict) and proved.get("whole") is True,
            fps=Fraction(meta["fps"]) if "fps" in meta else None,
        )
        if name == schema.FLOW:
            info = replace(info, flow_bound=_flow_bound(meta))
        if proved is not None:
            info = proved_info(info, proved)
        indexed.append(IndexedStream(name, member, info, records))
    sound = by_suffix.get(schema.member_suffix(schema.AUDIO))
    if sound is None:
        return IndexedSample(key, meta, tuple(indexed))
    data = view[sound.offset : sound.offset + sound.size]
    checksums = tuple(zlib.crc32(data[at : at + schema.AUDIO_BLOCK]) for at in range(0, len(data), schema.AUDIO_BLOCK))
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
            range=schema.Range[proved["color_range"].upper()],
            matrix=schema.Matrix[proved["color_matrix"].upper()],
            flags=info.flags | (schema.StreamFlag.WHOLE if proved["whole"] else schema.StreamFlag.NONE),
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
    rows = np.zeros(len(samples) * len(streams), dtype=schema.DESCRIBED_DTYPE if described else schema.STREAM_DTYPE)
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
    header = np.zeros(1, dtype=schema.PKT_HEADER_DTYPE)
    header["magic"] = schema.PKT_MAGIC
    header["major"], minor = schema.FORMAT_VERSION
    header["minor"] = schema.DESCRIBED if described else minor
    header["num_samples"], header["num_streams"] = len(samples), len(streams)
    header["stream_bytes"], header["packet_bytes"] = rows.itemsize, schema.PACKET_DTYPE.itemsize
    header["extradata_bytes"], header["num_packets"], header["audio_bytes"] = len(section), first, len(audio)
    header["tar_sha256"] = bytes.fromhex(tar_sha256)
    header["index_crc32"] = schema.index_crc32(header.tobytes() + rows.tobytes() + section + audio)
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
    rows, checksums = np.zeros(len(samples), dtype=schema.AUDIO_DTYPE), list[int]()
    for row, sample in zip(rows, samples, strict=True):
        row["first_block"] = len(checksums)
        if sample.audio is not None:
            row["member_offset"], row["member_size"] = sample.audio.member.offset, sample.audio.member.size
            checksums += sample.audio.checksums
    return rows.tobytes() + np.asarray(checksums, "<u4").tobytes() if checksums else b""


def facts_parquet(samples: Sequence[IndexedSample], rows: RecordArray) -> bytes:
    """Return the facts of a shard as Parquet bytes.

    There is one row per video stream of each sample, then one per audio track.

    `rows`: STREAM_DTYPE [N], one per video stream, in the same order.
    """
    flat = [(sample, stream) for sample in samples for stream in sample.streams]
    facts = [_video_facts(sample, stream, row) for (sample, stream), row in zip(flat, rows, strict=True)]
    # After all video streams: their rows are found by arithmetic, and not every sample has audio.
    facts += [_audio_facts(sample, sample.audio) for sample in samples if sample.audio is not None]
    return schema.to_parquet(pa.Table.from_pylist(facts, schema=schema.FACTS_SCHEMA), row_group=_ROW_GROUP)


def _video_facts(sample: IndexedSample, stream: IndexedStream, row: np.void) -> dict[str, Any]:
    info, flags = stream.info, stream.records["flags"]
    return _member_facts(sample, stream.member, META_FIELDS) | {
        "stream": stream.name,
        "num_frames": info.num_frames,
        "fps_num": info.fps.numerator,
        "fps_den": info.fps.denominator,
        "width": info.width,
        "height": info.height,
        "codec": info.codec.label,
        "color_range": info.range.name.lower(),
        "color_matrix": info.matrix.name.lower(),
        "conforms": bool(info.flags & schema.StreamFlag.CONFORMS),
        "whole": bool(info.flags & schema.StreamFlag.WHOLE),
        "extradata": info.extradata,
        "first_packet": int(row["first_packet"]),
        "num_packets": len(stream.records),
        "num_keys": int(np.count_nonzero(flags & np.uint32(schema.PacketFlag.KEY))),
        "num_droppable": int(np.count_nonzero(flags & np.uint32(schema.PacketFlag.DROPPABLE))),
        "flow_bound": info.flow_bound or None,
    }


def _audio_facts(sample: IndexedSample, audio: IndexedAudio) -> dict[str, Any]:
    info = audio.info
    zeros = dict.fromkeys(("width", "height", "first_packet", "num_droppable"), 0)
    return (
        _member_facts(sample, audio.member, META_FIELDS[:-1])
        | zeros
        | {
            "stream": "audio",
            "num_frames": info.num_samples,
            "fps_num": info.sample_rate,
            "fps_den": 1,
            "codec": info.codec,
            "color_range": schema.Range.UNKNOWN.name.lower(),
            "color_matrix": schema.Matrix.UNKNOWN.name.lower(),
            "conforms": True,
            "whole": True,
            "extradata": info.extradata,
            "num_packets": info.num_packets,
            "num_keys": info.num_packets,
            "channels": info.channels,
        }
    )


def _member_facts(sample: IndexedSample, member: TarMember, fields: Sequence[str]) -> dict[str, Any]:
    """Return the facts of a stream that describe its sample and its tar member; `fields`: entries of the JSON."""
    return {name: sample.meta.get(name) for name in fields} | {
        "key": sample.key,
        "source_id": sample.meta.get("source_id", sample.key),
        "member": member.name,
        "member_offset": member.offset,
        "member_size": member.size,
    }


_LAST: Final = {schema.FLOW: 1, schema.AUDIO: 2}  # order of the members that follow the pictures


def sample_members(meta: Mapping[str, Any], streams: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the tar members of a sample by suffix: JSON, then pictures or cameras, then flow, then sound."""
    names = sorted(streams, key=lambda name: _LAST.get(name, 0))
    return {"json": to_json(meta)} | {schema.member_suffix(name): streams[name] for name in names}


def write_shard(
    storage: Storage,
    stem: str,
    samples: Iterable[tuple[str, Mapping[str, bytes]]],
    *,
    streams: tuple[str, ...] = (schema.PICTURES,),
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
        for suffix in schema.SHARD_SUFFIXES:
            copy_file(scratch, f"{stem}.{suffix}", storage)
            faults.reach("upload")
        for suffix in schema.SHARD_SUFFIXES:
            scratch.delete(f"{stem}.{suffix}")
    return digest


def index_shard(
    storage: Storage,
    stem: str,
    *,
    streams: tuple[str, ...] = (schema.PICTURES,),
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


@dataclass(frozen=True, slots=True)
class ListedSample:
    """A sample of a shard of videos in place: what was indexed of it, and its files."""

    indexed: IndexedSample
    files: tuple[ListedFile, ...]

    def renamed(self, key: str, change: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> ListedSample:
        """Return the sample with another key, and with its facts changed by `change`."""
        files = tuple(replace(file, key=key) for file in self.files)
        streams = tuple(replace(stream, member=replace(stream.member, key=key)) for stream in self.indexed.streams)
        return ListedSample(replace(self.indexed, key=key, meta=change(self.indexed.meta), streams=streams), files)


def write_in_place(storage: Storage, stem: str, samples: Sequence[ListedSample], streams: tuple[str, ...]) -> TarDigest:
    """Write a shard of videos in place, the list of files and then its sidecars; return the digest of the list."""
    listed = pack_files(file for sample in samples for file in sample.files)
    indexed = [sample.indexed for sample in samples]
    digest = TarDigest(len(listed), sha256(listed), len(samples))
    pkt, rows = pack_index(indexed, streams, digest.sha256, described=True)
    storage.write(f"{stem}.files", listed)
    faults.reach("sidecar")
    storage.write(f"{stem}.parquet", facts_parquet(indexed, rows))
    storage.write(f"{stem}.pkt", pkt)
    return digest


def listed_samples(shard: Shard) -> Iterator[ListedSample]:
    """Yield the samples of a shard of videos in place, in the order of the shard."""
    facts = schema.read_facts(shard.storage, shard.stem).to_pylist()
    count = shard.num_streams
    if len(facts) != shard.num_samples * count:
        message = f"{len(facts)} facts for {shard.num_samples} samples of {count} streams"
        raise FormatError(message, file=f"{shard.stem}.parquet")
    for row in range(shard.num_samples):
        mine = facts[row * count : (row + 1) * count]
        streams, files = [], []
        for stream, fact in zip(shard.streams, mine, strict=True):
            files.append(shard.file(row, stream))
            offset, size = shard.member(row, stream)
            member = TarMember(fact["member"], fact["key"], "", offset, size)
            records = shard.table(row, stream).records
            streams.append(IndexedStream(stream, member, shard.info(row, stream), records))
        meta = {field: mine[0][field] for field in META_FIELDS}
        yield ListedSample(IndexedSample(mine[0]["key"], meta, tuple(streams)), tuple(files))
