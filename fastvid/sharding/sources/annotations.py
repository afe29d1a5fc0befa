"""Annotation files of the field, as pure functions from their text to rows.

A row names a video, its class, and any other column. How a name becomes a file is `fastvid.sharding.sources.sources`'
business.

    csv:FILE       a table with a column ``path``, and ``label``, ``split``, ``start``, ``end`` or any other
    json:FILE      the same as a list of objects
    list:FILE      ``path label`` a line: SlowFast, VideoMAE, mmaction2; labels are integers or names
    kinetics:FILE  label,youtube_id,time_start,time_end,split
    ucf101:DIR     classInd.txt, trainlist01.txt, testlist01.txt ...; all splits at once
    hmdb51:DIR     {class}_test_split1.txt ...; all splits at once
    sthv2:DIR      labels.json, train.json, validation.json, test.json
    diving48:PATH  a list of {vid_name, label} as JSON, or a CSV; a folder with Diving48_V2_train.json and the others
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from fastvid.errors import UsageError
from fastvid.sharding.sources.tables import read_objects, read_rows

VIDEO_SUFFIXES: Final = frozenset(
    {
        ".3g2", ".3gp", ".264", ".265", ".asf", ".avi", ".divx", ".dv", ".f4v", ".flv", ".gif", ".h264", ".h265",
        ".hevc", ".ivf", ".m1v", ".m2ts", ".m2v", ".m4s", ".m4v", ".mkv", ".mov", ".mp4", ".mpe", ".mpeg", ".mpg",
        ".mts", ".mxf", ".ogm", ".ogv", ".ts", ".vob", ".webm", ".wmv", ".y4m",
    }
)  # fmt: skip
"""File name endings, in lower case, that are taken for videos."""

_SPLITS: Final = {
    "train": "train",
    "training": "train",
    "val": "val",
    "valid": "val",
    "validate": "val",
    "validation": "val",
    "test": "test",
}
_TABLE_COLUMNS: Final = ("path", "label", "start", "end", "split")
_PATH_AND_LABEL: Final = re.compile(
    r"^(.*(?:" + "|".join(re.escape(suffix) for suffix in sorted(VIDEO_SUFFIXES)) + r"))(?:\s+(.*))?$", re.IGNORECASE
)


@dataclass(frozen=True, slots=True)
class Row:
    """One line of an annotation file.

    Attributes:
        name: What the file calls the video: a path, or a stem without folder and ending.
        label: Name of its class; None when the file gives none.
        columns: Its other columns.
        start: Seconds into the file where the clip begins; None for the beginning.
        end: Seconds into the file where the clip ends; None for the end.
        whole_name: Name of the uncut video that `start` and `end` refer to, when `name` is that of a file already cut.
    """

    name: str
    label: str | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)
    start: float | None = None
    end: float | None = None
    whole_name: str | None = None


@dataclass(frozen=True, slots=True)
class Annotations:
    """Rows, and the classes in the order of their labels."""

    rows: tuple[Row, ...]
    classes: tuple[str, ...]


def split_of(name: str) -> str | None:
    """The split that a file or folder name speaks of, such as "train" for ``hmdb51_train_split_1.txt``."""
    words = re.split(r"[^a-z]+", Path(name).stem.lower())
    found = {_SPLITS[word] for word in words if word in _SPLITS}
    return found.pop() if len(found) == 1 else None


def read_annotations(specs: Sequence[str], class_names: Sequence[str] = ()) -> Annotations:
    """Reads annotation files named as on the command line.

    Args:
        specs: Each ``format:path``; several are joined, as train and validation lists are.
        class_names: Names for integer labels, in order.

    Raises:
        UsageError: A format is unknown, a file is missing or does not parse, or labels and names do not fit.
    """
    rows: list[Row] = []
    classes: list[str] = []
    for spec in specs:
        kind, colon, path = spec.partition(":")
        if not colon or kind not in _READERS:
            raise UsageError(
                f"annotations {spec!r} are not understood",
                hint=f"format:path, formats are {', '.join(sorted(_READERS))}",
            )
        try:
            part = _READERS[kind](Path(path))
        except OSError as error:
            raise UsageError(f"annotations cannot be read: {error.strerror}", file=error.filename or path) from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, UsageError):
                raise
            raise UsageError(f"annotations do not parse as {kind}: {error!r}", file=path) from error
        if not part.rows:
            raise UsageError("annotations name no video", file=path)
        strangers = {row.label for row in part.rows if row.label is not None} - set(part.classes)
        if strangers:
            raise UsageError(f"class {min(strangers)!r} is not in the list of classes", file=path)
        rows += part.rows
        # Where each file alone has its names sorted, a class's number is its place among all names.
        ordered = classes == sorted(classes) and list(part.classes) == sorted(part.classes)
        classes += [name for name in part.classes if name not in set(classes)]
        classes = sorted(classes) if ordered else classes
    return _named(rows, classes, class_names)


def parse_list(text: str, split: str | None = None) -> Annotations:
    """``path label`` lines. Paths may hold spaces; several integers are labels of a multi-label set.

    The first of these that is there says where the path ends: a tab or ``::`` in every line, the ending of a video
    file, the last space.
    """
    lines = [line.strip() for line in text.splitlines()]
    lines = [line for line in lines if line and not line.startswith("#")]
    pairs = [_split_line(line, _separator(lines)) for line in lines]
    columns = {} if split is None else {"split": split}
    rows = []
    for path, label in pairs:
        numbers = label.split()
        if len(numbers) > 1 and all(number.isdigit() for number in numbers):
            rows.append(Row(path, None, {**columns, "labels": " ".join(numbers)}))
        else:
            rows.append(Row(path, label or None, columns))
    return Annotations(tuple(rows), _class_order(row.label for row in rows))


def parse_csv(text: str) -> Annotations:
    """A table with a column ``path``; ``label``, ``split``, ``start`` and ``end`` (seconds) are understood.

    Other columns are kept, as numbers where all their values are numbers.
    """
    return _table(read_rows(text, texts=_TABLE_COLUMNS))


def parse_json(text: str, split: str | None = None) -> Annotations:
    """A list of objects with the fields of `parse_csv`'s columns; what no column can hold stays JSON text."""
    return _table(read_objects(text), split)


