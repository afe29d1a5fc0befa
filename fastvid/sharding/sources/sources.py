"""The sources of a job: videos below folders, in buckets and at URLs, with their annotations and keys.

`find_files` lists files whose suffix is that of a video. `find_sources` takes class and split of each file from its
folder, or finds the file of each row of annotations. `assign_keys` chooses the keys of the samples.
"""

from __future__ import annotations

import hashlib
import os
import posixpath
import re
import stat
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, count, groupby
from operator import attrgetter
from pathlib import Path
from typing import Any, Final, NoReturn
from urllib.parse import quote

import numpy as np

from fastvid.errors import StorageError, UsageError
from fastvid.format.schema import KEY_PATTERN, MAX_KEY_BYTES, PICTURES
from fastvid.media.reasons import Reason
from fastvid.runtime.names import PICTURE_SUFFIXES, encode_name, is_video, meant, picture_order
from fastvid.sharding.sources.spool import Spool, sort
from fastvid.sharding.sources.tables import AnnotationRow, Annotations, class_names, seconds_text, split_of
from fastvid.storage import RemoteOptions
from fastvid.storage.urls import FileUrl, is_remote, open_root

LISTS: Final = {".csv": "csv", ".json": "json", ".jsonl": "jsonl", ".parquet": "parquet", ".txt": "list"}
"""The format of annotations that a file probably has, by its suffix."""

LEROBOT_INFO: Final = "meta/info.json"
"""The file that describes a LeRobot dataset, in its folder."""

MODIFIED: Final = "modified-"
"""Prefix of the tag of a local file; its modification time in nanoseconds follows."""
_NOT_IN_KEYS: Final = re.compile(r"[^A-Za-z0-9_/-]")
_NAMES: Final = 3  # maximum number of names of ignored files that are listed for each kind
_NAMELESS: Final = frozenset({"hidden file", "special file", "linked folder"})
_Ignored = dict[str, list[str]]


@dataclass(slots=True)  # frozen, it would take six times as long to make
class SourceFile:
    """A file below a root."""

    id: str
    root: str
    parts: tuple[str, ...]
    path: str
    size: int  # size in bytes, 0 if unknown
    problem: tuple[Reason, str] | None = None
    tag: str | None = None  # see `Source`
    inside: str = ""  # see `Source`


def find_files(roots: Sequence[str], *, follow_links: bool, rate: str = "") -> tuple[Spool[SourceFile], Counter[str]]:
    """Return the files below roots, sorted by path, and the number of ignored files by kind; kinds include some names.

    `rate`: frames per second of pictures. If given, folders of pictures below a root without videos are sources.
    """
    ignored: _Ignored = {}
    local = [root for root in roots if not is_remote(root)]
    remote = [FileUrl.parse(root) for root in roots if is_remote(root)]
    every = chain(_find_local(local, ignored, follow_links, rate), _find_remote(remote, ignored))
    by_path = groupby(sort(every, attrgetter("path")), attrgetter("path"))
    found = Spool((list(same)[-1] for _, same in by_path))
    return found, Counter({told_names(*one): len(one[1]) for one in ignored.items()})


def told_names(kind: str, names: Sequence[str]) -> str:
    """Return a kind of ignored files, with some of their names, except for kinds whose names are of no interest."""
    some = ", ".join(map(encode_name, names[:_NAMES])) + (", ..." if len(names) > _NAMES else "")
    return kind if kind in _NAMELESS else f"{kind} ({some})"


def walk(root: str) -> Iterator[tuple[str, list[str], list[str]]]:
    """Yield what `os.walk` yields, except lost+found, which only root may read; raise if a folder cannot be listed."""
    for folder, folders, names in os.walk(root, onerror=_raise):
        folders[:] = sorted(name for name in folders if name != "lost+found")
        yield folder, folders, names


def has_videos(folder: str) -> bool:
    """Return whether a file below a folder is named like a video."""
    return any(is_video(name) for _, _, names in walk(folder) for name in names)


def pictures_in(folder: str) -> dict[str, int]:
    """Return the sizes in bytes of the pictures of a folder by name, in order. Links are left out."""
    with os.scandir(folder) as entries:
        sizes = {one.name: one.stat().st_size for one in entries if one.is_file(follow_symlinks=False)}
    return {name: sizes[name] for name in picture_order(sizes)}


