"""List files that may be sources: below folders, in buckets, and at URLs."""

from __future__ import annotations

import os
import posixpath
import stat
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NoReturn

from fastvid.errors import StorageError, UsageError
from fastvid.media.reasons import Reason
from fastvid.runtime.file_names import encode_name
from fastvid.sharding.sources.video_names import VIDEO_SUFFIXES
from fastvid.storage import RemoteOptions
from fastvid.storage.urls import FileUrl, is_remote, open_root

# The folder of a file system's own repairs, which only root may read.
_RECOVERED: Final = "lost+found"


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file below a root."""

    id: str
    root: str
    parts: tuple[str, ...]
    path: str
    size: int  # size in bytes, 0 if unknown
    problem: tuple[Reason, str] | None = None
    tag: str | None = None


def find_files(roots: Sequence[str], *, follow_links: bool) -> tuple[list[SourceFile], Counter[str]]:
    """Return the files below roots, sorted by path, and the counts of ignored files by kind."""
    ignored = Counter[str]()
    local = [root for root in roots if not is_remote(root)]
    remote = [FileUrl.parse(root) for root in roots if is_remote(root)]
    found = {file.path: file for file in _find_local(local, ignored, follow_links=follow_links)}
    found |= {file.path: file for file in _find_remote(remote, ignored)}
    return [found[path] for path in sorted(found)], ignored


def file_at(url: str, *, with_query: bool = False) -> SourceFile:
    """Return the file at a URL named by annotations. The URL becomes its id; nothing is requested yet."""
    place = FileUrl.parse(url)
    name = f"{place.root.partition('://')[2]}/{place.name}"
    if place.query and with_query:
        name += f"?{place.query}"
    return SourceFile(name, place.root, tuple(place.name.split("/")), url, 0)


def public_path(path: str) -> str:
    """Return a path or URL that is safe to print and store: without a query, which may be a signature."""
    return str(FileUrl.parse(path)) if is_remote(path) else path


def _find_local(roots: Sequence[str], ignored: Counter[str], *, follow_links: bool) -> Iterator[SourceFile]:
    if not roots:
        return
    absolute = [os.path.abspath(root) for root in roots]
    missing = next((root for root in absolute if not os.path.exists(root)), None)
    if missing is not None:
        raise UsageError("source does not exist", file=missing)
    folders = [root if os.path.isdir(root) else os.path.dirname(root) for root in absolute]
    common = os.path.commonpath(folders)
    for root, folder in zip(absolute, folders, strict=True):
        entries = _walk(root, ignored) if os.path.isdir(root) else [root]
        for path in entries:
            problem = (None if follow_links else _check_inside(path, folder)) or _check_target(path)
            parts = tuple(os.path.relpath(path, folder).split(os.sep))
            size = 0 if problem else _status(path).st_size
            yield SourceFile(os.path.relpath(path, common), folder, parts, path, size, problem)


def _walk(root: str, ignored: Counter[str]) -> Iterator[str]:
    """Yield regular files, and links to files, that have a video suffix, sorted by name."""
    # Linked folders are not followed: inside the root they are found under their own name, outside is out of bounds.
    for folder, folders, names in os.walk(root, onerror=_raise):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name != _RECOVERED)
        for name in folders:
            if os.path.islink(os.path.join(folder, name)):
                ignored["linked folder"] += 1
        for name in sorted(names):
            path = os.path.join(folder, name)
            kind = _ignored_kind(name)
            if kind is None and not _is_file(path):
                kind = "special file"
            if kind is None:
                yield path
            else:
                ignored[kind] += 1


def _ignored_kind(name: str) -> str | None:
    """Return the kind under which a file name is ignored; None if it may be a source."""
    if name.startswith("."):
        return "hidden file"
    suffix = os.path.splitext(name)[1].lower()
    return None if suffix in VIDEO_SUFFIXES else f"{suffix or 'nameless ending'} file"


def _is_file(path: str) -> bool:
    # Keep a dangling link: it is reported as a missing source.
    return _check_target(path) is not None or stat.S_ISREG(_status(path).st_mode)


def _check_target(path: str) -> tuple[Reason, str] | None:
    """Return the problem of a link whose target does not exist or is a link to itself; None otherwise."""
    if not os.path.islink(path) or os.path.exists(path):
        return None
    return Reason.MISSING, f"a link to {encode_name(os.readlink(path))}, which does not exist"


def _check_inside(path: str, root: str) -> tuple[Reason, str] | None:
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
    """Raise a StorageError: what a listing leaves out is lost without a word."""
    raise StorageError(
        f"sources cannot be listed: {error.strerror or error}",
        file=encode_name(os.fsdecode(error.filename)),
        hint="repair the disk, or restore the permissions, and run the command again",
    ) from error


def _find_remote(roots: Sequence[FileUrl], ignored: Counter[str]) -> Iterator[SourceFile]:
    listed = [(root, _list(root, ignored)) for root in roots]
    folders = [_folder(root, files) for root, files in listed]
    common = posixpath.commonpath(folders) if folders else ""
    for (root, files), folder in zip(listed, folders, strict=True):
        for name, size, tag in files:
            place = _place(root.root, name)
            parts = tuple(posixpath.relpath(place, folder).split("/"))
            url = f"{root.root}/{name}" if root.is_listable else str(root)
            if root.query:
                url = f"{url}?{root.query}"
            yield SourceFile(posixpath.relpath(place, common), f"{root.root}{folder}", parts, url, size, None, tag)


def _list(root: FileUrl, ignored: Counter[str]) -> list[tuple[str, int, str | None]]:
    """Return name, size in bytes and tag of each file below a root, or of the root if it is a file itself."""
    storage = open_root(root, RemoteOptions())
    name = root.name.rstrip("/")
    if not root.is_listable or (name == root.name and os.path.splitext(name)[1].lower() in VIDEO_SUFFIXES):
        version = storage.version(root.name) if root.name else None
        if version is not None:
            return [(root.name, version.size, version.tag)]
        if not root.is_listable:
            raise UsageError(
                "source does not exist", file=root, hint="name files: folders of web servers cannot be listed"
            )
    prefix = f"{name}/" if name else ""
    files, seen = [], False
    for path, version in storage.entries(prefix):
        seen = True
        below = path.removeprefix(prefix).split("/")
        kind = "hidden file" if any(part.startswith(".") for part in below) else _ignored_kind(below[-1])
        if kind is None:
            files.append((path, version.size, version.tag))
        elif below[-1]:  # skip the empty objects that consoles create for folders
            ignored[kind] += 1
    if not seen:
        raise UsageError("source does not exist", file=root)
    return files


def _folder(root: FileUrl, files: Sequence[tuple[str, int, str | None]]) -> str:
    place = _place(root.root, root.name)
    return posixpath.dirname(place) if [name for name, _, _ in files] == [root.name] else place


def _place(root: str, name: str) -> str:
    """Return a path whose first folder is the bucket or host."""
    return posixpath.join("/", root.partition("://")[2], name.rstrip("/"))
