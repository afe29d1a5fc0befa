"""Read annotation files in common formats. A row names a video, its class and any other columns.

`fastvid.sharding.sources.sources` resolves names to files. Any FILE may also be a URL in an object store or on the web.

Tables, whose columns may be renamed, see `fastvid.sharding.sources.tables`:

    csv:FILE       with the columns ``path``, and ``label``, ``labels``, ``split``, ``start``, ``end`` or any other
    json:FILE      the same as a list of objects, or as an object of objects by path
    jsonl:FILE     the same as one object per line
    parquet:FILE   the same
    hf:FILE        metadata.csv, .jsonl or .parquet of a Hugging Face dataset, with the column ``file_name``
    list:FILE      ``path label`` per line: SlowFast, VideoMAE, mmaction2; labels are integers or names, one or several

Data sets as published: `fastvid.sharding.sources.action_sets` and `CAPTION_SETS`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from fastvid.errors import StorageError, UsageError
from fastvid.runtime.names import VIDEO_SUFFIXES
from fastvid.runtime.values import things
from fastvid.sharding.sources.action_sets import (
    AnnotationFile,
    read_ava,
    read_charades,
    read_hmdb51,
    read_kinetics,
    read_sthv2,
    read_ucf101,
)
from fastvid.sharding.sources.sources import SPLITS, split_of
from fastvid.sharding.sources.tables import (
    ENTRY,
    FIRST_ROW,
    LABELS,
    SEGMENTS,
    AnnotationRow,
    Annotations,
    Columns,
    NumberedRecord,
    Record,
    check_rows,
    class_order,
    label_list,
    plain_value,
    read_lines,
    read_objects,
    read_parquet,
    read_rows,
    seconds_of,
)

# Columns of tables that are text or lists even if they look like numbers.
_TEXT_COLUMNS: Final = ("path", "label", LABELS, "start", "end", "split", SEGMENTS)
_PATH_AND_LABEL: Final = re.compile(
    r"^(.*(?:" + "|".join(re.escape(suffix) for suffix in sorted(VIDEO_SUFFIXES)) + r"))(?:\s+(.*))?$", re.IGNORECASE
)

CAPTION_SETS: Final[Mapping[str, tuple[str, Columns]]] = {
    # panda70m_training_full.csv and the others: videoID,url,timestamp,caption,matching_score and, since October 2024,
    # desirable_filtering,shot_boundary_detection. Each but the first two is a list as Python prints it, with one item
    # per clip; timestamp is [['0:00:08.475', '0:00:16.849'], ...].
    "panda70m": (
        "csv",
        Columns(
            {
                "path": "videoID",
                "segments": "timestamp",
                "caption": "caption",
                "matching_score": "matching_score",
                "desirable_filtering": "desirable_filtering",
                "shot_boundary_detection": "shot_boundary_detection",
            },
            frozenset({"matching_score", "desirable_filtering", "shot_boundary_detection"}),
        ),
    ),
    # results_10M_train.csv: videoid,contentUrl,duration,page_dir,name. The file is page_dir/videoid.mp4.
    "webvid": ("csv", Columns({"path": "videoid", "caption": "name"})),
    # train.json, val_1.json, val_2.json: {"v_QOlSCBRmfWY": {"duration": 82.73, "timestamps": [[0.83, 19.86], ...],
    # "sentences": ["A young woman is seen ...", ...]}, ...}.
    "activitynet_captions": ("json", Columns({"path": ENTRY, "segments": "timestamps", "caption": "sentences"})),
    # youcookii_annotations_trainval.json: {"database": {"GLd3aX16zBg": {"duration": 241.62, "subset": "training",
    # "recipe_type": "113", "video_url": ..., "annotations": [{"segment": [90, 102], "id": 0, "sentence": ...}, ...]}}}.
    "youcook2": (
        "database",
        Columns({"path": ENTRY, "split": "subset", "segments": "annotations", "caption": "sentence"}),
    ),
}
"""Data sets with captions, as published: the form of the file, and its columns."""


def read_annotations(
    specs: Sequence[str],
    class_names: Sequence[str] = (),
    *,
    columns: str | Mapping[str, str] | None = None,
) -> Annotations:
    """Read annotation files, given as on the command line."""
    mapping = Columns.parse(columns)
    rows: list[AnnotationRow] = []
    classes: list[str] = []
    for spec in specs:
        part = _read(spec, mapping)
        rows += part.rows
        # If the class names of each file are sorted, sort those of all files together.
        ordered = classes == sorted(classes) and list(part.classes) == sorted(part.classes)
        classes += [name for name in part.classes if name not in set(classes)]
        classes = sorted(classes) if ordered else classes
    return name_classes(rows, classes, class_names)


def read_table(file: AnnotationFile, form: str, columns: Columns, *, whole: bool = False) -> list[NumberedRecord]:
    """Return the rows of a table by column, with renamed columns and one row per segment.

    `form`: "csv", "json", "jsonl" or "parquet"; "database" for a JSON object whose field ``database`` has the rows.
    `whole`: whether a row of a CSV with fewer fields than the header is an error.
    """
    records: Sequence[NumberedRecord]
    if form == "csv":
        text_columns = {columns.source_of(name) for name in ("key", *_TEXT_COLUMNS)}
        records = list(enumerate(read_rows(file.text(), text_columns=text_columns, whole=whole), FIRST_ROW))
    elif form == "parquet":
        records = read_parquet(file.read())
    elif form == "jsonl":
        records = read_lines(file.text())
    else:
        records = read_objects(file.text(), "database" if form == "database" else None)
    return columns.rows(records)


def parse_list(text: str, split: str | None = None) -> Annotations:
    """Parse ``path label`` lines.

    Paths may contain spaces; several integers are the labels of a multi-label dataset. The path ends at the first of
    these that applies: a tab or ``::`` if every line has one, a video suffix, the last space.
    """
    numbered = [(number, line.strip()) for number, line in enumerate(text.splitlines(), 1)]
    numbered = [(number, line) for number, line in numbered if line and not line.startswith("#")]
    separator = _separator([line for _, line in numbered])
    columns = {} if split is None else {"split": split}
    lines = [(number, *_split_line(line, separator)) for number, line in numbered]
    # One integer on a line of a multi-label list is a list of one.
    if any(len(labels := label.split()) > 1 and all(map(str.isdigit, labels)) for _, _, label in lines):
        rows = [AnnotationRow(path, None, columns | _several(label), number=number) for number, path, label in lines]
    else:
        rows = [AnnotationRow(path, label or None, columns, number=number) for number, path, label in lines]
    return Annotations(tuple(rows), class_order(rows))


def _several(label: str) -> dict[str, Any]:
    numbers = label.split() if all(map(str.isdigit, label.split())) else [label]
    return {LABELS: label_list(numbers)} if label else {}


def _read(spec: str, mapping: Columns) -> Annotations:
    """Read one file."""
    kind, colon, path = spec.partition(":")
    if not colon or kind not in FORMATS:
        hint = _TABLE_INSTEAD.get(kind, f"use FORMAT:PATH with one of the formats {', '.join(FORMATS)}")
        raise UsageError(f"unknown annotations {spec!r}", hint=hint)
    if mapping.sources and kind not in _TABLES:
        raise UsageError(
            f"columns of {kind!r} cannot be renamed", file=path, hint=f"use one of the tables {', '.join(_TABLES)}"
        )
    file = AnnotationFile(path)
    try:
        if kind in _READERS:
            part = _READERS[kind](file)
        elif kind in CAPTION_SETS:
            part = _table(file, *CAPTION_SETS[kind])
        elif kind == "hf":
            table = _metadata(file)
            part = _table(table, _form(table), Columns({"path": "file_name", **mapping.sources}))
        else:
            part = _table(file, kind, mapping)
        check_rows(part.rows)
    except StorageError:
        raise
    except OSError as error:
        raise UsageError(f"annotations cannot be read: {error.strerror}", file=error.filename or path) from error
    except UsageError as error:
        raise UsageError(error.message, hint=error.hint, **{"file": path, **error.where}) from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UsageError(
            f"annotations do not parse as {kind}: {error!r}", file=path, hint="compare the file with the format"
        ) from error
    if not part.rows:
        raise UsageError("annotations name no video", file=path)
    known = set(part.classes)
    for row in part.rows:
        if unknown := next((name for name in row.class_names if name not in known), None):
            raise UsageError(f"class {unknown!r} is not in the list of classes", file=path, **row.where)
    return part


def _table(file: AnnotationFile, form: str, columns: Columns) -> Annotations:
    """Return the rows of a table; the split of rows without one is that of the file's name."""
    records = read_table(file, form, columns)
    if not any("path" in record for _, record in records):
        records = [(number, {"path": record.pop(ENTRY, None), **record}) for number, record in records]
    if records and not any(record["path"] is not None for _, record in records if "path" in record):
        names = ", ".join(name for name in records[0][1] if name != "path")
        raise UsageError(
            "table has no column path", hint=f"name one of the columns {names} in --columns, such as path=COLUMN"
        )
    rows = [make_row(number, record, split_of(file.name)) for number, record in records]
    return Annotations(tuple(rows), class_order(rows))