def parse_diving48(text: str, vocabulary: str | None = None, split: str | None = None) -> Annotations:
    """Diving48: a list of ``{vid_name, label, start_frame, end_frame}``, as JSON or CSV.

    Args:
        text: The list.
        vocabulary: ``Diving48_vocab.json``: for each label its words, such as ``["Back", "15som", "05Twis", "FREE"]``.
        split: Of all rows; the files do not say.
    """
    records = read_objects(text) if text.lstrip().startswith("[") else read_rows(text, texts=("vid_name",))
    names = [] if vocabulary is None else ["_".join(words) for words in json.loads(vocabulary)]
    rows = []
    for record in records:
        fields = dict(record)
        name, label = str(fields.pop("vid_name")), fields.pop("label", None)
        if label is not None and names:
            if not 0 <= int(label) < len(names):
                raise UsageError(f"label {label} of {name!r} is not among the {len(names)} of the vocabulary")
            label = names[int(label)]
        columns = fields if split is None else fields | {"split": split}
        rows.append(Row(name, None if label is None else str(label), columns))
    return Annotations(tuple(rows), tuple(names) or _class_order(row.label for row in rows))


def parse_kinetics(text: str, split_name: str | None = None) -> Annotations:
    """The official CSV files. A test file may lack the label column; other columns are kept.

    Args:
        text: The table.
        split_name: For files without a column ``split``.
    """
    rows = []
    for record in csv.DictReader(io.StringIO(text)):
        video, start, end = record.pop("youtube_id"), float(record.pop("time_start")), float(record.pop("time_end"))
        label = record.pop("label", None)
        split = record.pop("split", None) or split_name
        columns = {**record, "split": _SPLITS.get(split or "", split)}
        rows.append(Row(f"{video}_{int(start):06d}_{int(end):06d}", label or None, columns, start, end, video))
    return Annotations(tuple(rows), _class_order(row.label for row in rows))


