"""Annotation files of the field, as pure functions from their text to rows.

A row names a video, its class, and any other column. How a name becomes a file is `fastvid.shard.sources`' business.

    csv:FILE       a table with a column ``path``, and ``label``, ``split``, ``start``, ``end`` or any other
    list:FILE      ``path label`` a line: SlowFast, VideoMAE, mmaction2; labels are integers or names
    kinetics:FILE  label,youtube_id,time_start,time_end,split
    ucf101:DIR     classInd.txt, trainlist01.txt, testlist01.txt ...; all splits at once
    hmdb51:DIR     {class}_test_split1.txt ...; all splits at once
    sthv2:DIR      labels.json, train.json, validation.json, test.json
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
    "validation": "val",
    "test": "test",
}
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
        rows += part.rows
        classes += [name for name in part.classes if name not in set(classes)]
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
    records = list(csv.DictReader(io.StringIO(text)))
    if records and "path" not in records[0]:
        raise UsageError("table has no column path", hint=f"columns are {', '.join(records[0])}")
    known = ("path", "label", "start", "end", "split")
    others = {name: _typed([record[name] for record in records]) for name in (records or [{}])[0] if name not in known}
    rows = []
    for number, record in enumerate(records):
        columns = {name: values[number] for name, values in others.items()}
        if record.get("split"):
            columns["split"] = record["split"]
        start, end = (float(record[name]) if record.get(name) else None for name in ("start", "end"))
        rows.append(Row(record["path"], record.get("label") or None, columns, start, end))
    return Annotations(tuple(rows), _class_order(row.label for row in rows))


def parse_kinetics(text: str) -> Annotations:
    """The official CSV files. A test file may lack the label column; other columns are kept."""
    rows = []
    for record in csv.DictReader(io.StringIO(text)):
        video, start, end = record.pop("youtube_id"), float(record.pop("time_start")), float(record.pop("time_end"))
        label = record.pop("label", None)
        split = record.pop("split", None)
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


def _read_kinetics(path: Path) -> Annotations:
    return parse_kinetics(_text(path))


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
    "hmdb51": _read_hmdb51,
    "kinetics": _read_kinetics,
    "list": _read_list,
    "sthv2": _read_sthv2,
    "ucf101": _read_ucf101,
}


def _text(path: Path) -> str:
    # File names in lists may hold any bytes; they are matched with names that the system gives in the same way.
    return path.read_bytes().decode("utf-8-sig", "surrogateescape")


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


def _typed(values: Sequence[str]) -> Sequence[Any]:
    """Integers, else numbers, else texts; empty fields are None."""
    for kind in (int, float):
        try:
            return [kind(value) if value else None for value in values]
        except ValueError:
            continue
    return [value or None for value in values]


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
