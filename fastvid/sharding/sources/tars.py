"""Read tars of other tools: samples, their videos, and labels and columns from other members."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeVar

from fastvid.errors import FormatError, UsageError
from fastvid.format.tar import TarMember, read_members, sample_groups
from fastvid.media.reasons import Reason
from fastvid.runtime.units import things
from fastvid.sharding.sources.rows import LABELS, MAX_LABEL, RESERVED
from fastvid.sharding.sources.sources import Source, assign_keys
from fastvid.sharding.sources.tables import plain_value
from fastvid.sharding.sources.video_names import VIDEO_SUFFIXES
from fastvid.storage.urls import is_remote

_TEXTS: Final = {"txt": "caption", "text": "caption", "caption": "caption"}
_LABELS: Final = ("cls", "cls.txt", "label")
_Tar = TypeVar("_Tar", bound=Hashable)


@dataclass(frozen=True, slots=True)
class TarSample:
    """A sample in a tar of another tool."""

    name: str
    first: int  # byte offset of its first member, which distinguishes samples of the same name
    video: TarMember | None
    columns: Mapping[str, Any] = field(default_factory=dict)
    label: str | int | None = None
    notes: tuple[str, ...] = ()

    @property
    def class_names(self) -> tuple[str | int, ...]:
        """Its classes, names or numbers: its label, and those in the column ``labels``."""
        several = tuple(_several(self.columns))
        return several if self.label is None else (self.label, *several)


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
            names = sorted(name for name in os.listdir(source) if name.endswith(".tar") and not name.startswith("."))
            found.update((os.path.join(source, name), None) for name in names)
        elif os.path.isfile(source):
            found[source] = None
        else:
            raise UsageError("source does not exist", file=source)
    if not found:
        raise UsageError("no tar found", file=", ".join(sources), hint="name tars, or a folder that contains some")
    return list(found)


def read_tar(view: memoryview) -> list[TarSample]:
    """Return the samples of a tar, in order."""
    return [_sample(view, name, members) for name, members in sample_groups(read_members(view))]


def sample_keys(tars: Mapping[str, Sequence[TarSample]]) -> dict[tuple[str, int], tuple[str, str]]:
    """Return source id and key of every sample, by the stem of its tar and the sample's byte offset.

    An id is the sample's name in its tar if that is unique, else it includes the tar's name. It depends only on the
    tars, so that indexing them again gives the same keys.
    """
    counts = Counter(sample.name for samples in tars.values() for sample in samples)
    ids: dict[tuple[str, int], str] = {}
    for stem, samples in tars.items():
        inside: Counter[str] = Counter()
        for sample in samples:
            inside[sample.name] += 1
            number = inside[sample.name]
            name = sample.name if counts[sample.name] == 1 else f"{stem}/{sample.name}"
            ids[stem, sample.first] = name if number == 1 else f"{name}#{number}"
    if len(set(ids.values())) < len(ids):
        # A folder inside one tar may have the name of another tar.
        ids = {(stem, first): f"{stem}/{name}@{first}" for (stem, first), name in ids.items()}
    keys = {source.id: source.key for source in assign_keys([Source(name, "") for name in ids.values()])}
    return {place: (name, keys[name]) for place, name in ids.items()}


def _sample(view: memoryview, name: str, members: Sequence[TarMember]) -> TarSample:
    videos = [member for member in members if f".{member.suffix.lower().rpartition('.')[2]}" in VIDEO_SUFFIXES]
    # The suffix with the fewest dots is the video itself; others are derived from it, such as "flow.mp4".
    videos.sort(key=lambda member: member.suffix.count("."))
    notes = [f"left aside: {member.suffix}" for member in videos[1:]]
    columns: dict[str, Any] = {}
    label: str | int | None = None
    for member in members:
        suffix = member.suffix.lower()
        if suffix not in (*_TEXTS, *_LABELS) and suffix.rpartition(".")[2] != "json":
            continue
        try:
            text = bytes(view[member.offset : member.offset + member.size]).decode("utf-8-sig")
            if suffix in _TEXTS:
                columns[_TEXTS[suffix]] = text.strip()
            elif suffix in _LABELS:
                numbers = text.split()
                if len(numbers) > 1 and all(isinstance(_label(number), int) for number in numbers):
                    columns[LABELS] = numbers
                else:
                    label = _label(text.strip())
            else:
                columns |= _fields(json.loads(text))
        except (ValueError, RecursionError) as error:
            notes.append(f"{member.suffix} does not parse: {str(error)[:80]}")
    if label is None and isinstance(columns.get("label"), str | int):
        try:
            label = _label(str(columns.pop("label")))
        except ValueError as error:
            notes.append(f"label does not parse: {error}")
    return TarSample(name, members[0].offset, videos[0] if videos else None, columns, label, tuple(notes))


def _label(text: str) -> str | int:
    if not (text.isascii() and text.isdigit()):
        return text
    if len(text) > len(str(MAX_LABEL)):
        raise ValueError(f"{text[:20]} is larger than {MAX_LABEL}")
    return int(text)


def _fields(record: Any) -> dict[str, Any]:
    """Return a JSON object's fields as column values; nested values and large integers stay JSON text."""
    if not isinstance(record, dict):
        raise FormatError("not a JSON object")
    columns: dict[str, Any] = {}
    for name, value in record.items():
        if name == LABELS and isinstance(value, list) and all(type(part) in (str, int) for part in value):
            columns[LABELS] = list(map(str, value))
            continue
        plain = json.dumps(value) if isinstance(value, list) else plain_value(value)
        if isinstance(plain, float) and not math.isfinite(plain):
            plain = json.dumps(plain)
        # JSON may escape halves of surrogate pairs, which are no text.
        name, plain = (
            part.encode("utf-8", "replace").decode() if isinstance(part, str) else part for part in (name, plain)
        )
        columns[f"source_{name}" if name.startswith(RESERVED) else name] = plain
    return columns