def file_at(url: str, *, with_query: bool = False) -> SourceFile:
    """Return the file at a URL named by annotations. The URL becomes its id; nothing is requested yet."""
    place = FileUrl.parse(url)
    url = url if place.is_listable else url.partition("#")[0]  # such as #t=2.5, which servers do not see
    name = f"{place.root.partition('://')[2]}/{place.name}"
    if place.query and with_query:
        name += f"?{place.query}"
    return SourceFile(name, place.root, tuple(place.name.split("/")), url, 0)


def public_path(path: str) -> str:
    """Return a path or URL that is safe to print and store: without a query, which may be a signature."""
    return str(FileUrl.parse(path)) if is_remote(path) else path


def check_exists(path: str) -> None:
    """Raise UsageError unless there is a local file or folder, given by its absolute path."""
    if not os.path.exists(path):
        folder, name = os.path.split(path)
        near = meant(name, os.listdir(folder)) if os.path.isdir(folder) else None
        if name.startswith("lerobot:"):
            near = "give it to `fastvid index` or `shard`, alone, and join datasets by `fastvid merge`"
        raise UsageError("source does not exist", file=path, hint=near)


def check_root(root: str) -> None:
    """Raise UsageError for a local root that is no folder of videos and no video, but a list, or a LeRobot dataset."""
    check_exists(root)
    if (kind := LISTS.get(os.path.splitext(root)[1].lower())) and os.path.isfile(root):
        raise UsageError("source is a list, not a video", file=root, hint=f"name it with --annotations {kind}:{root}")
    if (info := Path(root, LEROBOT_INFO)).is_file():
        refuse_lerobot(root, info.read_bytes())


def refuse_lerobot(root: str, info: bytes) -> None:
    """Raise UsageError for the contents of LEROBOT_INFO of a root, unless another program wrote it."""
    if b'"codebase_version"' in info:
        hint = f"name it lerobot:{root}, or its folder videos to take the films as they are"
        raise UsageError("source is a LeRobot dataset, whose episodes share films", file=root, hint=hint)


def _find_local(roots: Sequence[str], ignored: _Ignored, follow_links: bool, rate: str) -> Iterator[SourceFile]:
    if not roots:
        return
    absolute = [os.path.abspath(root) for root in roots]
    for root in absolute:
        check_root(root)
    folders = [root if os.path.isdir(root) else os.path.dirname(root) for root in absolute]
    common = os.path.commonpath(folders)
    for root, folder in zip(absolute, folders, strict=True):
        if rate and os.path.isdir(root) and not has_videos(root):
            for place, _, _ in walk(root):
                if sizes := pictures_in(place):
                    above = os.path.dirname(root) if place == root else root
                    parts = tuple(os.path.relpath(place, above).split(os.sep))
                    name = os.path.relpath(place, common if place != common else os.path.dirname(common))
                    yield SourceFile(name, root, parts, place, sum(sizes.values()), inside=rate)
            continue
        for path in _walk(root, ignored) if os.path.isdir(root) else [root]:
            problem = (None if follow_links else check_inside(path, folder)) or _check_target(path)
            parts = tuple(os.path.relpath(path, folder).split(os.sep))
            size, tag = 0, None
            if problem is None:
                status = _status(path)
                size, tag = status.st_size, f"{MODIFIED}{status.st_mtime_ns}"
            yield SourceFile(os.path.relpath(path, common), folder, parts, path, size, problem, tag)


def _walk(root: str, ignored: _Ignored) -> Iterator[str]:
    """Yield regular files, and links to files, that have a video suffix, sorted by name."""
    # Linked folders are not followed: inside the root they are found by their own name, outside they are not allowed.
    for folder, folders, names in walk(root):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in folders:
            if os.path.islink(os.path.join(folder, name)):
                ignored.setdefault("linked folder", []).append(name)
        for name in sorted(names):
            path = os.path.join(folder, name)
            kind = _ignored_kind(name) or (None if _is_file(path) else "special file")
            if kind is None:
                yield path
            else:
                ignored.setdefault(kind, []).append(name)


def _ignored_kind(name: str) -> str | None:
    """Return the kind under which a file name is ignored; None if it may be a source."""
    if name.startswith("."):
        return "hidden file"
    return None if is_video(name) else f"{os.path.splitext(name)[1].lower() or 'nameless ending'} file"


def _is_file(path: str) -> bool:
    # A dangling link counts as a file, so that it is reported as a missing source.
    return _check_target(path) is not None or stat.S_ISREG(_status(path).st_mode)


