"""Parse annotation files in common formats; pure functions from text to rows.

A row names a video, its class and any other columns. `fastvid.sharding.sources.sources` resolves names to files.

    csv:FILE       a table with a column ``path``, and ``label``, ``split``, ``start``, ``end`` or any other
    json:FILE      the same as a list of objects
    list:FILE      ``path label`` per line: SlowFast, VideoMAE, mmaction2; labels are integers or names
    kinetics:FILE  label,youtube_id,time_start,time_end,split
    ucf101:DIR     classInd.txt, trainlist01.txt, testlist01.txt ...; all splits at once
    hmdb51:DIR     {class}_test_split1.txt ...; all splits at once
    sthv2:DIR      labels.json, train.json, validation.json, test.json
    diving48:PATH  a list of {vid_name, label} as JSON or CSV, or a folder with Diving48_V2_train.json and the others
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from fastvid.errors import UsageError
from fastvid.sharding.sources.rows import AnnotationRow, Annotations, check_rows, class_order
from fastvid.sharding.sources.tables import FIRST_ROW, read_objects, read_rows, read_text_rows, seconds_of

VIDEO_SUFFIXES: Final = frozenset(
    {
        ".3g2", ".3gp", ".264", ".265", ".asf", ".avi", ".divx", ".dv", ".f4v", ".flv", ".gif", ".h264", ".h265",
        ".hevc", ".ivf", ".m1v", ".m2ts", ".m2v", ".m4s", ".m4v", ".mkv", ".mov", ".mp4", ".mpe", ".mpeg", ".mpg",
        ".mts", ".mxf", ".ogm", ".ogv", ".ts", ".vob", ".webm", ".wmv", ".y4m",
    }
)  # fmt: skip
"""File name suffixes of videos, in lower case."""

_WITH_HEADER: Final = frozenset({"csv", "kinetics"})
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


def split_of(name: str) -> str | None:
    """Return the split that a name mentions, such as "train" for ``hmdb51_train_split_1.txt``."""
    words = re.split(r"[^a-z]+", Path(name).stem.lower())
    found = {_SPLITS[word] for word in words if word in _SPLITS}
    return found.pop() if len(found) == 1 else None


def read_annotations(specs: Sequence[str], class_names: Sequence[str] = ()) -> Annotations:
    """Read annotation files, given as on the command line.

    Args:
        specs: Each ``format:path``; several are concatenated, such as train and validation lists.
        class_names: Names for integer labels, in order.

    Raises:
        UsageError: If a format is unknown, a file is missing or does not parse, or labels do not match class names.
    """
    rows: list[AnnotationRow] = []
    classes: list[str] = []
    for spec in specs:
        kind, colon, path = spec.partition(":")
        if not colon or kind not in _READERS:
            raise UsageError(
                f"unknown annotations {spec!r}",
                hint=f"use FORMAT:PATH with one of the formats {', '.join(sorted(_READERS))}",
            )
        try:
            part = _READERS[kind](Path(path))
            check_rows(part.rows, FIRST_ROW if kind in _WITH_HEADER else 1)
        except OSError as error:
            raise UsageError(f"annotations cannot be read: {error.strerror}", file=error.filename or path) from error
        except UsageError as error:
            raise UsageError(error.message, hint=error.hint, **{"file": path, **error.where}) from error
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise UsageError(f"annotations do not parse as {kind}: {error!r}", file=path) from error
        if not part.rows:
            raise UsageError("annotations name no video", file=path)
        unknown = {row.label for row in part.rows if row.label is not None} - set(part.classes)
        if unknown:
            raise UsageError(f"class {min(unknown)!r} is not in the list of classes", file=path)
        rows += part.rows
        # If the class names of each file are sorted, sort those of all files together.
        ordered = classes == sorted(classes) and list(part.classes) == sorted(part.classes)
        classes += [name for name in part.classes if name not in set(classes)]
        classes = sorted(classes) if ordered else classes
    return _named(rows, classes, class_names)


def parse_list(text: str, split: str | None = None) -> Annotations:
    """Parse ``path label`` lines.

    Paths may contain spaces; several integers are the labels of a multi-label dataset. The path ends at the first of
    these that applies: a tab or ``::`` if every line has one, a video suffix, the last space.
    """
    lines = [line.strip() for line in text.splitlines()]
    lines = [line for line in lines if line and not line.startswith("#")]
    pairs = [_split_line(line, _separator(lines)) for line in lines]
    columns = {} if split is None else {"split": split}
    rows = []
    for path, label in pairs:
        numbers = label.split()
        if len(numbers) > 1 and all(number.isdigit() for number in numbers):
            rows.append(AnnotationRow(path, None, {**columns, "labels": " ".join(numbers)}))
        else:
            rows.append(AnnotationRow(path, label or None, columns))
    return Annotations(tuple(rows), class_order(rows))


def parse_csv(text: str) -> Annotations:
    """Parse a table with ``path`` and optional ``label``, ``split``, ``start`` and ``end`` (seconds).

    Other columns are kept, as numbers if all their values are numbers.
    """
    return _table(read_rows(text, text_columns=_TABLE_COLUMNS), first=FIRST_ROW)


def parse_json(text: str, split: str | None = None) -> Annotations:
    """Parse a list of objects whose fields are `parse_csv`'s columns; nested values stay JSON text."""
    return _table(read_objects(text), split)


