"""Sources inside other files: videos in tars of other tools, and the samples of datasets.

A tar's labels, captions and columns come from the members beside each video, a dataset's from its annotations.
`gather_sources` returns the sources of a job from any roots.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Final, NamedTuple

import pyarrow as pa

from fastvid.errors import FormatError, UsageError
from fastvid.format import schema
from fastvid.format.annotations import annotation_table
from fastvid.format.dataset import Dataset
from fastvid.format.in_place import ListedFile, Root
from fastvid.format.schema import ANNOTATION_FIELDS, DATASET_JSON, FACT_FIELDS, FLOW, PICTURES, StreamFlag
from fastvid.format.tar import TarMember, read_members, sample_groups
from fastvid.media.reasons import Reason
from fastvid.runtime.names import decode_name, encode_name, is_video, picture_order
from fastvid.runtime.values import path_text
from fastvid.sharding.sources import tables
from fastvid.sharding.sources.annotations import name_classes, read_annotations
from fastvid.sharding.sources.inside import table_sources, tar_pictures
from fastvid.sharding.sources.sources import Source, SourceList, assign_keys, find_sources, has_videos, walk
from fastvid.sharding.sources.tables import LABELS, MAX_LABEL, RESERVED, AnnotationRow, class_order, plain_value
from fastvid.storage import open_storage
from fastvid.storage.urls import is_remote

_KINDS: Final = {
    "cls.txt": "label", "cls": "label", "label": "label", "json": "json",
    "txt": "caption", "text": "caption", "caption": "caption",
}  # fmt: skip
"""Kind of a member with text (label, caption or JSON fields), by the end of its name."""
_PARQUET: Final = ".parquet"
_AT_ONCE: Final = 1 << 12  # sources whose annotations are in memory


class TarSample(NamedTuple):
    """A video in a tar of another tool, or a sample without a usable video, which is rejected."""

    source: Source  # its id is its name in the tar; without path and key
    first: int  # byte offset of its first member, which distinguishes samples of the same name
    video: TarMember | None = None


@dataclass(frozen=True, slots=True)
class _Field:
    """A member with text about a video, and its kind: a label, a caption or JSON fields."""

    member: TarMember
    part: str  # part of its name between the key and the suffix, such as "meta" in clip.meta.json
    kind: str

    def closeness(self, video: str, *, alone: bool) -> int:
        """Return how well the field's name matches a video's name, higher is better; 0 if it belongs to another video.

        `video`: part of the video's name between key and suffix. `alone`: whether the key has no other video, and no
        field with the same part of the name as this video.
        """
        if self.part in ("", video) or video.startswith(f"{self.part}."):
            return 2 + len(self.part)
        # Fields may have a name of their own, such as clip.meta.json; numbers tell one video from another.
        is_named = not video or self.part.startswith(f"{video}.") or (alone and not re.search(r"\d", self.part))
        return int(self.kind == "json" and is_named)


def _tars_in(root: str) -> list[str]:
    """Return the tars in a folder, sorted by name; of an export, those in its folders."""
    is_export = os.path.isfile(os.path.join(root, schema.EXPORT_RECORD))
    folders = sorted(folder for folder, _, _ in walk(root)) if is_export else [root]
    every = (os.path.join(folder, name) for folder in folders for name in sorted(os.listdir(folder)) if name[0] != ".")
    return [path for path in every if path.endswith(".tar")]


def find_tars(sources: Sequence[str]) -> list[str]:
    """Return the paths of the given tars and of those in the given folders, which are sorted by name."""
    found: dict[str, None] = {}
    remote = next((source for source in sources if is_remote(source)), None)
    if remote is not None:
        raise UsageError(
            "tars of other tools can only be indexed on a local disk",
            file=remote,
            hint="copy them to a disk, or mount the store",
        )
    for source in map(os.path.abspath, sources):
        if os.path.isdir(source):
            found.update(dict.fromkeys(_tars_in(source)))
        elif os.path.isfile(source):
            found[source] = None
        else:
            raise UsageError("source does not exist", file=source)
    if not found:
        raise UsageError("no tar found", file=", ".join(sources), hint="name tars, or a folder that contains some")
    return list(found)


def read_tar(view: memoryview) -> list[TarSample]:
    """Return the samples of a tar, in order."""
    seen = set[str]()
    groups = sample_groups(read_members(view))
    return [sample for key, members in groups for sample in _samples(view, key, members, seen)]


def _samples(view: memoryview, key: str, group: Sequence[TarMember], seen: set[str]) -> Iterator[TarSample]:
    """Yield a sample for each video of a webdataset key, and rejected samples for a missing video or duplicate members.

    If a key has one video, its sample is named like the key; if it has several, each is named like its file without
    the suffix. `seen`: names of members of the tar so far.
    """
    members, again = list[TarMember](), list[TarMember]()
    for member in group:
        (again if member.name in seen else members).append(member)
        seen.add(member.name)
    videos = [(_part(member), member) for member in members if is_video(member.name)]
    fields = [_Field(member, *found) for member in members if (found := _field(member.suffix))]
    if members and not videos:
        pictures = "; if pictures are its frames, use --fps" if picture_order(one.name for one in members) else ""
        problem = Reason.NO_VIDEO_STREAM, f"no member of the sample is a video{pictures}"
        columns, label, notes = _read_fields(view, fields)
        yield TarSample(Source(key, "", 0, label, columns, problem=problem, notes=notes), members[0].offset)
    unused = {one.member.name: f"left aside: {one.member.suffix}" for one in fields}
    # A key may have thousands of videos and fields: most fields cannot belong to a video, and are not compared with it.
    named, below = defaultdict[str, list[_Field]](list), defaultdict[str, list[_Field]](list)
    for one in fields:
        *shorter, part = _prefixes(one.part)
        named[part].append(one)
        for prefix in shorter:
            below[prefix].append(one)
    pairs = []
    for part, _ in videos:
        alone = len(videos) == 1 and not named[part]
        near = fields if alone else [*chain.from_iterable(named[prefix] for prefix in _prefixes(part)), *below[part]]
        # Sort by closeness: the closest field is read last, and so replaces labels and columns of the others.
        close = [one for one in near if one.closeness(part, alone=alone)]
        pairs.append(sorted(close, key=lambda one: one.closeness(part, alone=alone)))
        for one in close:
            unused.pop(one.member.name, None)
    for number, ((part, video), close) in enumerate(zip(videos, pairs, strict=True)):
        columns, label, notes = _read_fields(view, close)
        name, first = key, video.offset if number else members[0].offset
        if len(videos) > 1:
            # The key becomes the parent, so that all videos of a key stay in one split.
            name, columns = f"{key}.{part}" if part else key, {"parent": key, **columns}
            notes = ("one of several videos of a key", *notes)
        notes, place = (*notes, *(() if number else unused.values())), (video.offset, video.size)
        yield TarSample(Source(name, "", video.size, label, columns, member=place, notes=notes), first, video)
    for member in again:
        problem = Reason.DUPLICATE_NAME, f"the tar has an earlier member {encode_name(member.name)!r}"
        yield TarSample(Source(f"{member.name}#2", "", problem=problem), member.offset)


def _prefixes(part: str) -> list[str]:
    """Return the beginnings of a part of a name that end before a dot, from "" to all of it."""
    words = part.split(".") if part else []
    return [".".join(words[:count]) for count in range(len(words) + 1)]


def _part(member: TarMember) -> str:
    return member.suffix.rpartition(".")[0]


def _field(suffix: str) -> tuple[str, str] | None:
    """Return the part of a member's name before the suffix, and its kind; None if it is not text."""
    for ending, kind in _KINDS.items():
        if f".{suffix.lower()}".endswith(f".{ending}"):
            return suffix[: -len(ending)].removesuffix("."), kind
    return None


