"""Videos that are not files: cells of Parquet tables, and pictures of a folder or a tar that are the frames.

A worker first writes each to a temporary file: the bytes of a cell, or a MOV whose packets are the unchanged pictures.
The file is then read like any other source.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import islice
from pathlib import PurePath
from typing import IO, Any, Final, cast

import av
import pyarrow as pa
import pyarrow.parquet as pq

from fastvid.errors import FormatError, SourceError, UsageError
from fastvid.format.schema import check_unpacked
from fastvid.format.tar import read_members
from fastvid.media.ffmpeg import is_full, no_space
from fastvid.media.probe import unreadable
from fastvid.media.reasons import Reason
from fastvid.runtime.names import encode_name, is_video, picture_order
from fastvid.sharding.sources import sources
from fastvid.sharding.sources.annotations import make_row, name_classes
from fastvid.sharding.sources.sources import SourceFile, SourceList
from fastvid.sharding.sources.tables import Columns, check_rows, class_order, split_of
from fastvid.storage import LocalStorage

_BUFFER_BYTES: Final = 2**20
_MAGIC: Final = {b"\xff\xd8\xff": "mjpeg", b"\x89PNG\r\n": "png"}


def table_sources(
    paths: Sequence[str], columns: str | Mapping[str, str] | None, class_names: Sequence[str]
) -> SourceList:
    """Return the videos in the cells of tables as sources; all other columns are annotations.

    A column of videos is binary, or has the fields ``bytes`` and ``path``, as the library ``datasets`` writes it. If
    there are several, `columns` must map ``path`` to one of them.
    """
    renamed = dict(Columns.parse(columns).sources)
    chosen, ignored = renamed.pop("path", None), Counter[str]()
    rows, places, videos = [], [], dict[str, str]()
    for path in map(os.path.abspath, paths):
        try:
            with pq.ParquetFile(path) as table:
                schema, metadata = table.schema_arrow, table.metadata
                video = videos[path] = _video_column(schema, path, chosen)
                left_out = [field.name for field in schema if field.name != video and _has_bytes(field.type)]
                ignored.update(
                    {f"cell of the column {name}, which is not kept": metadata.num_rows for name in left_out}
                )
                records = _records(table, video, left_out, path)
        except (pa.ArrowException, OSError) as error:
            raise UsageError(f"Parquet does not parse: {error}", file=path, hint="download it again") from error
        groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
        cells = [
            (group, row, one.total_byte_size // one.num_rows)
            for group, one in enumerate(groups)
            for row in range(one.num_rows)
        ]
        class_names = class_names or _class_names(schema)
        for number, record in Columns(renamed).rows(list(enumerate(records, 1))):
            rows.append(make_row(number, record, split_of(path)))
            places.append((path, *cells[number - 1]))
    check_rows(rows)
    found = name_classes(rows, class_order(rows), class_names)
    counts = Counter((row.name, row.start, row.end) for row in rows)
    made = []
    for row, (path, group, number, size) in zip(found.rows, places, strict=True):
        twice = counts[row.name, row.start, row.end] > 1
        name = f"{PurePath(path).stem}/{row.number:06d}" if twice else row.name
        file = SourceFile(name, path, (name,), path, size, inside=videos[path])
        made.append(replace(sources.annotated_source(row, file, row.start, row.end), member=(group, number)))
    return SourceList(sources.assign_keys(sorted(made, key=lambda source: source.id)), found.classes, ignored)


def _is_video(kind: pa.DataType) -> bool:
    if pa.types.is_struct(kind):
        return kind.get_field_index("bytes") >= 0 and _is_video(kind.field("bytes").type)
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _has_bytes(kind: pa.DataType) -> bool:
    """Return whether cells of a type contain bytes, which annotations cannot."""
    if pa.types.is_nested(kind):
        return any(_has_bytes(kind.field(number).type) for number in range(kind.num_fields))
    return "binary" in str(kind)


def _video_column(schema: pa.Schema, path: str, chosen: str | None) -> str:
    names = [field.name for field in schema if _is_video(field.type) and chosen in (None, field.name)]
    if len(names) != 1:
        raise UsageError(
            f"table has {len(names)} columns of videos",
            file=path,
            hint="name one of binary, or of bytes and path, by --columns path=COLUMN"
            if names
            else "if its rows name files, use --annotations parquet:FILE",
        )
    return str(names[0])


def _records(table: pq.ParquetFile, video: str, left_out: Sequence[str], path: str) -> list[dict[str, Any]]:
    """Return the rows of a table without its videos, each with the name of its video as ``path``."""
    kind = table.schema_arrow.field(video).type
    named = [f"{video}.path"] if pa.types.is_struct(kind) and kind.get_field_index("path") >= 0 else []
    others = [name for name in table.schema_arrow.names if name not in (video, *left_out)]
    columns = [*others, *named]
    check_unpacked(pa.OSFile(path), table, columns, name=path)
    records = table.read(columns=columns, use_threads=False).to_pylist()
    found = []
    for number, record in enumerate(records or [{} for _ in range(table.metadata.num_rows)], 1):
        cell = record.pop(video, None) or {}
        if record.get("label") == -1:  # no class, as `datasets` writes it
            record["label"] = None
        found.append({"path": cell.get("path") or f"{PurePath(path).stem}/{number:06d}", **record})
    return found


def _class_names(schema: pa.Schema) -> Sequence[str]:
    """Return the names of the numbers in the column ``label``, as ``datasets`` stores them."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        return [str(name) for name in features["label"]["names"]]
    except (KeyError, ValueError, TypeError, RecursionError):
        return ()


