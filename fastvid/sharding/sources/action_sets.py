"""Annotations of action recognition data sets, in the form in which each was published.

kinetics:FILE  label,youtube_id,time_start,time_end,split; test files have no label
ucf101:DIR     classInd.txt, trainlist01.txt, testlist01.txt ...; all splits at once
hmdb51:DIR     {class}_test_split1.txt ...; all splits at once
sthv2:DIR      labels.json, train.json, validation.json, test.json
charades:FILE  id,subject,scene,...,actions,length with actions "c092 11.90 21.20;c147 0.00 12.60"; multi-label
ava:FILE       video_id,timestamp,x1,y1,x2,y2,action_id,person_id without a header; multi-label

Files are read where they lie, see `AnnotationFile`: on a disk, in an object store, or on the web.
"""

from __future__ import annotations

import csv
import io
import json
import os
import posixpath
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from fastvid.errors import UsageError
from fastvid.sharding.sources.sources import SPLITS, split_of
from fastvid.sharding.sources.tables import (
    FIRST_ROW,
    LABELS,
    AnnotationRow,
    Annotations,
    class_order,
    read_rows,
    read_text_rows,
    seconds_of,
)
from fastvid.storage import RemoteOptions
from fastvid.storage.urls import FileUrl, is_remote, open_root


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

    def read(self) -> bytes:
        """Return its bytes."""
        if is_remote(self.place):
            url = FileUrl.parse(self.place)
            return open_root(url, RemoteOptions()).read(url.name)
        with open(self.place, "rb") as file:
            return file.read()

    def text(self) -> str:
        """Return its text; bytes that are not UTF-8 become surrogates, as in names that `os.listdir` returns."""
        return self.read().decode("utf-8-sig", "surrogateescape")

    def folder(self) -> AnnotationFile:
        """Return the folder that contains it."""
        return AnnotationFile(posixpath.dirname(self.place.rstrip("/")) or ".")

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
        return next((file for file in self.folder().files() if file.name.endswith(ending)), None)


AVA_SECONDS: Final = 3.0
"""Length of a clip of AVA: people judged the middle frame of 3 seconds (Gu et al., CVPR 2018, section 3.4)."""
_AVA_FIELDS: Final = 8
_AVA_ITEM: Final = re.compile(r'\{[^{}]*?name:\s*"([^"]*)"[^{}]*?id:\s*(\d+)[^{}]*?\}')


def parse_kinetics(text: str, split_name: str | None = None) -> Annotations:
    """Parse the official Kinetics CSVs. Test files may have no labels; other columns are kept."""
    rows = []
    for number, record in enumerate(read_text_rows(text), FIRST_ROW):
        video = record.pop("youtube_id")
        start, end = (seconds_of(record.pop(name), name, number) for name in ("time_start", "time_end"))
        if start is None or end is None:
            raise UsageError("time_start or time_end is empty", row=number, hint="give both in seconds")
        label = record.pop("label", None)
        split = record.pop("split", None) or split_name
        columns = {**record, "split": SPLITS.get(split or "", split)}
        name = f"{video}_{int(start):06d}_{int(end):06d}"
        rows.append(AnnotationRow(name, label or None, columns, start, end, video, number))
    return Annotations(tuple(rows), class_order(rows))


def read_ucf101(folder: AnnotationFile) -> Annotations:
    """Read the folder of UCF101's lists."""
    texts = {file.name: file for file in folder.files()}
    if "classInd.txt" not in texts:
        raise UsageError("no classInd.txt in the folder", file=folder.place, hint="name the folder ucfTrainTestlist")
    numbered = [line.split() for line in texts["classInd.txt"].text().splitlines() if line.strip()]
    classes = tuple(name for _, name in sorted((int(number), name) for number, name in numbered))
    splits: dict[str, dict[str, str]] = {}
    for name, file in sorted(texts.items()):
        matched = re.fullmatch(r"(train|test)list0?(\d+)\.txt", name)
        for line in file.text().splitlines() if matched else ():
            if matched and line.strip():
                splits.setdefault(line.split()[0], {})[f"split{matched[2]}"] = matched[1]
    rows = tuple(AnnotationRow(path, path.split("/")[0], columns) for path, columns in sorted(splits.items()))
    return Annotations(rows, classes)


