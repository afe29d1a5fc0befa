"""Which videos go into a dataset: found in folders, matched with annotations, named by keys."""

from __future__ import annotations

import hashlib
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from fastvid.errors import UsageError
from fastvid.format.schema import KEY_PATTERN, MAX_KEY_BYTES
from fastvid.media.reasons import Reason
from fastvid.sharding.sources.annotations import VIDEO_SUFFIXES, Annotations, Row, split_of
from fastvid.sharding.sources.listing import Found, decode_name, encode_name, find_files, found_at, public_path
from fastvid.storage.urls import is_remote

__all__ = ["Source", "SourceList", "assign_keys", "decode_name", "encode_name", "find_sources", "public_path"]

# Parts of a long video are called key/0000, key/0001, ...
_PART_BYTES: Final = 5
MAX_SOURCE_KEY_BYTES: Final = MAX_KEY_BYTES - _PART_BYTES
_HASH_DIGITS: Final = 8


@dataclass(frozen=True, slots=True)
class Source:
    """One raw video, or a clip of one.

    Attributes:
        id: Its name among the sources, unique; with the original characters and bytes (surrogateescape).
        path: Where the file lies: a path, or a URL.
        size: Bytes when it was found; 0 where nobody has asked yet.
        label: Name of its class.
        columns: Its other annotation columns.
        start: Seconds into the file where the clip begins; None for the beginning.
        end: Seconds into the file where the clip ends; None for the end.
        member: First byte and bytes of the video when `path` is a tar.
        problem: A reason and message when it cannot even be tried.
        key: Name of its samples in the shards.
        tag: The tag of its version when it was found, where a store gave one; another version is another source.
    """

    id: str
    path: str
    size: int = 0
    label: str | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)
    start: float | None = None
    end: float | None = None
    member: tuple[int, int] | None = None
    problem: tuple[Reason, str] | None = None
    key: str = ""
    tag: str | None = None


@dataclass(frozen=True, slots=True)
class SourceList:
    """Every source of a job.

    Attributes:
        sources: Sorted by id; ids and keys are unique.
        classes: Class names in the order of their labels.
        ignored: Files that are no sources, by why.
    """

    sources: tuple[Source, ...]
    classes: tuple[str, ...]
    ignored: Mapping[str, int]


def find_sources(
    roots: Sequence[str], annotations: Annotations | None = None, *, follow_links: bool = False
) -> SourceList:
    """Finds the videos of a job.

    Without annotations the class of a video is the folder below its root; a root, or the folders below one root, may
    be called after a split. With annotations, their rows are the sources, looked up below the roots; a row without a
    file is a source with a problem.

    Args:
        roots: Folders, or single video files; folders and files of object stores, and files of the web, by their URL.
            Rows whose names are URLs need no root.
        annotations: What `read_annotations` gave.
        follow_links: Take links that lead out of their root. A stranger's folder could make you publish your own files.

    Raises:
        UsageError: A root is missing, nothing is found, or one video is annotated twice in different ways.
        StorageError: A store cannot be listed.
    """
    if not roots and annotations is None:
        raise UsageError("there is no source", hint="name a folder of videos")
    found, ignored = find_files(roots, follow_links=follow_links)
    if annotations is None:
        sources = _by_folder(found)
        classes = tuple(sorted({source.label for source in sources if source.label is not None}))
    else:
        sources = _by_rows(found, annotations.rows, ignored)
        classes = annotations.classes
    if not sources:
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(ignored.items())) or "nothing"
        raise UsageError("no video found", file=", ".join(roots), hint=f"found {kinds}")
    return SourceList(assign_keys(sorted(sources, key=lambda source: source.id)), classes, dict(ignored))


def assign_keys(sources: Sequence[Source]) -> tuple[Source, ...]:
    """Gives every source a key of the key grammar, independent of order.

    A key is the id without its ending where that fits the grammar, else its nearest form and a hash of the id. No two
    sources share a key, and no key is a folder of another, so that parts of long videos find room.

    Raises:
        UsageError: An id stands twice.
    """
    counts = Counter(source.id for source in sources)
    twice = next((name for name, count in counts.items() if count > 1), None)
    if twice is not None:
        raise UsageError(f"source {encode_name(twice)!r} stands twice")
    plain = {source.id: _plain_key(source.id) for source in sources}
    wanted = Counter(plain.values())
    folders = {key[:cut] for key in wanted for cut in range(len(key)) if key[cut] == "/"}
    keys: dict[str, str] = {}
    taken: set[str] = set()
    for name in sorted(plain):
        key = plain[name]
        if wanted[key] == 1 and key not in folders and key == _stem(name) and len(key) <= MAX_SOURCE_KEY_BYTES:
            keys[name] = key
            taken.add(key)
    for name in sorted(plain):
        if name not in keys:
            digits = _HASH_DIGITS
            key = _hashed(plain[name], name, digits)
            while key in taken or key in folders:
                digits += 1
                key = _hashed(plain[name], name, digits)
            keys[name] = key
            taken.add(key)
    return tuple(replace(source, key=keys[source.id]) for source in sources)