def put_together(path: str, member: tuple[int, int] | None, inside: str, file: IO[bytes]) -> None:
    """Write a video to a file: a cell of a Parquet table, or the pictures of a folder or tar.

    `path`: the table, folder or tar. `member`: for a cell, its row group, and the row in it; None for pictures.
    `inside`: for a cell, the name of its column; for pictures, their rate in frames per second.
    """
    try:
        if member is None:
            _mux(_pictures(path), Fraction(inside), file)
        else:
            file.write(_cell(path, member, inside))
        file.flush()
    except pa.ArrowException as error:
        raise SourceError(f"Parquet does not parse: {error}", reason=Reason.BROKEN_CONTAINER) from error
    except FormatError as error:
        raise SourceError(error.message, reason=Reason.BROKEN_CONTAINER) from error
    except OSError as error:
        raise (no_space if is_full(error) else unreadable)(error) from error


def _cell(path: str, member: tuple[int, int], column: str) -> bytes:
    with pq.ParquetFile(path, buffer_size=_BUFFER_BYTES) as table:
        batches = table.iter_batches(1, row_groups=[member[0]], columns=[column], use_threads=False)
        batch = next(islice(batches, member[1], None), None)
        cell = None if batch is None else batch.column(0)[0].as_py()
    data = cell.get("bytes") if isinstance(cell, dict) else cell
    if not data:
        raise SourceError("the cell has no bytes of a video", reason=Reason.EMPTY)
    return bytes(data)


def _pictures(path: str) -> Iterator[tuple[str, bytes]]:
    """Yield name and bytes of each picture of a folder or a tar, in the order of the numbers in their names."""
    if os.path.isdir(path):
        for picture in sources.pictures_in(path):
            with open(os.path.join(path, picture), "rb") as file:
                yield picture, file.read()
        return
    with open(path, "rb") as file:
        for name, (offset, size) in tar_pictures(path).items():
            file.seek(offset)
            yield name, file.read(size)


def tar_pictures(path: str) -> dict[str, tuple[int, int]]:
    """Return byte offset and size of each picture in a tar, by name, in order; empty if the tar contains a video."""
    view = LocalStorage(os.path.dirname(path)).map(os.path.basename(path))
    members = {member.name: (member.offset, member.size) for member in read_members(view)}
    return {} if any(map(is_video, members)) else {name: members[name] for name in picture_order(members)}


def _mux(pictures: Iterator[tuple[str, bytes]], rate: Fraction, file: IO[bytes]) -> None:
    """Write pictures as the packets of a MOV."""
    stream, first = None, ""
    with av.open(file, "w", format="mov") as made:
        for number, (name, data) in enumerate(pictures):
            codec = next((codec for head, codec in _MAGIC.items() if data.startswith(head)), "")
            if not codec or first not in ("", codec):
                told = f"picture {encode_name(name)!r} is not {first or 'mjpeg or png'}"
                raise SourceError(told, reason=Reason.NOT_VIDEO)
            if stream is None:
                first, stream = codec, cast(av.VideoStream, made.add_stream(codec, rate=rate))
                shape = _first_frame(codec, data, name)
                stream.width, stream.height, stream.pix_fmt = shape.width, shape.height, shape.format.name
                stream.time_base = 1 / rate
            packet = av.Packet(data)
            packet.stream, packet.time_base, packet.is_keyframe = stream, 1 / rate, True
            packet.pts = packet.dts = number
            packet.duration = 1
            made.mux(packet)


def _first_frame(codec: str, data: bytes, name: str) -> av.VideoFrame:
    try:
        context = cast(av.VideoCodecContext, av.CodecContext.create(codec, "r"))
        return [*context.decode(av.Packet(data)), *context.decode(None)][0]
    except (av.FFmpegError, IndexError) as error:
        raise SourceError(f"picture {encode_name(name)!r} does not decode", reason=Reason.DAMAGED) from error