def parse_diving48(text: str, vocabulary: str | None = None, split: str | None = None) -> Annotations:
    """Parse Diving48's list of ``{vid_name, label, start_frame, end_frame}``, as JSON or CSV.

    Args:
        text: The list.
        vocabulary: ``Diving48_vocab.json``: for each label its words, such as ``["Back", "15som", "05Twis", "FREE"]``.
        split: Split of all rows; the file itself has none.
    """
    records = read_objects(text) if text.lstrip().startswith("[") else read_rows(text, text_columns=("vid_name",))
    names = [] if vocabulary is None else ["_".join(words) for words in json.loads(vocabulary)]
    rows = []
    for record in records:
        fields = dict(record)
        name, label = str(fields.pop("vid_name")), fields.pop("label", None)
        if label is not None and names:
            if not 0 <= int(label) < len(names):
                raise UsageError(f"label {label} of {name!r} is not in the vocabulary of {len(names)} labels")
            label = names[int(label)]
        columns = fields if split is None else fields | {"split": split}
        rows.append(AnnotationRow(name, None if label is None else str(label), columns))
    return Annotations(tuple(rows), tuple(names) or class_order(rows))


def parse_kinetics(text: str, split_name: str | None = None) -> Annotations:
    """Parse the official Kinetics CSVs. Test files may have no labels; other columns are kept.

    Args:
        text: The table.
        split_name: Split of files without a column ``split``.
    """
    rows = []
    for number, record in enumerate(read_text_rows(text), FIRST_ROW):
        video = record.pop("youtube_id")
        start, end = (seconds_of(record.pop(name), name, number) for name in ("time_start", "time_end"))
        if start is None or end is None:
            raise UsageError("time_start or time_end is empty", row=number, hint="give both in seconds")
        label = record.pop("label", None)
        split = record.pop("split", None) or split_name
        columns = {**record, "split": _SPLITS.get(split or "", split)}
        rows.append(
            AnnotationRow(f"{video}_{int(start):06d}_{int(end):06d}", label or None, columns, start, end, video)
        )
    return Annotations(tuple(rows), class_order(rows, FIRST_ROW))


def parse_ucf101(class_index: str, lists: Mapping[str, str]) -> Annotations:
    """Parse the split files of UCF101.

    Args:
        class_index: ``classInd.txt``: a number from 1 and a class name per line.
        lists: Text of ``trainlist01.txt`` and the others by file name. Test lists have no label: the folder is the
            class.
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
    rows = tuple(AnnotationRow(path, path.split("/")[0], columns) for path, columns in sorted(splits.items()))
    return Annotations(rows, classes)


def parse_hmdb51(lists: Mapping[str, str]) -> Annotations:
    """Parse HMDB51's ``{class}_test_split{n}.txt`` by file name; 1 is train, 2 test, 0 neither."""
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
    rows = tuple(AnnotationRow(f"{label}/{video}", label, columns) for (label, video), columns in sorted(found.items()))
    return Annotations(rows, tuple(sorted({label for label, _ in found})))