def sample_keys(tars: Mapping[str, Sequence[TarSample]]) -> dict[tuple[str, int], tuple[str, str]]:
    """Return source id and key of every sample, by the stem of its tar and the sample's byte offset.

    An id is the sample's name in its tar if that is unique, else it includes the tar's name. It depends only on the
    tars, so that indexing them again gives the same keys.
    """
    counts = Counter(sample.source.id for samples in tars.values() for sample in samples)
    ids: dict[tuple[str, int], str] = {}
    for stem, samples in tars.items():
        inside: Counter[str] = Counter()
        for sample in samples:
            name = sample.source.id
            inside[name] += 1
            number = inside[name]
            name = name if counts[name] == 1 else f"{stem}/{name}"
            ids[stem, sample.first] = name if number == 1 else f"{name}#{number}"
    if len(set(ids.values())) < len(ids):
        # A folder inside one tar may have the name of another tar.
        ids = {(stem, first): f"{stem}/{name}@{first}" for (stem, first), name in ids.items()}
    keys = {source.id: source.key for source in assign_keys([Source(name, "") for name in ids.values()])}
    return {place: (name, keys[name]) for place, name in ids.items()}


def _read_fields(view: memoryview, fields: Iterable[_Field]) -> tuple[dict[str, Any], str | None, tuple[str, ...]]:
    """Return the columns and the label in some fields, and notes on fields that do not parse.

    If two fields contain the same column, or two labels, the later one is used.
    """
    columns: dict[str, Any] = {}
    label: str | None = None
    notes = list[str]()
    for one in fields:
        member = one.member
        try:
            text = bytes(view[member.offset : member.offset + member.size]).decode("utf-8-sig")
            if one.kind == "caption":
                columns["caption"] = text.strip()
            elif one.kind == "label":
                numbers = text.split()
                if len(numbers) > 1 and all(number.isascii() and number.isdigit() for number in numbers):
                    columns[LABELS] = list(dict.fromkeys(map(_label, numbers)))
                else:
                    label = _label(text.strip()) or label
            else:
                columns |= _fields(json.loads(text))
        except (FormatError, ValueError, RecursionError) as error:
            notes.append(f"{member.suffix} does not parse: {str(error)[:80]}")
    label = _take_labels(columns, label, notes)
    return columns, label, tuple(notes)