def _check_target(path: str) -> tuple[Reason, str] | None:
    """Return the problem of a link whose target does not exist, or that links to itself; None otherwise."""
    if not os.path.islink(path) or os.path.exists(path):
        return None
    return Reason.MISSING, f"a link to {encode_name(os.readlink(path))}, which does not exist"


def check_inside(path: str, root: str) -> tuple[Reason, str] | None:
    """Return the problem of a path that resolves to a file outside its root; None if it is inside."""
    target = os.path.realpath(path)
    if os.path.commonpath([target, os.path.realpath(root)]) == os.path.realpath(root):
        return None
    return Reason.OUTSIDE, f"a link to {encode_name(target)}"


def _status(path: str) -> os.stat_result:
    try:
        return os.stat(path)
    except OSError as error:
        error.filename = path
        _raise(error)


def _raise(error: OSError) -> NoReturn:
    """Raise a StorageError, because otherwise files that cannot be listed would be left out silently."""
    raise StorageError(
        f"sources cannot be listed: {error.strerror or error}",
        file=encode_name(os.fsdecode(error.filename)),
        hint="repair the disk, or restore the permissions, and run the command again",
    ) from error


def _find_remote(roots: Sequence[FileUrl], ignored: _Ignored) -> Iterator[SourceFile]:
    listed = [(root, _list(root, ignored)) for root in roots]
    folders = [_folder(root, files) for root, files in listed]
    common = posixpath.commonpath(folders) if folders else ""
    for (root, files), folder in zip(listed, folders, strict=True):
        for name, size, tag in files:
            place = _place(root.root, name)
            parts = tuple(posixpath.relpath(place, folder).split("/"))
            url = f"{root.root}/{name if root.is_listable else quote(name)}"  # what `FileUrl.parse` takes apart again
            if root.query:
                url = f"{url}?{root.query}"
            yield SourceFile(posixpath.relpath(place, common), f"{root.root}{folder}", parts, url, size, None, tag)


def _list(root: FileUrl, ignored: _Ignored) -> list[tuple[str, int, str | None]]:
    """Return name, size in bytes and tag of each file below a root, or of the root if it is a file itself."""
    storage = open_root(root, RemoteOptions())
    name = root.name.rstrip("/")
    if not root.is_listable or (name == root.name and is_video(name)):
        version = storage.version(root.name) if root.name else None
        if version is not None:
            return [(root.name, version.size, version.tag)]
        if not root.is_listable:
            raise UsageError("source does not exist", file=root, hint="name files: web folders cannot be listed")
    prefix = f"{name}/" if name else ""
    files, seen = [], False
    for path, version in storage.entries(prefix):
        seen = True
        if path == prefix + LEROBOT_INFO:
            refuse_lerobot(str(root), storage.read(path))
        below = path.removeprefix(prefix).split("/")
        kind = "hidden file" if any(part.startswith(".") for part in below) else _ignored_kind(below[-1])
        if kind is None:
            files.append((path, version.size, version.tag))
        elif below[-1]:  # skip the empty objects that consoles create for folders
            ignored.setdefault(kind, []).append(below[-1])
    if not seen:
        raise UsageError("source does not exist", file=root)
    return files


def _folder(root: FileUrl, files: Sequence[tuple[str, int, str | None]]) -> str:
    place = _place(root.root, root.name)
    return posixpath.dirname(place) if [name for name, _, _ in files] == [root.name] else place


def _place(root: str, name: str) -> str:
    """Return a path whose first folder is the bucket or host."""
    return posixpath.join("/", root.partition("://")[2], name.rstrip("/"))


# Parts of a long video are called key/0000, key/0001, ...
_PART_BYTES: Final = 5
MAX_SOURCE_KEY_BYTES: Final = MAX_KEY_BYTES - _PART_BYTES
_HASH_DIGITS: Final = 8