def _by_folder(found: Sequence[Found]) -> list[Source]:
    tops: dict[str, set[str]] = {}
    for file in found:
        if len(file.parts) > 1:
            tops.setdefault(file.root, set()).add(file.parts[0])
    sources = []
    for file in found:
        folders = file.parts[:-1]
        split = _split_name(os.path.basename(file.root))
        # train/ and val/ below one root hold the classes one level deeper.
        if split is None and all(_split_name(top) for top in tops.get(file.root, ())) and folders:
            split, folders = _split_name(folders[0]), folders[1:]
        columns = {} if split is None else {"split": split}
        label = encode_name(folders[0]) if folders else None
        sources.append(Source(file.id, file.path, file.size, label, columns, problem=file.problem, tag=file.tag))
    return sources


def _split_name(folder: str) -> str | None:
    return split_of(folder) if re.fullmatch(r"[a-z]+", folder.lower()) else None


def _by_rows(found: Sequence[Found], rows: Sequence[Row], ignored: Counter[str]) -> list[Source]:
    by_path = {"/".join(file.parts): file for file in found} | {file.id: file for file in found}
    by_path |= {file.path: file for file in found}
    queries = _told_apart_by_query(rows)
    by_name: dict[str, list[Found]] = {}
    for file in found:
        for name in {file.parts[-1], os.path.splitext(file.parts[-1])[0]}:
            by_name.setdefault(name, []).append(file)

    strip = _foreign_folders([row.name for row in rows if os.path.isabs(row.name)], by_path)

    def look_up(name: str, label: str | None) -> Found | None:
        if is_remote(name):
            return by_path.get(name) or found_at(name, with_query=name in queries)
        exact = by_path.get(os.path.normpath(name))
        if exact is not None:
            return exact
        if "/" in name:
            moved = by_path.get("/".join(name.split("/")[strip:])) if os.path.isabs(name) else None
            if moved is not None:
                return moved
            # A list made for class folders, over files that lie flat.
            return next((file for file in by_name.get(os.path.basename(name), []) if len(file.parts) == 1), None)
        # A bare name may exist in several class folders; the row's own class decides.
        files = by_name.get(name, [])
        same = [file for file in files if label is None or label.replace(" ", "_") in _spellings(file.parts[:-1])]
        return (same or files)[0] if same or len(files) == 1 else None

    sources: dict[str, Source] = {}
    used = set()
    for row in rows:
        match, start, end = look_up(row.name, row.label), row.start, row.end
        if match is not None and row.whole_name is not None:
            start = end = None  # the file is cut already
        elif match is None and row.whole_name is not None:
            match = look_up(row.whole_name, row.label)
        source = _annotated(row, match, start, end)
        known = sources.get(source.id)
        if known is not None and (known.label, known.columns) != (source.label, source.columns):
            raise UsageError(
                f"source {encode_name(source.id)!r} is annotated twice: {known.label!r} {dict(known.columns)!r} and"
                f" {source.label!r} {dict(source.columns)!r}"
            )
        sources[source.id] = source
        if match is not None:
            used.add(match.path)
    ignored["video without annotation"] += sum(1 for file in found if file.path not in used)
    ignored += Counter()  # drops zeros
    return list(sources.values())


def _told_apart_by_query(rows: Sequence[Row]) -> set[str]:
    """Addresses of the web that several rows share but for the query; elsewhere it is a signature, and no name."""
    urls = {row.name for row in rows if is_remote(row.name)}
    counts = Counter(public_path(url) for url in urls)
    return {url for url in urls if counts[public_path(url)] > 1}


def _foreign_folders(names: Sequence[str], known: Mapping[str, Any]) -> int:
    """How many leading parts to leave out of absolute names that a list made on another machine holds.

    The same for all: the fewest with which at least half as many files are found as with any other number.
    """
    split = [name.split("/") for name in names]
    deepest = max(map(len, split), default=0)
    found = [sum("/".join(parts[cut:]) in known for parts in split) for cut in range(deepest)]
    return next((cut for cut, count in enumerate(found) if count and 2 * count >= max(found)), 0)


def _spellings(folders: Sequence[str]) -> set[str]:
    return {folder.replace(" ", "_") for folder in folders}


def _annotated(row: Row, file: Found | None, start: float | None, end: float | None) -> Source:
    if file is None:
        problem = Reason.MISSING, "the annotations name it, and no file of that name is there"
        return Source(row.name, row.name, 0, row.label, row.columns, problem=problem)
    name = file.id
    if start is not None or end is not None:
        name = f"{name}#{'' if start is None else f'{start:g}'}-{'' if end is None else f'{end:g}'}"
    return Source(name, file.path, file.size, row.label, row.columns, start, end, problem=file.problem, tag=file.tag)


def _stem(name: str) -> str:
    root, suffix = os.path.splitext(name)
    return root if suffix.lower() in VIDEO_SUFFIXES else name


def _plain_key(name: str) -> str:
    """The nearest key; not unique."""
    key = re.sub(r"[^A-Za-z0-9_/-]", "_", _stem(name)).strip("/")
    key = re.sub(r"/{2,}", "/", key) or "_"
    return key if KEY_PATTERN.match(key) else f"_{key[1:]}"


def _hashed(key: str, name: str, digits: int) -> str:
    digest = hashlib.blake2b(os.fsencode(name), digest_size=32).hexdigest()[:digits]
    return f"{key[: MAX_SOURCE_KEY_BYTES - digits - 1].rstrip('/')}-{digest}"