def _take_labels(columns: dict[str, Any], label: str | None, notes: list[str]) -> str | None:
    """Return the label, else that of the columns, and make several labels a list; note those that do not parse."""
    if label is None and isinstance(columns.get("label"), str | int | float):
        try:
            text = tables.label_text(columns.pop("label"))
            label = text and _label(text)
        except ValueError as error:
            notes.append(f"label does not parse: {error}")
    if LABELS in columns:
        try:
            several = tables.label_list(columns[LABELS])
            columns[LABELS] = several and list(dict.fromkeys(map(_label, several)))
        except ValueError as error:
            del columns[LABELS]
            notes.append(f"labels do not parse: {error.args[0]}")
    return label


def _label(text: str) -> str:
    """Return a label, numbers without leading zeros."""
    if not (text.isascii() and text.isdigit()):
        return text
    if len(text) > len(str(MAX_LABEL)):
        raise ValueError(f"{text[:20]} is larger than {MAX_LABEL}")
    return str(int(text))


def _fields(record: Any) -> dict[str, Any]:
    """Return a JSON object's fields as column values, see `fastvid.sharding.sources.tables.plain_value`."""
    if not isinstance(record, dict):
        raise FormatError("not a JSON object")
    columns: dict[str, Any] = {}
    for name, value in record.items():
        plain = tables.split_value(value) if name == "split" else plain_value(value)
        columns[_as_utf8(f"source_{name}" if name.startswith(RESERVED) else name)] = _as_utf8(plain)
    return columns


def _as_utf8(value: Any) -> Any:
    """Return text, or what a list contains, without halves of surrogate pairs, which JSON may escape."""
    if isinstance(value, list):
        return [_as_utf8(part) for part in value]
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value


def read_tars(
    paths: Mapping[str, str], class_names: Sequence[str]
) -> tuple[tuple[str, ...], dict[str, list[tuple[Source, TarMember | None]]]]:
    """Return the classes of tars, and the sources of each tar with their videos, in order.

    `paths`: path of each tar by its name among them. `class_names`: names of labels that are numbers. A tar that cannot
    be read is a source with a problem.
    """
    tars = {name: _read_samples(path) for name, path in paths.items()}
    ids = sample_keys(tars)
    every = (sample.source for samples in tars.values() for sample in samples)
    rows = [AnnotationRow(one.id, one.label, one.columns) for one in every]
    found = name_classes(rows, class_order(rows), class_names)
    named, made = iter(found.rows), dict[str, list[tuple[Source, TarMember | None]]]()
    for stem, samples in tars.items():
        for (source, first, video), row in zip(samples, named, strict=False):
            (name, key), path = ids[stem, first], paths[stem]
            one = replace(source, id=name, key=key, path=path, label=row.label, columns=row.columns)
            made.setdefault(stem, []).append((one, video))
    return found.classes, made


