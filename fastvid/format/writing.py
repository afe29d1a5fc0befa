"""Write shards: a tar, or a list of video files, and the sidecars that are derived from it.

`index_shard` is the only function that derives the sidecars of a tar, for new shards as for repaired ones. Facts are
properties of each sample's streams, one Parquet row per stream.
`listed_samples` reads the samples of a shard of videos in place, so that another shard can be written of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import pyarrow as pa

from fastvid.errors import FastvidError, FormatError
from fastvid.format.in_place import (
    IndexedAudio,
    IndexedSample,
    IndexedStream,
    ListedFile,
    index_sample,
    pack_files,
    pack_index,
)
from fastvid.format.schema import (
    AUDIO,
    FACTS_SCHEMA,
    FLOW,
    PICTURES,
    SHARD_SUFFIXES,
    Matrix,
    PacketFlag,
    Range,
    StreamFlag,
    from_parquet,
    member_suffix,
    to_parquet,
)
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


def facts_parquet(samples: Sequence[IndexedSample], rows: RecordArray) -> bytes:
    """Return the facts of a shard as Parquet bytes.

    There is one row per video stream of each sample, then one per audio track.

    `rows`: STREAM_DTYPE [N], one per video stream, in the same order.
    """
    flat = [(sample, stream) for sample in samples for stream in sample.streams]
    facts = [_video_facts(sample, stream, row) for (sample, stream), row in zip(flat, rows, strict=True)]
    # After all video streams: their rows are found by arithmetic, and not every sample has audio.
    facts += [_audio_facts(sample, sample.audio) for sample in samples if sample.audio is not None]
    return to_parquet(pa.Table.from_pylist(facts, schema=FACTS_SCHEMA), row_group=_ROW_GROUP)


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
        "conforms": bool(info.flags & StreamFlag.CONFORMS),
        "whole": bool(info.flags & StreamFlag.WHOLE),
        "extradata": info.extradata,
        "first_packet": int(row["first_packet"]),
        "num_packets": len(stream.records),
        "num_keys": int(np.count_nonzero(flags & np.uint32(PacketFlag.KEY))),
        "num_droppable": int(np.count_nonzero(flags & np.uint32(PacketFlag.DROPPABLE))),
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
            "color_range": Range.UNKNOWN.name.lower(),
            "color_matrix": Matrix.UNKNOWN.name.lower(),
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


def listed_samples(shard: Shard) -> Iterator[ListedSample]:
    """Yield the samples of a shard of videos in place, in the order of the shard."""
    name = f"{shard.stem}.parquet"
    facts = from_parquet(shard.storage.read(name), file=name).to_pylist()
    count = shard.num_streams
    if len(facts) != shard.num_samples * count:
        raise FormatError(f"{len(facts)} facts for {shard.num_samples} samples of {count} streams", file=name)
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


def write_listed(storage: Storage, stem: str, samples: Iterable[ListedSample], streams: tuple[str, ...]) -> TarDigest:
    """Write a shard of videos in place, made of samples of other such shards, see `write_in_place`."""
    chosen = list(samples)
    files = [file for sample in chosen for file in sample.files]
    return write_in_place(storage, stem, [sample.indexed for sample in chosen], files, streams)
