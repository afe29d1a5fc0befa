"""Which videos go into a dataset: found in folders, matched with annotations, named by keys."""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final
from urllib.parse import quote_from_bytes, unquote_to_bytes

from fastvid.errors import UsageError
from fastvid.format.schema import KEY_PATTERN, MAX_KEY_BYTES
from fastvid.shard.annotations import VIDEO_SUFFIXES, Annotations, Row, split_of
from fastvid.shard.reasons import Reason

# Parts of a long video are called key/0000, key/0001, ...
_PART_BYTES: Final = 5
MAX_SOURCE_KEY_BYTES: Final = MAX_KEY_BYTES - _PART_BYTES
_HASH_DIGITS: Final = 8
_RAW_NAME: Final = "bytes:"


@dataclass(frozen=True, slots=True)
class Source:
    """One raw video, or a clip of one.

    Attributes:
        id: Its name among the sources, unique; with the original characters and bytes (surrogateescape).
        path: Where the file lies.
        size: Bytes when it was found.
        label: Name of its class.
        columns: Its other annotation columns.
        start: Seconds into the file where the clip begins; None for the beginning.
        end: Seconds into the file where the clip ends; None for the end.
        member: First byte and bytes of the video when `path` is a tar.
        problem: A reason and message when it cannot even be tried.
        key: Name of its samples in the shards.
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
        roots: Folders, or single video files.
        annotations: What `read_annotations` gave.
        follow_links: Take links that lead out of their root. A stranger's folder could make you publish your own files.

    Raises:
        UsageError: A root is missing, nothing is found, or one video is annotated twice in different ways.
    """
    found, ignored = _walk(roots, follow_links)
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


def encode_name(name: str) -> str:
    """A file name as text that every table can store: itself, or ``bytes:`` and percent-encoding if it is no UTF-8."""
    raw = os.fsencode(name)
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        return _RAW_NAME + quote_from_bytes(raw)
    return _RAW_NAME + quote_from_bytes(raw) if text.startswith(_RAW_NAME) else text


def decode_name(text: str) -> str:
    """The file name behind `encode_name`'s text."""
    if text.startswith(_RAW_NAME):
        return os.fsdecode(unquote_to_bytes(text[len(_RAW_NAME) :]))
    return text


@dataclass(frozen=True, slots=True)
class _Found:
    """A file below a root: its id, its folders and name below that root, and where it lies."""

    id: str
    root: str
    parts: tuple[str, ...]
    path: str
    size: int
    problem: tuple[Reason, str] | None


def _walk(roots: Sequence[str], follow_links: bool) -> tuple[list[_Found], Counter[str]]:
    if not roots:
        raise UsageError("there is no source", hint="name a folder of videos")
    absolute = [os.path.abspath(root) for root in roots]
    missing = next((root for root in absolute if not os.path.exists(root)), None)
    if missing is not None:
        raise UsageError("source does not exist", file=missing)
    folders = [root if os.path.isdir(root) else os.path.dirname(root) for root in absolute]
    common = os.path.commonpath(folders)
    found, ignored = {}, Counter[str]()
    for root, folder in zip(absolute, folders, strict=True):
        entries = _files(root, ignored) if os.path.isdir(root) else [root]
        for path in entries:
            problem = None if follow_links else _leaves(path, folder)
            parts = tuple(os.path.relpath(path, folder).split(os.sep))
            size = 0 if problem else _size(path)
            found[path] = _Found(os.path.relpath(path, common), folder, parts, path, size, problem)
    return [found[path] for path in sorted(found)], ignored


def _files(root: str, ignored: Counter[str]) -> Iterator[str]:
    """Regular files and links to files with a video's ending, in the order of their names."""
    # The walk follows no linked folder: one inside the root is found under its own name, one outside is not ours.
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in folders:
            if os.path.islink(os.path.join(folder, name)):
                ignored["linked folder"] += 1
        for name in sorted(names):
            path = os.path.join(folder, name)
            suffix = os.path.splitext(name)[1].lower()
            if name.startswith("."):
                ignored["hidden file"] += 1
            elif suffix not in VIDEO_SUFFIXES:
                ignored[f"{suffix or 'nameless ending'} file"] += 1
            elif not _is_file(path):
                ignored["special file"] += 1
            else:
                yield path


def _is_file(path: str) -> bool:
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except OSError:
        # A dangling link is a source that is missing, and is reported as one.
        return True


def _leaves(path: str, root: str) -> tuple[Reason, str] | None:
    target = os.path.realpath(path)
    if os.path.commonpath([target, os.path.realpath(root)]) == os.path.realpath(root):
        return None
    return Reason.OUTSIDE, f"a link to {encode_name(target)}"


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def _by_folder(found: Sequence[_Found]) -> list[Source]:
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
        sources.append(Source(file.id, file.path, file.size, label, columns, problem=file.problem))
    return sources


def _split_name(folder: str) -> str | None:
    return split_of(folder) if re.fullmatch(r"[a-z]+", folder.lower()) else None


def _by_rows(found: Sequence[_Found], rows: Sequence[Row], ignored: Counter[str]) -> list[Source]:
    by_path = {"/".join(file.parts): file for file in found} | {file.id: file for file in found}
    by_path |= {file.path: file for file in found}
    by_name: dict[str, list[_Found]] = {}
    for file in found:
        for name in {file.parts[-1], os.path.splitext(file.parts[-1])[0]}:
            by_name.setdefault(name, []).append(file)

    strip = _foreign_folders([row.name for row in rows if os.path.isabs(row.name)], by_path)

    def look_up(name: str, label: str | None) -> _Found | None:
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


def _annotated(row: Row, file: _Found | None, start: float | None, end: float | None) -> Source:
    if file is None:
        problem = Reason.MISSING, "the annotations name it, and no file of that name is there"
        return Source(row.name, row.name, 0, row.label, row.columns, problem=problem)
    name = file.id
    if start is not None or end is not None:
        name = f"{name}#{'' if start is None else f'{start:g}'}-{'' if end is None else f'{end:g}'}"
    return Source(name, file.path, file.size, row.label, row.columns, start, end, problem=file.problem)


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
