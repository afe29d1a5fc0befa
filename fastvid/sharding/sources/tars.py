"""Read tars of other tools: samples, their videos, and labels and columns from other members."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from fastvid.errors import FormatError, UsageError
from fastvid.format.tar import TarMember, read_members, sample_groups
from fastvid.media.reasons import Reason
from fastvid.sharding.sources.annotations import VIDEO_SUFFIXES
from fastvid.sharding.sources.rows import MAX_LABEL, RESERVED
from fastvid.sharding.sources.sources import Source, assign_keys
from fastvid.sharding.sources.tables import plain_value
from fastvid.storage.urls import is_remote

_TEXTS: Final = {"txt": "caption", "text": "caption", "caption": "caption"}
_LABELS: Final = ("cls", "cls.txt", "label")


@dataclass(frozen=True, slots=True)
class TarSample:
    """A sample in a tar of another tool.

    Attributes:
        name: Its key in the tar.
        first: Byte offset of its first member, which distinguishes samples of the same name.
        video: The member that contains its video; None if there is none.
        columns: Values from its other members: captions, and the fields of its JSON.
        label: Its class, a name or a number; None if unknown.
        notes: Members that were ignored or did not parse.
    """

    name: str
    first: int
    video: TarMember | None
    columns: Mapping[str, Any] = field(default_factory=dict)
    label: str | int | None = None
    notes: tuple[str, ...] = ()


def find_tars(sources: Sequence[str]) -> list[str]:
    """Return the paths of the given tars and of those in the given folders, which are sorted by name.

    Raises:
        UsageError: If a source is missing, or there is no tar.
    """
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
    """Return the samples of a tar, in order.

    Raises:
        FormatError: If the tar is damaged or truncated.
    """
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
        plain = json.dumps(value) if isinstance(value, list) else plain_value(value)
        if isinstance(plain, float) and not math.isfinite(plain):
            plain = json.dumps(plain)
        # JSON may escape halves of surrogate pairs, which are no text.
        name, plain = (
            part.encode("utf-8", "replace").decode() if isinstance(part, str) else part for part in (name, plain)
        )
        columns[f"source_{name}" if name.startswith(RESERVED) else name] = plain
    return columns


def missing_video(sample: TarSample) -> tuple[Reason, str] | None:
    """Return reason and message if the sample has no video; None otherwise."""
    return None if sample.video is not None else (Reason.NO_VIDEO_STREAM, "no member of the sample is a video")