def _read_samples(path: str) -> list[TarSample]:
    folder, name = os.path.split(path)
    try:
        return read_tar(open_storage(folder).map(name))
    except FormatError as error:
        problem = Reason.BROKEN_CONTAINER, f"the tar is broken: {error.message}"
        return [TarSample(Source(name, "", problem=problem), 0)]


def is_dataset(root: str) -> bool:
    """Return whether a folder, local or in an object store, contains a dataset."""
    if is_remote(root):
        return root.startswith(("s3://", "gs://")) and open_storage(root).exists(DATASET_JSON)
    return os.path.isfile(os.path.join(root, DATASET_JSON))


def dataset_sources(roots: Sequence[str]) -> SourceList:
    """Return the samples of datasets as sources. Removed samples are left out; all classes are kept, in order.

    The columns of a source are its annotations, except facts of the old video; ``parent`` names the file that the
    sample was made from, so that samples of one file stay together. Its key is that of the sample.
    """
    sources: dict[str, Source] = {}
    classes: dict[str, None] = {}
    for root in roots:
        dataset = Dataset(root)
        if dataset.signals or not {PICTURES, FLOW}.issuperset(dataset.streams):
            raise UsageError(
                "a dataset with cameras or signals is not encoded again",
                file=root,
                hint="encode its source: `fastvid shard lerobot:ROOT --profile ...`",
            )
        labels = [label for label in dataset.labels.tolist() if label >= 0]
        names = dataset.classes or tuple(map(str, range(max(labels, default=-1) + 1)))
        classes |= dict.fromkeys(names)
        for source in _sources(dataset, names):
            if sources.setdefault(source.id, source) is not source:
                raise UsageError(
                    f"key {source.key!r} is in two of the datasets",
                    file=root,
                    hint="make one dataset of them with `fastvid merge --prefix` first",
                )
    return SourceList(tuple(sources[name] for name in sorted(sources)), tuple(classes), {})


def _sources(dataset: Dataset, names: Sequence[str]) -> list[Source]:
    found = []
    url = dataset.storage.url
    rows = dataset.annotations.take(dataset.rows).to_pylist()
    for row, index, at in zip(rows, *(part.tolist() for part in dataset.locate(range(len(rows)))), strict=True):
        shard = dataset.shard(index)
        label = None if row["label"] is None else names[row["label"]]
        sample = Source(decode_name(row["key"]), "", label=label, columns=_columns(row), key=row["key"])
        if shard.root is not None:
            is_part = bool(shard.info(at).flags & StreamFlag.PART)
            found.append(listed_source(row, sample, shard.file(at), shard.root, is_part=is_part))
            continue
        path, member = f"{url}/{shard.data}", shard.member(at)
        path = path if is_remote(url) else os.path.abspath(path)
        found.append(replace(sample, path=path, size=member[1], member=member, sound=shard.audio_member(at)))
    return found


def listed_source(row: dict[str, Any], sample: Source, listed: ListedFile, root: Root, *, is_part: bool) -> Source:
    """Return a sample of a dataset in place as a source. `root`: where its file is. `is_part`: of the file."""
    start, end = row.get("asked_start_seconds"), row.get("asked_end_seconds")
    is_whole = start is None and end is None
    if is_part and is_whole:
        raise UsageError(
            "the annotations do not say which part of its file a sample is",
            key=row["key"],
            hint="use its source instead of the dataset: `fastvid shard`, or `fastvid index` into a new folder",
        )
    path = root.locate(listed.file)
    tag, parent = listed.tag if is_remote(path) else None, None if is_whole else row.get("parent") or row["source_id"]
    return replace(sample, path=path, size=listed.size, start=start, end=end, tag=tag, parent=parent)


def _columns(row: dict[str, Any]) -> dict[str, Any]:
    columns = {name: value for name, value in row.items() if name not in ANNOTATION_FIELDS | FACT_FIELDS}
    return columns | {"parent": row.get("parent") or row["source_id"]}


def paths_of(name: str, given: Any) -> list[str]:
    """Return one or several paths or URLs as texts. `name`: what they are, for the message if they are none."""
    several = isinstance(given, Iterable) and not isinstance(given, str | os.PathLike)
    return [path_text(name, path).removeprefix("file://") for path in (given if several else [given])]