def name_classes(
    tars: Mapping[_Tar, Sequence[TarSample]], class_names: Sequence[str]
) -> tuple[tuple[str, ...], dict[_Tar, list[TarSample]]]:
    """Return the classes of all samples, and the samples of each tar with class names for label and ``labels``.

    Without class names, classes are the numbers up to the largest one, or if there are names, all labels in order.
    """
    found = [label for samples in tars.values() for sample in samples for label in sample.class_names]
    numbers = [label for label in found if isinstance(label, int)]
    by_number = bool(found) and len(numbers) == len(found)
    if by_number and class_names and max(numbers) >= len(class_names):
        raise UsageError(
            f"label {max(numbers)} has no name: there are {things(len(class_names), 'class name')}",
            hint="give a name per line, beginning with that of label 0",
        )
    names = {label: str(label) for label in found}
    classes = tuple(class_names) or tuple(sorted(set(names.values())))
    if by_number:
        classes = tuple(class_names) or tuple(map(str, range(max(numbers) + 1)))
        names = {number: classes[number] for number in numbers}
    unknown = set(names.values()) - set(classes)
    if unknown:
        raise UsageError(
            f"label {min(unknown)!r} is not one of the {things(len(classes), 'class name')}",
            hint="add it to the class names",
        )
    return classes, {tar: [_named(sample, names) for sample in samples] for tar, samples in tars.items()}


def _named(sample: TarSample, names: Mapping[str | int, str]) -> TarSample:
    columns = dict(sample.columns)
    if columns.get(LABELS):
        columns[LABELS] = list(dict.fromkeys(names[label] for label in _several(columns)))
    return replace(sample, label=None if sample.label is None else names[sample.label], columns=columns)


def _several(columns: Mapping[str, Any]) -> Iterable[str | int]:
    return map(_label, columns.get(LABELS) or ())


def missing_video(sample: TarSample) -> tuple[Reason, str] | None:
    """Return reason and message if the sample has no video; None otherwise."""
    return None if sample.video is not None else (Reason.NO_VIDEO_STREAM, "no member of the sample is a video")
