"""Read annotation files in common formats. A row names a video, its class and any other columns.

`fastvid.sharding.sources.sources` resolves names to files. Any FILE may also be a URL in an object store or on the web.

Tables, whose columns may be renamed, see `fastvid.sharding.sources.tables`:

    csv:FILE       with the columns ``path``, and ``label``, ``labels``, ``split``, ``start``, ``end`` or any other
    json:FILE      the same as a list of objects, or as an object of objects by path
    jsonl:FILE     the same as one object per line
    parquet:FILE   the same
    hf:FILE        metadata.csv, .jsonl or .parquet of a Hugging Face dataset, with the column ``file_name``
    list:FILE      ``path label`` per line: SlowFast, VideoMAE, mmaction2; labels are integers or names, one or several

Cuts, as PySceneDetect's ``list-scenes`` writes them:

    scenedetect:PATH  NAME-Scenes.csv, or a folder of such files, each of the video NAME

Data sets with captions, as published: see `CAPTION_SETS`.

Data sets of action recognition, as published:

    kinetics:FILE  label,youtube_id,time_start,time_end,split; test files have no label
    ucf101:DIR     classInd.txt, trainlist01.txt, testlist01.txt ...; all splits at once
    hmdb51:DIR     {class}_test_split1.txt ...; all splits at once
    sthv2:DIR      labels.json, train.json, validation.json, test.json
    charades:FILE  id,subject,scene,...,actions,length with actions "c092 11.90 21.20;c147 0.00 12.60"; multi-label
    ava:FILE       video_id,timestamp,x1,y1,x2,y2,action_id,person_id without a header; multi-label
"""

from __future__ import annotations

import csv
import io
import json
import os
import posixpath
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from typing import IO, Any, Final

from fastvid.errors import FormatError, StorageError, UsageError
from fastvid.runtime.names import VIDEO_SUFFIXES, is_video, meant
from fastvid.runtime.values import check_choice, things
from fastvid.sharding.sources import tables
from fastvid.sharding.sources.sources import LISTS
from fastvid.sharding.sources.spool import Spool
from fastvid.sharding.sources.tables import LABELS, AnnotationRow, Annotations, Columns, NumberedRecord, split_of
from fastvid.storage import RemoteOptions
from fastvid.storage.urls import FileUrl, is_remote, open_root

# Columns of tables whose values stay text or lists, even if they look like numbers.
_TEXT_COLUMNS: Final = ("path", "label", LABELS, "start", "end", "split", tables.SEGMENTS)
_PATH_AND_LABEL: Final = re.compile(
    r"^(.*(?:" + "|".join(re.escape(suffix) for suffix in sorted(VIDEO_SUFFIXES)) + r"))(?:\s+(.*))?$", re.IGNORECASE
)