def gather_sources(
    roots: Sequence[str | os.PathLike[str]] | str | os.PathLike[str],
    annotations: Sequence[str] | str | None = None,
    *,
    columns: str | Mapping[str, str] | None = None,
    class_names: Sequence[str] = (),
    follow_links: bool = False,
    rate: str = "",
) -> SourceList:
    """Return the sources of a job, from folders, tars, Parquet tables or datasets.

    `rate`: frames per second of pictures in folders and tars without videos, if these may be sources.
    """
    specs, paths = paths_of("annotations", annotations or ()), paths_of("source", roots)
    kinds = {"datasets": [path for path in paths if is_dataset(path)], "tars": [path for path in paths if is_tar(path)]}
    kinds["tables"] = [path for path in paths if not specs and path not in kinds["datasets"] and find_tables(path)]
    kind = next((kind for kind, some in kinds.items() if some), None)
    if columns and not specs and kind != "tables":
        raise UsageError("columns are named, but there are no annotations", hint="give a table with --annotations")
    if kind is None:
        rows = read_annotations(specs, class_names, columns=columns) if specs else None
        return _storable(find_sources(paths, rows, follow_links=follow_links, rate=rate))
    _check_alone(kind, kinds[kind], paths, annotated=bool(specs))
    if kind == "datasets":
        return _storable(dataset_sources(paths))
    if kind == "tars":
        return _storable(_by_tars(find_tars(paths), class_names, rate))
    return _storable(table_sources([table for path in paths for table in find_tables(path)], columns, class_names))


def _check_alone(kind: str, some: Sequence[str], paths: Sequence[str], *, annotated: bool) -> None:
    """Raise a UsageError if there are other sources, or annotations: tars and datasets contain their own."""
    if len(some) < len(paths):
        other = next(path for path in paths if path not in some)
        raise UsageError(
            f"{kind} and other sources cannot be in one job", file=other, hint="add the rest with `fastvid add`"
        )
    if annotated:
        raise UsageError(
            f"annotations cannot be used with {kind}", hint=f"omit them: labels and columns are read from the {kind}"
        )


def _storable(found: SourceList) -> SourceList:
    """Return the sources if their annotations can be stored as a table; raise UsageError now, not after encoding."""
    try:
        for start in range(0, len(found.sources), _AT_ONCE):
            # A column named like one of fastvid's gets another name, and keeps its own type.
            rows = [source.columns.items() for source in found.sources[start : start + _AT_ONCE]]
            annotation_table([{f".{name}": value for name, value in row} for row in rows])
    except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
        raise UsageError(f"annotations cannot be stored: {error}", hint="check their columns") from error
    return found


def is_tar(root: str) -> bool:
    """Return whether a path is a tar, or a folder of tars without videos, or an export with tars in its folders."""
    if not os.path.isdir(root):
        return root.endswith(".tar")
    names = [name for name in os.listdir(root) if not name.startswith(".")]
    return not any(map(is_video, names)) and bool(_tars_in(root))


def find_tables(root: str) -> list[str]:
    """Return the Parquet files of a root: the root itself, or files below a folder; none if it is something else.

    A folder with video files has none; datasets of fastvid below a folder are skipped.
    """
    if not os.path.isdir(root):
        return [root] if root.endswith(_PARQUET) and os.path.isfile(root) else []
    if has_videos(root):
        return []
    found = list[str]()
    for folder, folders, names in walk(root):
        if DATASET_JSON in names:
            folders.clear()
        else:
            found += [os.path.join(folder, name) for name in names if name.endswith(_PARQUET)]
    return sorted(found)


def _by_tars(paths: Sequence[str], class_names: Sequence[str], rate: str) -> SourceList:
    sources: list[Source] = []
    stems = {path: os.path.basename(path).removesuffix(".tar") for path in paths}
    for path, stem in list(stems.items()) if rate else ():
        with suppress(FormatError):  # `read_tars` finds it too
            if pictures := tar_pictures(path):
                size = sum(size for _, size in pictures.values())
                sources += assign_keys([Source(stem, path, size, inside=rate)])
                del stems[path]
    # Tars in different folders may have the same name.
    names = {stem: path for path, stem in stems.items()}
    if len(names) < len(stems):
        names = {path.removesuffix(".tar").strip("/"): path for path in stems}
    classes, found = read_tars(names, class_names)
    sources += [source for some in found.values() for source, _ in some]
    return SourceList(tuple(sorted(sources, key=lambda source: source.id)), classes, {})