def parse_ucf101(class_index: str, lists: Mapping[str, str]) -> Annotations:
    """The split files of UCF101.

    Args:
        class_index: ``classInd.txt``: a number from 1 and a name a line.
        lists: Text of ``trainlist01.txt`` and the others by file name. Test lists have no label: the folder says it.
    """
    numbered = [line.split() for line in class_index.splitlines() if line.strip()]
    classes = tuple(name for _, name in sorted((int(number), name) for number, name in numbered))
    splits: dict[str, dict[str, str]] = {}
    for name, text in sorted(lists.items()):
        matched = re.fullmatch(r"(train|test)list0?(\d+)\.txt", name)
        if matched is None:
            continue
        for line in text.splitlines():
            if line.strip():
                splits.setdefault(line.split()[0], {})[f"split{matched[2]}"] = matched[1]
    rows = tuple(Row(path, path.split("/")[0], columns) for path, columns in sorted(splits.items()))
    return Annotations(rows, classes)


def parse_hmdb51(lists: Mapping[str, str]) -> Annotations:
    """The split files of HMDB51: text of ``{class}_test_split{n}.txt`` by file name; 1 is train, 2 test, 0 neither."""
    meaning = {"0": "unused", "1": "train", "2": "test"}
    found: dict[tuple[str, str], dict[str, str]] = {}
    for name, text in sorted(lists.items()):
        matched = re.fullmatch(r"(.+)_test_split(\d+)\.txt", name)
        if matched is None:
            continue
        for line in text.splitlines():
            if line.strip():
                video, use = line.strip().rsplit(None, 1)
                found.setdefault((matched[1], video), {})[f"split{matched[2]}"] = meaning[use]
    rows = tuple(Row(f"{label}/{video}", label, columns) for (label, video), columns in sorted(found.items()))
    return Annotations(rows, tuple(sorted({label for label, _ in found})))


def parse_sthv2(labels: str, splits: Mapping[str, str]) -> Annotations:
    """Something-Something v2: ``labels.json``, and the text of each split's JSON by split name."""
    index = {name: int(number) for name, number in json.loads(labels).items()}
    rows = []
    for split, text in sorted(splits.items()):
        for record in json.loads(text):
            template = record.get("template")
            # Templates carry brackets that the label list does not.
            label = None if template is None else template.replace("[", "").replace("]", "")
            if label is not None and label not in index:
                raise UsageError(f"template {template!r} is not in labels.json", hint="take the files of one release")
            columns = {"split": split, "caption": record.get("label"), "placeholders": record.get("placeholders")}
            rows.append(Row(str(record["id"]), label, columns))
    return Annotations(tuple(rows), tuple(sorted(index, key=lambda name: index[name])))


def _read_list(path: Path) -> Annotations:
    return parse_list(_text(path), split_of(path.name))


def _read_csv(path: Path) -> Annotations:
    return parse_csv(_text(path))


def _read_json(path: Path) -> Annotations:
    return parse_json(_text(path), split_of(path.name))


def _read_diving48(path: Path) -> Annotations:
    # Published as Diving48_train.json, and, with corrected labels, as Diving48_V2_train.json.
    files = [path]
    if path.is_dir():
        lists = sorted(file for file in path.iterdir() if file.suffix in (".json", ".csv") and split_of(file.name))
        newest = [file for file in lists if "_v2_" in file.name.lower()]
        files = newest or lists
    folder = path if path.is_dir() else path.parent
    vocabulary = next((file for file in sorted(folder.glob("*vocab*.json")) if file not in files), None)
    words = None if vocabulary is None else _text(vocabulary)
    parts = [parse_diving48(_text(file), words, split_of(file.name)) for file in files]
    rows = tuple(row for part in parts for row in part.rows)
    longest = max((part.classes for part in parts), key=len, default=())
    return Annotations(rows, longest if words is not None else _class_order(row.label for row in rows))