def read_hmdb51(folder: AnnotationFile) -> Annotations:
    """Read HMDB51's ``{class}_test_split{n}.txt``; 1 is train, 2 test, 0 neither."""
    meaning = {"0": "unused", "1": "train", "2": "test"}
    found: dict[tuple[str, str], dict[str, str]] = {}
    for file in folder.files():
        matched = re.fullmatch(r"(.+)_test_split(\d+)\.txt", file.name)
        for line in file.text().splitlines() if matched else ():
            if matched and line.strip():
                video, use = line.strip().rsplit(None, 1)
                found.setdefault((matched[1], video), {})[f"split{matched[2]}"] = meaning[use]
    rows = tuple(AnnotationRow(f"{label}/{video}", label, columns) for (label, video), columns in sorted(found.items()))
    return Annotations(rows, tuple(sorted({label for label, _ in found})))


def read_sthv2(folder: AnnotationFile) -> Annotations:
    """Read the folder of Something-Something v2's lists: ``labels.json``, and a JSON of each split."""
    files = {file.name: file for file in folder.files()}

    # The files were published with and without the dataset's name as a prefix.
    def find(name: str) -> AnnotationFile | None:
        return files.get(f"{name}.json") or files.get(f"something-something-v2-{name}.json")

    labels = find("labels")
    if labels is None:
        raise UsageError("no labels.json in the folder", file=folder.place)
    index = {name: int(number) for name, number in json.loads(labels.text()).items()}
    rows = []
    for split, name in (("test", "test"), ("train", "train"), ("val", "validation")):
        file = find(name)
        for record in json.loads(file.text()) if file else ():
            template = record.get("template")
            # Templates have brackets, the label list has none.
            label = None if template is None else template.replace("[", "").replace("]", "")
            if label is not None and label not in index:
                raise UsageError(f"template {template!r} is not in labels.json", hint="use files of the same release")
            columns = {"split": split, "caption": record.get("label"), "placeholders": record.get("placeholders")}
            rows.append(AnnotationRow(str(record["id"]), label, columns))
    return Annotations(tuple(rows), tuple(sorted(index, key=lambda name: index[name])))


def parse_charades(text: str, classes: str | None = None, split: str | None = None) -> Annotations:
    """Parse Charades_v1_train.csv: whole videos with the classes of all their actions.

    Other columns are kept, also ``actions`` with the times of each.

    `split`: split of all rows; the file itself has none.
    """
    lines = [line.partition(" ") for line in (classes or "").splitlines() if line.strip()]
    names = {code: name.strip() for code, _, name in lines}
    rows = []
    for number, record in enumerate(read_rows(text, text_columns=("id", "actions")), FIRST_ROW):
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
    return Annotations(tuple(rows), tuple(dict.fromkeys(names.values())) or class_order(rows))


def parse_ava(text: str, action_list: str | None = None, split: str | None = None) -> Annotations:
    """Parse ava_train_v2.2.csv: a clip of 3 seconds around each annotated second of a video.

    ``labels`` has the actions of all people in the clip. The columns ``boxes``, ``box_actions`` and ``person_ids`` are
    JSON lists with one entry per line of the file: [x1, y1, x2, y2] from 0 to 1, action and person. ``timestamp`` is
    the second that people judged, in the video.

    `split`: split of all rows; the file itself has none.
    """
    names = {int(number): name for name, number in _AVA_ITEM.findall(action_list or "")}
    places: dict[tuple[str, str], list[tuple[int, list[str]]]] = {}
    for number, fields in enumerate(csv.reader(io.StringIO(text)), 1):
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
        time = seconds_of(second, "timestamp", first)
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
    return Annotations(tuple(rows), tuple(names[number] for number in sorted(names)) or class_order(rows))


def _ava_person(number: int, fields: list[str], names: Mapping[int, str]) -> tuple[list[float], str, int]:
    """Return box, action and person of a line."""
    try:
        box, action, person = [float(field) for field in fields[:4]], int(fields[4]), int(fields[5])
    except ValueError as error:
        raise UsageError(f"line does not parse: {error}", row=number, hint="give numbers after the video") from error
    if names and action not in names:
        raise UsageError(f"action {action} is not in the action list", row=number, hint="use the files of one release")
    return box, names.get(action, str(action)), person


def read_kinetics(file: AnnotationFile) -> Annotations:
    """Read one list of Kinetics."""
    return parse_kinetics(file.text(), split_of(file.name))


def read_charades(file: AnnotationFile) -> Annotations:
    """Read one list of Charades; class names from Charades_v1_classes.txt beside it."""
    classes = file.beside("_classes.txt")
    return parse_charades(file.text(), None if classes is None else classes.text(), split_of(file.name))


def read_ava(file: AnnotationFile) -> Annotations:
    """Read one list of AVA; action names from the .pbtxt beside it."""
    actions = file.beside(".pbtxt")
    return parse_ava(file.text(), None if actions is None else actions.text(), split_of(file.name))