@dataclass(slots=True)  # frozen, it would take six times as long to make, and each is made several times, see `Spool`
class Source:
    """One raw video, or a clip of one."""

    id: str  # its unique name among the sources, with the original characters and bytes (surrogateescape)
    path: str
    size: int = 0  # size in bytes when it was listed; 0 if not yet known
    label: str | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)
    start: float | None = None  # start of the clip in seconds; None for the start of the file
    end: float | None = None  # end of the clip in seconds; None for the end of the file
    member: tuple[int, int] | None = None  # byte offset and size of the video if `path` is a tar
    # byte offset and size of the M4A with its sound if that is another member of the tar.
    sound: tuple[int, int] | None = None
    problem: tuple[Reason, str] | None = None
    key: str = ""  # name of its samples in the shards
    tag: str | None = None  # ETag of a remote file; for a local one, `MODIFIED` and its time, which copies do not keep
    parent: str | None = None
    # first frame and number of frames if it is a clip that is given in frames; None otherwise.
    frames: tuple[int, int] | None = None
    stream: str = PICTURES
    # if `path` is a folder or tar of pictures: their rate. If it is Parquet: the column of the video; `member` is then
    # the row group and the row in it. Else empty.
    inside: str = ""
    notes: tuple[str, ...] = ()  # notes for the ledger, in addition to the warnings of its processing

    @property
    def class_names(self) -> tuple[str, ...]:
        """Its label, and its classes in the column ``labels``."""
        return class_names(self.label, self.columns)

    @property
    def etag(self) -> str | None:
        """The ETag of its file; None for a local file, whose tag is not the same on other machines."""
        return None if self.tag is None or self.tag.startswith(MODIFIED) else self.tag

    def is_version(self, size: int | None, tag: str | None) -> bool:
        """Return whether its file may have a size in bytes and a tag; unknown values are compatible with all."""
        if tag and self.tag and bare_tag(tag) != bare_tag(self.tag):
            return False
        return not size or not self.size or size == self.size

    def below(self, folder: str) -> Source:
        """Return the source with `folder`/ prepended to its name, and to that of the file that it is a clip of."""
        parent = None if self.parent is None else f"{folder}/{self.parent}"
        return replace(self, id=f"{folder}/{self.id}", parent=parent)


BY_ID: Final = attrgetter("id")
"""The order of sources in a list."""


@dataclass(frozen=True, slots=True)
class SourceList:
    """All sources of a job."""

    sources: Sequence[Source]
    classes: tuple[str, ...]
    ignored: Mapping[str, int]
    # Only if a job has frozen its sources: the sources of each shard, and the identity's fields about all sources.
    shards: Sequence[Sequence[Source]] | None = None
    listed: Mapping[str, Any] | None = None

    @property
    def tried(self) -> Iterator[Source]:
        """The sources without a problem."""
        return (source for source in self.sources if source.problem is None)


def bare_tag(tag: str) -> str:
    """Return an ETag without quotes and "W/", because only some stores include them in listings."""
    return tag.removeprefix("W/").strip('"')


def find_sources(
    roots: Sequence[str], annotations: Annotations | None = None, *, follow_links: bool = False, rate: str = ""
) -> SourceList:
    """Find the videos of a job.

    Without annotations the class of a video is its folder below the root; a root, or the folders below it, may be named
    after a split. With annotations, each row is a source and its file is looked up below the roots; a row without a
    file is a source with a problem.

    `roots`: folders, or single video files; URLs of folders and files in object stores, and of files on the web.
    Rows whose names are URLs need no root. `rate`: see `find_files`.
    """
    if not roots and annotations is None:
        raise UsageError("no source given", hint="name a folder of videos")
    found, ignored = find_files(roots, follow_links=follow_links, rate=rate)
    if annotations is None:
        sources = assign_keys(sort(_by_folder(found), BY_ID))
        classes = tuple(sorted({source.label for source in sources if source.label is not None}))
    else:
        sources, classes = assign_keys(_by_rows(found, annotations.rows, ignored)), annotations.classes
    if not sources:
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(ignored.items())) or "nothing"
        hint = f"name a folder of videos; this has {kinds}"
        if any(suffix in kinds for suffix in PICTURE_SUFFIXES):
            hint += "; of pictures as frames, give the rate to `fastvid shard` by --fps"
        raise UsageError("no video found", file=", ".join(roots), hint=hint)
    return SourceList(sources, classes, dict(ignored))


