"""Build the facts of a shard: one Parquet row per stream of each sample, for people and queries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fastvid.format.indexed import IndexedAudio, IndexedSample
from fastvid.format.parquet import from_parquet, to_parquet
from fastvid.format.schema import FACT_FIELDS, FACTS_SCHEMA, Matrix, PacketFlag, Range, StreamFlag
from fastvid.runtime.arrays import RecordArray
from fastvid.storage import Storage

# Rows per row group: reading one row's facts then decodes a few hundred rows, not a whole shard.
_ROW_GROUP: Final = 100

META_FIELDS: Final = ("source_id", "source_sha256", "parent", "start_seconds", "end_seconds", "pix_fmt")


def facts_parquet(samples: Sequence[IndexedSample], rows: RecordArray) -> bytes:
    """Return the facts of a shard as Parquet bytes.

    There is one row per video stream of each sample, then one per audio track.

    `rows`: STREAM_DTYPE [N], one per video stream, in the same order.
    """
    facts = []
    flat = [(sample, stream) for sample in samples for stream in sample.streams]
    for (sample, stream), row in zip(flat, rows, strict=True):
        info, flags = stream.info, stream.records["flags"]
        facts.append(
            {name: sample.meta.get(name) for name in META_FIELDS}
            | {
                "key": sample.key,
                "source_id": sample.meta.get("source_id", sample.key),
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
                "member": stream.member.name,
                "member_offset": stream.member.offset,
                "member_size": stream.member.size,
                "first_packet": int(row["first_packet"]),
                "num_packets": len(stream.records),
                "num_keys": int(np.count_nonzero(flags & np.uint32(PacketFlag.KEY))),
                "num_droppable": int(np.count_nonzero(flags & np.uint32(PacketFlag.DROPPABLE))),
                "flow_bound": info.flow_bound or None,
            }
        )
    # After all video streams: their rows are found by arithmetic, and not every sample has audio.
    facts += [_audio_facts(sample, sample.audio) for sample in samples if sample.audio is not None]
    return to_parquet(pa.Table.from_pylist(facts, schema=FACTS_SCHEMA), row_group=_ROW_GROUP)


def has_audio(storage: Storage, shard: str) -> bool:
    """Return whether a sample of a shard has audio, by its facts."""
    file = f"{shard}.parquet"
    return "audio" in from_parquet(storage.read(file), file=file, columns=["stream"])["stream"].to_pylist()


def with_facts(storage: Storage, shards: Sequence[str], stream: str, annotations: pa.Table) -> pa.Table:
    """Return annotations with the columns of FACT_FIELDS, read from the shards' facts.

    A column that already has such a name becomes ``source_<name>``.

    `annotations`: one row per sample.
    """
    names = ["stream", "num_frames", "fps_num", "fps_den", "width", "height"]
    tables = []
    for shard in shards:
        file = f"{shard}.parquet"
        tables.append(from_parquet(storage.read(file), file=file, columns=names))
    facts = pa.concat_tables(tables)
    facts = facts.filter(pc.equal(facts["stream"], stream))
    rate = pc.divide(facts["fps_num"].cast(pa.float64()), facts["fps_den"].cast(pa.float64()))
    found = {"fps": rate, "width": facts["width"], "height": facts["height"]}
    found["duration"] = pc.divide(facts["num_frames"].cast(pa.float64()), rate)
    annotations = annotations.rename_columns(
        [f"source_{name}" if name in FACT_FIELDS else name for name in annotations.column_names]
    )
    for name, kind in FACT_FIELDS.items():
        annotations = annotations.append_column(name, found[name].cast(kind))
    return annotations


def _audio_facts(sample: IndexedSample, audio: IndexedAudio) -> dict[str, Any]:
    info = audio.info
    return {name: sample.meta.get(name) for name in META_FIELDS if name != "pix_fmt"} | {
        "key": sample.key,
        "source_id": sample.meta.get("source_id", sample.key),
        "stream": "audio",
        "num_frames": info.num_samples,
        "fps_num": info.sample_rate,
        "fps_den": 1,
        "width": 0,
        "height": 0,
        "codec": info.codec,
        "color_range": Range.UNKNOWN.name.lower(),
        "color_matrix": Matrix.UNKNOWN.name.lower(),
        "conforms": True,
        "whole": True,
        "extradata": info.extradata,
        "member": audio.member.name,
        "member_offset": audio.member.offset,
        "member_size": audio.member.size,
        "first_packet": 0,
        "num_packets": info.num_packets,
        "num_keys": info.num_packets,
        "num_droppable": 0,
        "channels": info.channels,
    }