def parse_sthv2(labels: str, splits: Mapping[str, str]) -> Annotations:
    """Parse Something-Something v2: ``labels.json``, and the text of each split's JSON by split name."""
    index = {name: int(number) for name, number in json.loads(labels).items()}
    rows = []
    for split, text in sorted(splits.items()):
        for record in json.loads(text):
            template = record.get("template")
            # Templates have brackets, the label list has none.
            label = None if template is None else template.replace("[", "").replace("]", "")
            if label is not None and label not in index:
                raise UsageError(f"template {template!r} is not in labels.json", hint="use files of the same release")
            columns = {"split": split, "caption": record.get("label"), "placeholders": record.get("placeholders")}
            rows.append(AnnotationRow(str(record["id"]), label, columns))
    return Annotations(tuple(rows), tuple(sorted(index, key=lambda name: index[name])))


def _read_list(path: Path) -> Annotations:
    return parse_list(_text(path), split_of(path.name))


def _read_csv(path: Path) -> Annotations:
    return parse_csv(_text(path))


def _read_json(path: Path) -> Annotations:
    return parse_json(_text(path), split_of(path.name))


def _read_diving48(path: Path) -> Annotations:
    # Prefer Diving48_V2_train.json, which has corrected labels, to Diving48_train.json.
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
    return Annotations(rows, longest if words is not None else class_order(rows))


def _read_kinetics(path: Path) -> Annotations:
    return parse_kinetics(_text(path), split_of(path.name))


def _read_ucf101(path: Path) -> Annotations:
    return parse_ucf101(_text(path / "classInd.txt"), {file.name: _text(file) for file in path.glob("*list*.txt")})


def _read_hmdb51(path: Path) -> Annotations:
    return parse_hmdb51({file.name: _text(file) for file in path.glob("*_test_split*.txt")})


def _read_sthv2(path: Path) -> Annotations:
    # The files were published with and without the dataset's name as a prefix.
    def find(name: str) -> Path | None:
        return next(
            (file for file in (path / f"{name}.json", path / f"something-something-v2-{name}.json") if file.exists()),
            None,
        )

    labels = find("labels")
    if labels is None:
        raise UsageError("no labels.json in the folder", file=path)
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
    # File names in lists may contain any bytes; os.listdir decodes names in the same way.
    return path.read_bytes().decode("utf-8-sig", "surrogateescape")


def _table(records: Sequence[Mapping[str, Any]], split: str | None = None, *, first: int = 1) -> Annotations:
    rows = []
    for number, record in enumerate(records, first):
        if not isinstance(record.get("path"), str):
            if "path" not in records[0]:
                raise UsageError("table has no column path", hint=f"rename one of the columns {', '.join(records[0])}")
            raise UsageError("row has no text in the column path", row=number, hint="name the video there")
        columns = {name: value for name, value in record.items() if name not in _TABLE_COLUMNS}
        if record.get("split") or split:
            columns["split"] = record.get("split") or split
        label = record.get("label")
        start, end = (seconds_of(record.get(name), name, number) for name in ("start", "end"))
        rows.append(AnnotationRow(record["path"], None if label in (None, "") else str(label), columns, start, end))
    return Annotations(tuple(rows), class_order(rows, first))


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


def _named(rows: Sequence[AnnotationRow], classes: Sequence[str], class_names: Sequence[str]) -> Annotations:
    integers = bool(classes) and all(name.isdigit() for name in classes)
    if integers:
        classes = [str(number) for number in range(max(int(name) for name in classes) + 1)]
    if not class_names:
        return Annotations(tuple(rows), tuple(classes))
    if len(set(class_names)) != len(class_names):
        raise UsageError("duplicate class name in the class names")
    if integers:
        if len(class_names) < len(classes):
            raise UsageError(f"label {len(classes) - 1} has no name: there are only {len(class_names)} class names")
        rows = [_relabelled(row, class_names) for row in rows]
    unknown = sorted({row.label for row in rows if row.label is not None} - set(class_names))
    if unknown:
        raise UsageError(f"class {unknown[0]!r} is not one of the {len(class_names)} class names")
    return Annotations(tuple(rows), tuple(class_names))


def _relabelled(row: AnnotationRow, names: Sequence[str]) -> AnnotationRow:
    label = None if row.label is None else names[int(row.label)]
    return AnnotationRow(row.name, label, row.columns, row.start, row.end, row.whole_name)