_SCORES: Final = ("matching_score", "desirable_filtering", "shot_boundary_detection")  # of a clip of panda70m
CAPTION_SETS: Final[Mapping[str, tuple[str, Columns]]] = {
    # panda70m_training_full.csv and the others: videoID,url,timestamp,caption,matching_score and, since October 2024,
    # desirable_filtering,shot_boundary_detection. Each but the first two is a list as Python prints it, with one item
    # per clip; timestamp is [['0:00:08.475', '0:00:16.849'], ...].
    "panda70m": (
        "csv",
        Columns(
            {"path": "videoID", "segments": "timestamp", "caption": "caption", **{name: name for name in _SCORES}},
            frozenset(_SCORES),
        ),
    ),
    # results_10M_train.csv: videoid,contentUrl,duration,page_dir,name. The file is page_dir/videoid.mp4.
    "webvid": ("csv", Columns({"path": "videoid", "caption": "name"})),
    # train.json, val_1.json, val_2.json: {"v_QOlSCBRmfWY": {"duration": 82.73, "timestamps": [[0.83, 19.86], ...],
    # "sentences": ["A young woman is seen ...", ...]}, ...}.
    "activitynet_captions": (
        "json",
        Columns({"path": tables.ENTRY, "segments": "timestamps", "caption": "sentences"}),
    ),
    # youcookii_annotations_trainval.json: {"database": {"GLd3aX16zBg": {"duration": 241.62, "subset": "training",
    # "recipe_type": "113", "video_url": ..., "annotations": [{"segment": [90, 102], "id": 0, "sentence": ...}, ...]}}}.
    "youcook2": (
        "database",
        Columns({"path": tables.ENTRY, "split": "subset", "segments": "annotations", "caption": "sentence"}),
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
    parts: list[Sequence[AnnotationRow]] = []
    classes: list[str] = []
    for spec in specs:
        part = _read(spec, mapping)
        parts.append(part.rows)
        # If the class names of each file are sorted, sort those of all files together.
        ordered = classes == sorted(classes) and list(part.classes) == sorted(part.classes)
        classes = list(dict.fromkeys([*classes, *part.classes]))
        classes = sorted(classes) if ordered else classes
    rows = parts[0] if len(parts) == 1 else Spool(chain(*parts))
    return name_classes(rows, classes, class_names)


def read_table(file: AnnotationFile, form: str, columns: Columns, *, whole: bool = False) -> Sequence[NumberedRecord]:
    """Return the rows of a table by column, with renamed columns and one row per segment.

    `form`: "csv", "json", "jsonl" or "parquet"; "database" for a JSON object whose field ``database`` has the rows.
    `whole`: whether a row of a CSV with fewer fields than the header is an error.
    """
    records: Iterable[NumberedRecord]
    if form == "csv":
        text_columns = {columns.source_of(name) for name in ("key", *_TEXT_COLUMNS)}
        records = enumerate(tables.read_rows(file.lines(), text_columns=text_columns, whole=whole), tables.FIRST_ROW)
    elif form == "parquet":
        records = tables.read_parquet(file.open())
    elif form == "jsonl":
        records = tables.read_lines(file.lines())
    else:
        records = tables.read_objects(file.text(), "database" if form == "database" else None)
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
    if lines and "," in lines[0][1] and not lines[0][2] and not is_video(lines[0][1]):
        raise UsageError(f"first line is {lines[0][1]!r}, not a path and a label", hint="use csv:FILE")
    # One integer on a line of a multi-label list is a list of one.
    if any(len(labels := label.split()) > 1 and all(map(str.isdigit, labels)) for _, _, label in lines):
        rows = [AnnotationRow(path, None, columns | _several(label), number=number) for number, path, label in lines]
    else:
        rows = [AnnotationRow(path, label or None, columns, number=number) for number, path, label in lines]
    return Annotations(tuple(rows), tables.class_order(rows))


def _several(label: str) -> dict[str, Any]:
    numbers = label.split() if all(map(str.isdigit, label.split())) else [label]
    return {LABELS: tables.label_list(numbers)} if label else {}


def _read(spec: str, mapping: Columns) -> Annotations:
    """Read one file."""
    kind, colon, path = spec.partition(":")
    if not colon or kind not in FORMATS:
        likely = LISTS.get(os.path.splitext(spec)[1].lower())
        near = f"did you mean {likely}:{path or spec}?" if likely else meant(kind, FORMATS)
        formats = f"use FORMAT:PATH with one of the formats {', '.join(FORMATS)}"
        hint = _TABLE_INSTEAD.get(kind) or " ".join(filter(None, (near, formats)))
        raise UsageError(f"unknown annotations {spec!r}", hint=hint)
    if mapping.sources and kind not in _TABLES:
        raise UsageError(
            f"columns of {kind!r} cannot be renamed", file=path, hint=f"use one of the tables {', '.join(_TABLES)}"
        )
    file = AnnotationFile(path)
    with parsing(path, kind):
        if kind in _READERS:
            part = _READERS[kind](file)
        elif kind in CAPTION_SETS:
            part = _table(file, *CAPTION_SETS[kind])
        elif kind == "hf":
            table = _metadata(file)
            check_choice(f"unknown ending {{}} of {table.name!r}", table.suffix[1:], _FORMS)
            part = _table(table, table.suffix[1:], Columns({"path": "file_name", **mapping.sources}))
        else:
            part = _table(file, kind, mapping)
        tables.check_rows(part.rows)
    if not part.rows:
        raise UsageError("annotations name no video", file=path)
    known = set(part.classes)
    for row in part.rows:
        if unknown := next((name for name in row.class_names if name not in known), None):
            raise UsageError(f"class {unknown!r} is not in the list of classes", file=path, **row.where)
    return part


@contextmanager
def parsing(place: str, form: str) -> Iterator[None]:
    """Add the file to errors of the block, which reads it, and turn parse errors into UsageError.

    `form`: what the file should be, for the message.
    """
    likely = LISTS.get(os.path.splitext(place)[1].lower(), form)
    near = f"did you mean {likely}:{place}?" if likely in _FORMS and form in _FORMS and likely != form else None
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        told, at = f"annotations cannot be read: {error.strerror}", error.filename or place
        raise UsageError(told, file=at, hint="name a file that exists") from error
    except (UsageError, FormatError) as error:
        raise UsageError(error.message, hint=near or error.hint, **{"file": place, **error.where}) from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, csv.Error) as error:
        why = f"column or field {error} is missing" if isinstance(error, KeyError) else str(error)
        expected = re.search(rf"^    {form}:\S+ +(.*(?:\n {{8}}.*)*)", __doc__ or "", re.MULTILINE)
        hint = f"{form} is {' '.join(expected[1].split())}" if expected else "compare the file with the format"
        if form not in _TABLES:
            hint += "; other tables are csv:FILE, json:FILE, ... with --columns path=COLUMN"
        raise UsageError(f"annotations do not parse as {form}: {why}", file=place, hint=near or hint) from error


def _table(file: AnnotationFile, form: str, columns: Columns) -> Annotations:
    """Return the rows of a table; rows without a split get the split that the file's name mentions."""
    records, split = read_table(file, form, columns), split_of(file.name)
    place = "path" if any("path" in record for _, record in records) else tables.ENTRY
    if records and all(record.get(place) is None for _, record in records):
        names = ", ".join(name for name in records[0][1] if name not in ("path", place))
        raise UsageError(
            "table has no column path",
            hint=f"name one of the columns {names} in --columns, such as path=COLUMN; without a header, use list:FILE",
        )
    if place != "path":
        records = [(number, {"path": record.pop(place, None), **record}) for number, record in records]
    rows = Spool(make_row(*record, split) for record in records)
    return Annotations(rows, tables.class_order(rows))


def make_row(number: int, record: tables.Record, split: str | None) -> AnnotationRow:
    """Return the annotation row of a record. `number`: its number in the file. `split`: split of the file, or None."""
    path = record.get("path")
    if not isinstance(path, str) or not path:
        raise UsageError("row has no text in the column path", row=number, column="path", hint=_NAME_IT)
    columns: dict[str, Any] = {}
    for name, value in record.items():
        try:
            if name == LABELS:
                several = tables.label_list(value)
                columns |= {} if several is None else {LABELS: several}
            elif name not in _TEXT_COLUMNS:
                columns[name] = tables.plain_value(value)
        except UsageError as error:
            raise UsageError(error.message, hint=error.hint, **{"row": number, "column": name, **error.where}) from None
    named = record.get("split") or split
    if named:
        columns["split"] = tables.split_value(named)
    label = record.get("label")
    if isinstance(label, list | dict):
        raise UsageError(f"label is {label!r}", row=number, column="label", hint="put several into a column labels")
    start, end = (tables.seconds_of(record.get(name), name, number) for name in ("start", "end"))
    label = tables.label_text(label)
    return AnnotationRow(path, None if label is None else sys.intern(label), columns, start, end, number=number)


def _metadata(file: AnnotationFile) -> AnnotationFile:
    """Return the metadata file of a folder, or the file itself."""
    if not file.is_folder:
        return file
    found = next((one for one in file.files() if one.name.startswith("metadata.") and one.suffix[1:] in _FORMS), None)
    if found is None:
        raise UsageError("folder has no metadata.csv, metadata.jsonl or metadata.parquet", file=file.place, hint=_CELLS)
    return found


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
    """Return the rows with class names instead of numbers.

    `classes`: the classes of the rows. `class_names`: names of classes that are numbers; empty to keep the numbers.
    """
    integers = bool(classes) and all(map(tables.CLASS_NUMBER.fullmatch, classes))
    if integers:
        classes = [str(number) for number in range(max(int(name) for name in classes) + 1)]
    if not class_names:
        return Annotations(rows, tuple(classes))
    if len(set(class_names)) != len(class_names):
        raise UsageError("duplicate class name in the class names")
    count = things(len(class_names), "class name")
    if integers:
        if len(class_names) < len(classes):
            raise UsageError(
                f"label {len(classes) - 1} has no name: there are {count}",
                hint="give a name per line, beginning with that of label 0",
            )
        rows = Spool(_relabelled(row, class_names) for row in rows)
    unknown = sorted({name for row in rows for name in row.class_names} - set(class_names))
    if unknown:
        raise UsageError(f"label {unknown[0]!r} is not one of the {count}", hint="add it to the class names")
    return Annotations(rows, tuple(class_names))


def _relabelled(row: AnnotationRow, names: Sequence[str]) -> AnnotationRow:
    label = None if row.label is None else names[int(row.label)]
    several = {LABELS: [names[int(number)] for number in row.columns[LABELS]]} if row.columns.get(LABELS) else {}
    return replace(row, label=label, columns={**row.columns, **several})


@dataclass(frozen=True, slots=True)
class AnnotationFile:
    """A file, or a folder of files."""

    place: str

    @property
    def name(self) -> str:
        """Its name in its folder."""
        return posixpath.basename((FileUrl.parse(self.place).name if is_remote(self.place) else self.place).rstrip("/"))

    @property
    def suffix(self) -> str:
        """The ending of its name in lower case, such as ``.csv``; empty if there is none."""
        return os.path.splitext(self.name)[1].lower()

    @property
    def is_folder(self) -> bool:
        """Whether it is a folder. In a store, where folders are only prefixes, a name without an ending is one."""
        if not is_remote(self.place):
            return os.path.isdir(self.place)
        return self.place.endswith("/") or not self.suffix

    def open(self) -> IO[bytes]:
        """Open it."""
        if is_remote(self.place):
            url = FileUrl.parse(self.place)
            return io.BytesIO(open_root(url, RemoteOptions()).read(url.name))
        return open(self.place, "rb")

    def lines(self) -> Iterator[str]:
        """Yield its lines; bytes that are not UTF-8 become surrogates, as in names that `os.listdir` returns."""
        with io.TextIOWrapper(self.open(), "utf-8-sig", "surrogateescape", newline="\n") as lines:
            yield from lines

    def text(self) -> str:
        """Return its text, see `lines`."""
        return "".join(self.lines())

    def files(self) -> list[AnnotationFile]:
        """Return the files in this folder, sorted by name; none if it cannot be listed, as on the web."""
        if not is_remote(self.place):
            found = [os.path.join(self.place, name) for name in sorted(os.listdir(self.place))]
            return [AnnotationFile(path) for path in found if os.path.isfile(path)]
        url = FileUrl.parse(self.place)
        if not url.is_listable:
            return []
        prefix = f"{url.name.rstrip('/')}/" if url.name else ""
        names = open_root(url, RemoteOptions()).list(prefix)
        return [AnnotationFile(f"{url.root}/{name}") for name in names if "/" not in name[len(prefix) :]]

    def beside(self, ending: str) -> AnnotationFile | None:
        """Return the first file in the same folder whose name ends so; None if there is none."""
        folder = AnnotationFile(posixpath.dirname(self.place.rstrip("/")) or ".")
        return next((file for file in folder.files() if file.name.endswith(ending)), None)


AVA_SECONDS: Final = 3.0
"""Length of a clip of AVA: people judged the middle frame of 3 seconds (Gu et al., CVPR 2018, section 3.4)."""
_AVA_FIELDS: Final = 8
_SCENES: Final = "-Scenes.csv"
_AVA_ITEM: Final = re.compile(r'\{[^{}]*?name:\s*"([^"]*)"[^{}]*?id:\s*(\d+)[^{}]*?\}')


def read_kinetics(file: AnnotationFile) -> Annotations:
    """Read an official CSV of Kinetics. Test files may have no labels; other columns are kept."""
    rows = []
    for number, record in enumerate(tables.read_text_rows(file.lines()), tables.FIRST_ROW):
        video = record.pop("youtube_id")
        start, end = (tables.seconds_of(record.pop(name), name, number) for name in ("time_start", "time_end"))
        if start is None or end is None:
            raise UsageError("time_start or time_end is empty", row=number, hint="give both in seconds")
        label = record.pop("label", None)
        split = record.pop("split", None) or split_of(file.name)
        columns = {**record, "split": tables.split_value(split)}
        name = f"{video}_{int(start):06d}_{int(end):06d}"
        rows.append(AnnotationRow(name, label or None, columns, start, end, video, number))
    return Annotations(tuple(rows), tables.class_order(rows))


def read_scenedetect(file: AnnotationFile) -> Annotations:
    """Read ``NAME-Scenes.csv`` of PySceneDetect, or a folder of them: one row per scene of the video NAME."""
    rows = []
    for one in file.files() if file.is_folder else [file]:
        if not one.name.endswith(_SCENES):
            continue
        text, first = one.text(), tables.FIRST_ROW
        if text.startswith("Timecode List"):  # a line of all cuts comes before the header, unless it was left out
            text, first = text.partition("\n")[2], first + 1
        for number, record in enumerate(tables.read_text_rows(io.StringIO(text)), first):
            times = (record[f"{name} Time (seconds)"] for name in ("Start", "End"))
            start, end = (tables.seconds_of(time, "seconds", number) for time in times)
            scene = {"scene": int(record["Scene Number"])}
            rows.append(AnnotationRow(one.name.removesuffix(_SCENES), None, scene, start, end, number=number))
    return Annotations(tuple(rows), ())


def read_ucf101(folder: AnnotationFile) -> Annotations:
    """Read the folder of UCF101's lists."""
    texts = {file.name: file for file in folder.files()}
    if "classInd.txt" not in texts:
        raise UsageError("no classInd.txt in the folder", file=folder.place, hint="name the folder ucfTrainTestlist")
    numbered = [line.split() for line in texts["classInd.txt"].text().splitlines() if line.strip()]
    classes = tuple(name for _, name in sorted((int(number), name) for number, name in numbered))
    splits: dict[str, dict[str, str]] = {}
    for matched, line in _lines_of(folder, r"(train|test)list0?(\d+)\.txt"):
        splits.setdefault(line.split()[0], {})[f"split{matched[2]}"] = matched[1]
    rows = tuple(AnnotationRow(path, path.split("/")[0], columns) for path, columns in sorted(splits.items()))
    return Annotations(rows, classes)


def read_hmdb51(folder: AnnotationFile) -> Annotations:
    """Read HMDB51's ``{class}_test_split{n}.txt``; 1 is train, 2 test, 0 neither."""
    meaning = {"0": "unused", "1": "train", "2": "test"}
    found: dict[tuple[str, str], dict[str, str]] = {}
    for matched, line in _lines_of(folder, r"(.+)_test_split(\d+)\.txt"):
        video, use = line.rsplit(None, 1)
        found.setdefault((matched[1], video), {})[f"split{matched[2]}"] = meaning[use]
    rows = tuple(AnnotationRow(f"{label}/{video}", label, columns) for (label, video), columns in sorted(found.items()))
    return Annotations(rows, tuple(sorted({label for label, _ in found})))


def _lines_of(folder: AnnotationFile, pattern: str) -> Iterator[tuple[re.Match[str], str]]:
    """Yield the lines of the files in a folder whose names match a pattern, each with the match; not empty lines."""
    for file in folder.files():
        if matched := re.fullmatch(pattern, file.name):
            yield from ((matched, line.strip()) for line in file.text().splitlines() if line.strip())


def read_sthv2(folder: AnnotationFile) -> Annotations:
    """Read the folder of Something-Something v2's lists: ``labels.json``, and a JSON of each split."""
    # The files were published with and without the dataset's name as a prefix.
    files = {file.name.removeprefix("something-something-v2-"): file for file in reversed(folder.files())}
    if (labels := files.get("labels.json")) is None:
        raise UsageError("no labels.json in the folder", file=folder.place)
    index = {name: int(number) for name, number in json.loads(labels.text()).items()}
    rows = []
    for split, name in (("test", "test"), ("train", "train"), ("val", "validation")):
        file = files.get(f"{name}.json")
        for record in json.loads(file.text()) if file else ():
            template = record.get("template")
            # Templates have brackets, the label list has none.
            label = None if template is None else template.replace("[", "").replace("]", "")
            if label is not None and label not in index:
                raise UsageError(f"template {template!r} is not in labels.json", hint="use files of the same release")
            columns = {"split": split, "caption": record.get("label"), "placeholders": record.get("placeholders")}
            rows.append(AnnotationRow(str(record["id"]), label, columns))
    return Annotations(tuple(rows), tuple(sorted(index, key=lambda name: index[name])))


def read_charades(file: AnnotationFile) -> Annotations:
    """Read Charades_v1_train.csv: whole videos with the classes of all their actions.

    Class names are read from Charades_v1_classes.txt if it is in the same folder. Other columns are kept, also
    ``actions`` with the times of each action.
    """
    classes, split = file.beside("_classes.txt"), split_of(file.name)
    lines = [line.partition(" ") for line in (classes.text() if classes else "").splitlines() if line.strip()]
    names = {code: name.strip() for code, _, name in lines}
    rows = []
    for number, record in enumerate(tables.read_rows(file.lines(), text_columns=("id", "actions")), tables.FIRST_ROW):
        codes = [action.split()[0] for action in record["actions"].split(";") if action.strip()]
        unknown = next((code for code in codes if names and code not in names), None)
        if unknown is not None:
            raise UsageError(
                f"action {unknown!r} is not in the list of classes",
                row=number,
                column="actions",
                hint="use the files of one release",
            )
        columns = {name: value for name, value in record.items() if name != "id"}
        columns[LABELS] = list(dict.fromkeys(names.get(code, code) for code in codes))
        if split is not None:
            columns["split"] = split
        rows.append(AnnotationRow(record["id"], None, columns, number=number))
    return Annotations(tuple(rows), tuple(dict.fromkeys(names.values())) or tables.class_order(rows))


def read_ava(file: AnnotationFile) -> Annotations:
    """Read ava_train_v2.2.csv: a clip of 3 seconds around each annotated second of a video.

    Names of actions are read from a .pbtxt file if there is one in the same folder.
    ``labels`` has the actions of all people in the clip. The columns ``boxes``, ``box_actions`` and ``person_ids`` are
    JSON lists with one entry per line of the file: [x1, y1, x2, y2] from 0 to 1, action and person. ``timestamp`` is
    the second that people judged, in the video.
    """
    actions, split = file.beside(".pbtxt"), split_of(file.name)
    names = {int(number): name for name, number in _AVA_ITEM.findall(actions.text() if actions else "")}
    places: dict[tuple[str, str], list[tuple[int, list[str]]]] = {}
    for number, fields in enumerate(csv.reader(io.StringIO(file.text())), 1):
        if not fields:
            continue
        if len(fields) not in (2, _AVA_FIELDS):
            raise UsageError(
                f"line has {len(fields)} fields", row=number, hint="give video,second,x1,y1,x2,y2,action,person"
            )
        places.setdefault((fields[0], fields[1]), []).append((number, fields[2:]))
    rows = []
    for (video, second), lines in places.items():
        first = lines[0][0]
        time = tables.seconds_of(second, "timestamp", first)
        if time is None:
            raise UsageError("timestamp is empty", row=first, column="timestamp", hint="give the second of the video")
        people = [_ava_person(number, fields, names) for number, fields in lines if fields]
        columns: dict[str, Any] = {
            "timestamp": time,
            LABELS: list(dict.fromkeys(action for _, action, _ in people)),
            "boxes": json.dumps([box for box, _, _ in people]),
            "box_actions": json.dumps([action for _, action, _ in people]),
            "person_ids": json.dumps([person for _, _, person in people]),
        }
        if split is not None:
            columns["split"] = split
        start, end = max(0.0, time - AVA_SECONDS / 2), time + AVA_SECONDS / 2
        rows.append(AnnotationRow(video, None, columns, start, end, number=first))
    return Annotations(tuple(rows), tuple(names[number] for number in sorted(names)) or tables.class_order(rows))


def _ava_person(number: int, fields: list[str], names: Mapping[int, str]) -> tuple[list[float], str, int]:
    """Return box, action and person of a line."""
    try:
        box, action, person = [float(field) for field in fields[:4]], int(fields[4]), int(fields[5])
    except ValueError as error:
        raise UsageError(f"line does not parse: {error}", row=number, hint="give numbers as fields 2 to 8") from error
    if names and action not in names:
        raise UsageError(f"action {action} is not in the action list", row=number, hint="use the files of one release")
    return box, names.get(action, str(action)), person


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
    "scenedetect": read_scenedetect,
    "sthv2": read_sthv2,
    "ucf101": read_ucf101,
}
_TABLE_INSTEAD: Final = {
    "diving48": "use json:FILE or csv:FILE with --columns path=vid_name, and --classes for the names of its numbers"
}
FORMATS: Final = tuple(sorted({*_TABLES, *_READERS, *CAPTION_SETS}))
"""The names of all formats."""
