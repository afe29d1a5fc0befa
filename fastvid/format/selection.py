"""Facts about samples, one Parquet row per stream, and the selection of samples by split or by a condition in SQL.

A condition is, for example, ``fps >= 24 and class = 'archery'``. DuckDB parses and evaluates it, so DuckDB's whole
expression language works: ``LIKE``, ``IN``, ``BETWEEN``, ``IS NULL``, ``'x' IN labels`` for a list column, arithmetic,
``length(caption)``, regular expressions. A condition can read only the table: no files, no network and no variables of
the program. It must be a function of the sample's row.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fastvid.errors import UsageError, naming_extras
from fastvid.format.in_place import IndexedAudio, IndexedSample, IndexedStream
from fastvid.format.schema import (
    FACT_FIELDS,
    FACTS_SCHEMA,
    Matrix,
    PacketFlag,
    Range,
    StreamFlag,
    from_parquet,
    to_parquet,
)
from fastvid.format.tar import TarMember
from fastvid.runtime.arrays import IntArray, RecordArray
from fastvid.runtime.near_names import near_names
from fastvid.runtime.processes import available_cores
from fastvid.runtime.values import check_choice, check_kind
from fastvid.storage import Storage

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


def has_audio(storage: Storage, shard: str) -> bool:
    """Return whether any sample of a shard has audio, according to its facts."""
    file = f"{shard}.parquet"
    return "audio" in from_parquet(storage.read(file), file=file, columns=["stream"])["stream"].to_pylist()


def with_facts(storage: Storage, shards: Sequence[str], stream: str, annotations: pa.Table) -> pa.Table:
    """Return annotations, one row per sample, with the columns of FACT_FIELDS added from the shards' facts.

    A column that already has such a name is renamed to ``source_<name>``. `stream`: the stream whose facts to add.
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


_ROW: Final = "__row"
_MEMORY: Final = "4GB"
_TIMEOUT_SECONDS: Final = 120.0
"""Seconds after which a filter is interrupted; ten million rows take half a second."""
_LONGEST: Final = 100_000  # characters of a condition
_CLOCKS: Final = ("current_", "local", "session_", "user")  # names that begin so depend on time or session
# Deterministic functions without side effects, and macros that call only those; DuckDB itself rejects aggregates here.
_PURE: Final = """
    SELECT function_name FROM duckdb_functions() WHERE function_type IN ('scalar', 'aggregate')
    GROUP BY 1 HAVING bool_and(stability = 'CONSISTENT')
    UNION SELECT function_name FROM duckdb_functions() WHERE function_type = 'macro'
        AND regexp_matches(function_name, '^(list|array|map|json|date|round)_')
"""
_SPLIT: Final = "split"


def matching_rows(table: pa.Table, condition: str) -> IntArray:
    """Return the rows for which a condition is true, int64 [M], ascending. In SQL a comparison with NULL is not true.

    A condition must be a function of the row: with ``random()``, for example, every process would select other rows.
    """
    with naming_extras():
        import duckdb  # slow to import, and few programs filter

    numbered = table.append_column(_ROW, pa.array(np.arange(table.num_rows, dtype=np.int64)))
    limits: dict[str, Any] = {"threads": available_cores(), "memory_limit": _MEMORY, "temp_directory": ""}
    try:
        with duckdb.connect(":memory:", config={"enable_external_access": "false", **limits}) as engine:
            engine.execute("SET python_enable_replacements = false")
            engine.execute("SET lock_configuration = true")
            _check_pure(engine, condition, table.column_names)
            alarm = threading.Timer(_TIMEOUT_SECONDS, engine.interrupt)
            alarm.daemon = True
            alarm.start()
            try:
                chosen = engine.from_arrow(numbered).filter(condition).project(_ROW).fetchnumpy()[_ROW]
            finally:
                alarm.cancel()
    except (duckdb.Error, MemoryError, pa.ArrowException) as error:
        raise _translated(error, condition, table) from None  # it has the engine's message
    return np.sort(np.asarray(chosen, dtype=np.int64))