def make_row(number: int, record: Record, split: str | None) -> AnnotationRow:
    """Return a row of a table; `split` is that of the file."""
    path = record.get("path")
    if not isinstance(path, str) or not path:
        raise UsageError("row has no text in the column path", row=number, column="path", hint=_NAME_IT)
    columns: dict[str, Any] = {}
    for name, value in record.items():
        try:
            if name == LABELS:
                several = label_list(value)
                columns |= {} if several is None else {LABELS: several}
            elif name not in _TEXT_COLUMNS:
                columns[name] = plain_value(value)
        except UsageError as error:
            raise UsageError(error.message, hint=error.hint, **{"row": number, "column": name, **error.where}) from None
    named = record.get("split") or split
    if named:
        columns["split"] = SPLITS.get(named, named) if isinstance(named, str) else plain_value(named)
    label = record.get("label")
    if isinstance(label, list | dict):
        raise UsageError(
            f"label is {label!r}", row=number, column="label", hint="put several labels into a column labels"
        )
    start, end = (seconds_of(record.get(name), name, number) for name in ("start", "end"))
    return AnnotationRow(path, None if label in (None, "") else str(label), columns, start, end, number=number)


def _metadata(file: AnnotationFile) -> AnnotationFile:
    """Return the metadata file of a folder, or the file itself."""
    if not file.is_folder:
        return file
    found = next((one for one in file.files() if one.name.startswith("metadata.") and one.suffix[1:] in _FORMS), None)
    if found is None:
        raise UsageError("folder has no metadata.csv, metadata.jsonl or metadata.parquet", file=file.place, hint=_CELLS)
    return found