def assign_keys(sources: Iterable[Source]) -> Sequence[Source]:
    """Assign every source a valid key that does not depend on the order of sources.

    A key is the id without its suffix, with an underscore for every character that a key cannot contain; that of a clip
    ends with its bounds in milliseconds, such as ``film_00003200_00005700``: in a tar's listing the clips of a film
    follow each other in time, and the key contains no dot, at which webdataset would split it. If two ids lead to the
    same key, the id that needed no change keeps it, and the others get a hash of the id. Keys are unique, and no key is
    a folder of another, because the parts of a long video are named below its key.
    """
    plain, others = array("q"), array("q")
    found = Spool(_with_plain_keys(sources, plain, others))
    every = np.sort(np.concatenate([plain, np.unique(others)]))
    doubtful = set(every[1:][every[1:] == every[:-1]].tolist())
    if not doubtful:
        return found
    some = [(source.id, source.key) for source in found if hash(source.key) in doubtful]
    name, number = Counter(name for name, _ in some).most_common(1)[0]
    if number > 1:
        raise UsageError(f"duplicate source {encode_name(name)!r}")
    keys = dict(some)
    wanted = Counter(keys.values())
    unchanged = Counter(key for name, key in keys.items() if wanted[key] > 1 and key == _stem(name))
    folders = {folder for source in found for folder in _folders(source.key) if hash(folder) in doubtful}

    def is_free(name: str, key: str) -> bool:
        alone = wanted[key] == 1 or (unchanged[key] == 1 and key == _stem(name))
        return alone and key not in folders and len(key) <= MAX_SOURCE_KEY_BYTES

    def is_new(key: str) -> bool:
        return hash(key) not in every[np.searchsorted(every, hash(key)) :][:1]

    changed = sorted(name for name, key in keys.items() if not is_free(name, key))
    taken = {*folders, *(keys[name] for name in keys.keys() - set(changed))}
    for name in changed:
        longer = (_hashed(keys[name], name, digits) for digits in count(_HASH_DIGITS))
        keys[name] = next(key for key in longer if key not in taken and (key in wanted or is_new(key)))
        taken.add(keys[name])
    return Spool(replace(one, key=keys[one.id]) if one.id in keys else one for one in found)


def _with_plain_keys(sources: Iterable[Source], plain: array[int], others: array[int]) -> Iterator[Source]:
    """Yield sources with plain keys; append the hashes of the keys, and of what no key may be: too long, or a folder.

    Texts are compared only if their hashes are equal, so that eight bytes of each are in memory.
    """
    last = ""
    for source in sources:
        source.key = key = _plain_key(source)
        plain.append(hash(key))
        folder = key.rpartition("/")[0]
        others.extend(map(hash, (_folders(key) if folder != last else []) + [key] * (len(key) > MAX_SOURCE_KEY_BYTES)))
        last = folder
        yield source


def _folders(key: str) -> list[str]:
    return [key[:cut] for cut in range(len(key)) if key[cut] == "/"]


def _by_folder(files: Sequence[SourceFile]) -> Iterator[Source]:
    tops: dict[str, set[str]] = {}
    for file in files:
        if len(file.parts) > 1:
            tops.setdefault(file.root, set()).add(file.parts[0])
    for file in files:
        folders = file.parts[:-1]
        split = _split_name(os.path.basename(file.root))
        # If all folders below a root are splits, such as train/ and val/, the classes are one level deeper.
        if split is None and all(_split_name(top) for top in tops.get(file.root, ())) and folders:
            split, folders = _split_name(folders[0]), folders[1:]
        columns = {} if split is None else {"split": split}
        label = encode_name(folders[0]) if folders else None
        yield _of(file, label, columns)


def _split_name(folder: str) -> str | None:
    return split_of(folder) if re.fullmatch(r"[a-z]+", folder.lower()) else None