def _check_pure(engine: Any, condition: str, columns: Sequence[str]) -> None:
    """Raise UsageError for a condition that depends on anything but the row."""
    if len(condition) > _LONGEST:
        raise UsageError(
            f"condition of {len(condition):,} characters, at most {_LONGEST:,} are allowed",
            hint="put what it lists into a column with `fastvid relabel`",
        )
    statement = f"SELECT 1 FROM rows WHERE {condition}"  # noqa: S608 - it is parsed, not run
    ((text,),) = engine.execute("SELECT json_serialize_sql(?)", [statement]).fetchall()
    try:
        parsed = json.loads(text)
    except RecursionError as error:
        raise UsageError("condition is nested too deeply") from error
    if parsed["error"]:
        return  # DuckDB reports what is wrong when the filter runs
    known = {name.lower() for name in columns}
    query = parsed["statements"][0]["node"]
    parts = list(_parts(query.get("where_clause", {"class": "SUBQUERY"})))
    # Most conditions only compare columns, and listing the functions takes longer than that.
    called = any(kind == "FUNCTION" for kind, _ in parts)
    pure = {name for (name,) in engine.execute(_PURE).fetchall()} if called else set[str]()
    for kind, name in parts:
        # Words such as current_date look like columns. DuckDB of earlier versions calls current_setting deterministic.
        is_own = kind == "COLUMN_REF" and name in known
        impure = kind in ("COLUMN_REF", "FUNCTION") and not is_own and name.startswith(_CLOCKS)
        if impure or kind in ("SUBQUERY", "WINDOW") or (kind == "FUNCTION" and name not in pure):
            what = {"SUBQUERY": "a query", "WINDOW": "a window"}.get(kind, name)
            raise UsageError(
                f"cannot select by where={condition!r}: {what} depends on more than the row of a sample",
                hint="compare columns and constants; in place of a list in a query use IN ('a', 'b') or list_contains",
            )


def _parts(node: object) -> Iterator[tuple[str, str]]:
    """Yield the kind and the name of each part of a condition that DuckDB parsed to JSON."""
    waiting = [node]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            kind, names = part.get("class", ""), part.get("column_names") or [part.get("function_name", "")]
            yield kind, str(names[0]).lower()
            waiting += part.values()
        elif isinstance(part, list):
            waiting += part


def with_class(table: pa.Table, classes: Sequence[str]) -> pa.Table:
    """Add the column ``class``, the class name of each label, unless the annotations have such a column already."""
    if "class" in table.column_names or not classes:
        return table
    names = pa.DictionaryArray.from_arrays(table["label"].combine_chunks(), pa.array(classes, pa.string()))
    return table.append_column("class", names)


def in_split(table: pa.Table, split: str) -> pa.ChunkedArray:
    """Return for each row whether it is in a split; null if its split is null."""
    check_kind("split", split, str, use="a name, or where=\"split in ('a', 'b')\"")
    column, colon, value = split.rpartition(":")
    column = column if colon else _SPLIT
    names = table.column_names
    if column not in names:
        known = [name for name in names if name.startswith(_SPLIT)]
        hint = f"use one of {', '.join(known)}" if known else "omit `split`, or run `fastvid split DIR 0.9,0.1`"
        raise UsageError(f"dataset has no split column {column!r}", hint=hint)
    values = pc.unique(table[column]).to_pylist()
    check_choice(f"no sample has {column} {{}}", value, sorted(str(v) for v in values if v is not None))
    return pc.equal(table[column], value)


def _translated(error: Exception, condition: str, table: pa.Table) -> UsageError:
    reason = str(error).partition("\n")[0]
    columns = ", ".join(sorted(table.column_names))
    hint = f"use the columns {columns}"
    if "Could not convert string" in reason and re.search(r"\blabel\b", condition):
        hint = "labels are numbers: compare the column class with a name"
    unknown = re.search(r'Referenced column "([^"]*)" not found', reason)
    if unknown:
        # SQL ignores the case of column names, so the hint does too.
        lower = {name.lower(): name for name in table.column_names}
        near = near_names(pa.chunked_array([list(lower)], pa.string()), unknown[1].lower())
        if near:
            hint = f"did you mean {', '.join(lower[name] for name in near)}? {hint}"
        quoted = f"write text in single quotes: '{unknown[1]}'"
        hint = f"{quoted}; {hint}" if f'"{unknown[1]}"' in condition else f"{hint}; {quoted}"
    return UsageError(f"cannot select by where={condition!r}: {reason}", hint=hint)