def _form(file: AnnotationFile) -> str:
    """Return the form of a table by the ending of its name."""
    form = file.suffix[1:]
    if form not in _FORMS:
        raise UsageError(f"unknown ending of {file.name!r}", hint=f"use one of {', '.join(_FORMS)}")
    return form


def _separator(lines: Sequence[str]) -> str | None:
    return next((mark for mark in ("\t", "::") if lines and all(mark in line for line in lines)), None)


def _split_line(line: str, separator: str | None) -> tuple[str, str]:
    if separator is not None:
        path, _, label = line.rpartition(separator)
        return path.strip(), label.strip()
    matched = _PATH_AND_LABEL.match(line)
    if matched is not None:
        return matched[1], (matched[2] or "").strip()
    path, _, label = line.rpartition(" ")
    return (path.strip(), label) if path else (label, "")


def name_classes(rows: Sequence[AnnotationRow], classes: Sequence[str], class_names: Sequence[str]) -> Annotations:
    """Return rows of the given classes with their names, which may be given for classes that are numbers."""
    integers = bool(classes) and all(name.isdigit() for name in classes)
    if integers:
        classes = [str(number) for number in range(max(int(name) for name in classes) + 1)]
    if not class_names:
        return Annotations(tuple(rows), tuple(classes))
    if len(set(class_names)) != len(class_names):
        raise UsageError("duplicate class name in the class names")
    count = things(len(class_names), "class name")
    if integers:
        if len(class_names) < len(classes):
            raise UsageError(
                f"label {len(classes) - 1} has no name: there are {count}",
                hint="give a name per line, beginning with that of label 0",
            )
        rows = [_relabelled(row, class_names) for row in rows]
    unknown = sorted({name for row in rows for name in row.class_names} - set(class_names))
    if unknown:
        raise UsageError(f"label {unknown[0]!r} is not one of the {count}", hint="add it to the class names")
    return Annotations(tuple(rows), tuple(class_names))


def _relabelled(row: AnnotationRow, names: Sequence[str]) -> AnnotationRow:
    label = None if row.label is None else names[int(row.label)]
    several = {LABELS: [names[int(number)] for number in row.columns[LABELS]]} if row.columns.get(LABELS) else {}
    return replace(row, label=label, columns={**row.columns, **several})


_CELLS: Final = "videos in the cells of Parquet are read without --annotations: `fastvid shard FOLDER --out DIR`"
_NAME_IT: Final = f"name the video there; {_CELLS}"
_FORMS: Final = ("csv", "json", "jsonl", "parquet")
_TABLES: Final = (*_FORMS, "hf")
_READERS: Final[Mapping[str, Callable[[AnnotationFile], Annotations]]] = {
    "ava": read_ava,
    "charades": read_charades,
    "hmdb51": read_hmdb51,
    "kinetics": read_kinetics,
    "list": lambda file: parse_list(file.text(), split_of(file.name)),
    "sthv2": read_sthv2,
    "ucf101": read_ucf101,
}
_TABLE_INSTEAD: Final = {
    "diving48": "use json:FILE or csv:FILE with --columns path=vid_name, and --classes for the names of its numbers"
}
FORMATS: Final = tuple(sorted({*_TABLES, *_READERS, *CAPTION_SETS}))
"""The names of all formats."""