def _by_rows(found: Sequence[SourceFile], rows: Sequence[AnnotationRow], ignored: Counter[str]) -> Iterator[Source]:
    """Yield the sources of annotation rows by id, each once, and count the files without a row as `ignored`."""
    found = list(found)
    by_path = {"/".join(file.parts): file for file in found} | {file.id: file for file in found}
    by_path |= {file.path: file for file in found}
    queries = _distinguished_by_query(rows)
    by_name: dict[str, list[SourceFile]] = {}
    for file in found:
        for name in {file.parts[-1], os.path.splitext(file.parts[-1])[0]}:
            by_name.setdefault(name, []).append(file)

    strip = _leading_folders_to_strip((row.name for row in rows if os.path.isabs(row.name)), by_path) if found else 0

    def look_up(name: str, label: str | None) -> SourceFile | None:
        if is_remote(name):
            return by_path.get(name) or file_at(name, with_query=name in queries)
        exact = by_path.get(os.path.normpath(name))
        if exact is not None:
            return exact
        if "/" in name:
            moved = by_path.get("/".join(name.split("/")[strip:])) if os.path.isabs(name) else None
            if moved is not None:
                return moved
            # The list has class folders, but the files are in one flat folder.
            return next((file for file in by_name.get(os.path.basename(name), []) if len(file.parts) == 1), None)
        # A name without a folder may exist in several class folders; prefer the folder of the row's class.
        files = by_name.get(name, [])
        wanted = (label or "").replace(" ", "_")
        same = [file for file in files if not wanted or wanted in (part.replace(" ", "_") for part in file.parts[:-1])]
        return (same or files)[0] if same or len(files) == 1 else None

    used = set()

    def sources() -> Iterator[Source]:
        for row in rows:
            match, start, end = look_up(row.name, row.label), row.start, row.end
            if match is not None and row.whole_name is not None:
                start = end = None  # the file is already trimmed
            elif match is None and row.whole_name is not None:
                match = look_up(row.whole_name, row.label)
            if match is not None and found:
                used.add(match.path)
            yield annotated_source(row, match, start, end)

    for name, group in groupby(sort(sources(), BY_ID), BY_ID):
        before, *others = group
        for source in others:
            if (before.label, before.columns) != (source.label, source.columns):
                both = f"{before.label!r} {dict(before.columns)!r} and {source.label!r} {dict(source.columns)!r}"
                hint = "leave one; if the rows are clips, name their times: --columns start=COLUMN,end=COLUMN"
                raise UsageError(f"source {encode_name(name)!r} has two annotations: {both}", hint=hint)
        yield others[-1] if others else before
    unused = [file.id for file in found if file.path not in used]
    ignored += Counter({told_names("video without annotation", unused): len(unused)})  # drops zero counts


def _distinguished_by_query(rows: Sequence[AnnotationRow]) -> set[str]:
    """Return URLs of the rows that differ from another row's only in the query.

    Only these keep the query in their id; elsewhere it may be a signature.
    """
    if not any("?" in row.name for row in rows):
        return set()
    urls = sort(filter(is_remote, (row.name for row in rows)), public_path)
    groups = (set(same) for _, same in groupby(urls, public_path))
    return {url for same in groups if len(same) > 1 for url in same}


def _leading_folders_to_strip(names: Iterable[str], known: Mapping[str, Any]) -> int:
    """Return how many leading folders to strip from absolute names of a list made on another machine.

    One number for all names: the smallest that finds at least half as many files as the best one.
    """
    found = Counter[int]()
    for parts in (name.split("/") for name in names):
        found.update(cut for cut in range(len(parts)) if "/".join(parts[cut:]) in known)
    return next((cut for cut in sorted(found) if 2 * found[cut] >= max(found.values())), 0)


def annotated_source(row: AnnotationRow, file: SourceFile | None, start: float | None, end: float | None) -> Source:
    """Return the source of an annotation row: its file, or a clip of it. Without a file, the source has a problem."""
    if file is None:
        problem = Reason.MISSING, "the annotations name it, but there is no such file"
        return Source(row.name, row.name, 0, row.label, row.columns, problem=problem)
    found = _of(file, row.label, row.columns)
    if start is not None or end is not None:
        found.id = f"{file.id}#{seconds_text(start)}-{seconds_text(end)}"
        found.start, found.end, found.parent = start, end, file.id
    return found


def _of(file: SourceFile, label: str | None, columns: Mapping[str, Any]) -> Source:
    return Source(file.id, file.path, file.size, label, columns, problem=file.problem, tag=file.tag, inside=file.inside)


def _stem(name: str) -> str:
    return os.path.splitext(name)[0] if is_video(name) else name


def _plain_key(source: Source) -> str:
    """Return the closest valid key; it may not be unique."""
    name = _stem(source.id)
    if source.parent is not None and source.id.startswith(f"{source.parent}#"):
        name = "_".join((_stem(source.parent), _milliseconds(source.start or 0), _milliseconds(source.end)))
    key = _NOT_IN_KEYS.sub("_", name).strip("/")
    key = (re.sub("/{2,}", "/", key) if "//" in key else key) or "_"
    return key if KEY_PATTERN.match(key) else f"_{key[1:]}"


def _milliseconds(time: float | None) -> str:
    """Return a bound of a clip in milliseconds, eight digits (27 hours) so that clips sort by time; "end" for None."""
    return "end" if time is None else f"{round(1000 * time):08d}"


def _hashed(key: str, name: str, digits: int) -> str:
    digest = hashlib.blake2b(os.fsencode(name), digest_size=32).hexdigest()[:digits]
    return f"{key[: MAX_SOURCE_KEY_BYTES - digits - 1].rstrip('/')}-{digest}"