def _read_kinetics(path: Path) -> Annotations:
    return parse_kinetics(_text(path), split_of(path.name))


def _read_ucf101(path: Path) -> Annotations:
    return parse_ucf101(_text(path / "classInd.txt"), {file.name: _text(file) for file in path.glob("*list*.txt")})


def _read_hmdb51(path: Path) -> Annotations:
    return parse_hmdb51({file.name: _text(file) for file in path.glob("*_test_split*.txt")})


def _read_sthv2(path: Path) -> Annotations:
    # The files were published with and without the dataset's name in front.
    def find(name: str) -> Path | None:
        return next(
            (file for file in (path / f"{name}.json", path / f"something-something-v2-{name}.json") if file.exists()),
            None,
        )

    labels = find("labels")
    if labels is None:
        raise UsageError("there is no labels.json", file=path)
    splits = {split: find(name) for split, name in (("train", "train"), ("val", "validation"), ("test", "test"))}
    return parse_sthv2(_text(labels), {split: _text(file) for split, file in splits.items() if file is not None})


_READERS: Final[Mapping[str, Callable[[Path], Annotations]]] = {
    "csv": _read_csv,
    "diving48": _read_diving48,
    "hmdb51": _read_hmdb51,
    "json": _read_json,
    "kinetics": _read_kinetics,
    "list": _read_list,
    "sthv2": _read_sthv2,
    "ucf101": _read_ucf101,
}


def _text(path: Path) -> str:
    # File names in lists may hold any bytes; they are matched with names that the system gives in the same way.
    return path.read_bytes().decode("utf-8-sig", "surrogateescape")


def _table(records: Sequence[Mapping[str, Any]], split: str | None = None) -> Annotations:
    if records and "path" not in records[0]:
        raise UsageError("table has no column path", hint=f"columns are {', '.join(records[0])}")
    rows = []
    for record in records:
        columns = {name: value for name, value in record.items() if name not in _TABLE_COLUMNS}
        if record.get("split") or split:
            columns["split"] = record.get("split") or split
        label = record.get("label")
        start, end = (None if record.get(name) in (None, "") else float(record[name]) for name in ("start", "end"))
        rows.append(Row(record["path"], None if label in (None, "") else str(label), columns, start, end))
    return Annotations(tuple(rows), _class_order(row.label for row in rows))


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


def _class_order(labels: Any) -> tuple[str, ...]:
    """Integer labels are positions and stay so; names are sorted."""
    found = {label for label in labels if label is not None}
    if found and all(label.isdigit() for label in found):
        return tuple(str(number) for number in range(max(int(label) for label in found) + 1))
    return tuple(sorted(found))


def _named(rows: Sequence[Row], classes: Sequence[str], class_names: Sequence[str]) -> Annotations:
    integers = bool(classes) and all(name.isdigit() for name in classes)
    if integers:
        classes = [str(number) for number in range(max(int(name) for name in classes) + 1)]
    if not class_names:
        return Annotations(tuple(rows), tuple(classes))
    if len(set(class_names)) != len(class_names):
        raise UsageError("a class name stands twice in the class names")
    if integers:
        if len(class_names) < len(classes):
            raise UsageError(f"label {len(classes) - 1} has no name: there are {len(class_names)} class names")
        rows = [_relabelled(row, class_names) for row in rows]
    unknown = sorted({row.label for row in rows if row.label is not None} - set(class_names))
    if unknown:
        raise UsageError(f"class {unknown[0]!r} is not among the {len(class_names)} class names")
    return Annotations(tuple(rows), tuple(class_names))


def _relabelled(row: Row, names: Sequence[str]) -> Row:
    label = None if row.label is None else names[int(row.label)]
    return Row(row.name, label, row.columns, row.start, row.end, row.whole_name)
