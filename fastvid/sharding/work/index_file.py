"""One video where it is, and its clips: indexed once by ranges of its file. The work of a worker of any engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from fastvid.errors import FastvidError, SourceError, StorageError
from fastvid.media.in_place.cut import cut_index, frames_between
from fastvid.media.in_place.file_reader import BLOCK, FileReader
from fastvid.media.in_place.index_video import Proof, index_in_place
from fastvid.media.prove import IndexedVideo
from fastvid.media.reasons import Reason
from fastvid.runtime import faults
from fastvid.runtime.hashing import sha256
from fastvid.sharding.work.attempt import Report, attempt, failure, refuse_blocked
from fastvid.sharding.work.download import bare_tag, verdict
from fastvid.sharding.work.index_source import pack_found
from fastvid.sharding.work.messages import Outcome, Settings, SourceTask
from fastvid.storage.protocol import CHANGED
from fastvid.storage.urls import is_remote, open_file
from fastvid.storage.version import Version

# Requests before the first packet is read: the tables may be anywhere in the file.
_ANSWER_SECONDS = 180.0


def index_clips(
    tasks: Sequence[SourceTask], settings: Settings, report: Report, begin: Callable[[Sequence[int]], None]
) -> Iterator[Outcome]:
    """Index clips of one file, and yield the outcome of each. Never raises for what a source does."""
    first, digest = tasks[0], ""
    begin([task.index for task in tasks])
    report("index", _ANSWER_SECONDS + first.patience * settings.limits.read_seconds(first.size))
    try:
        file = _open(first)
        report("index", _ANSWER_SECONDS + first.patience * settings.limits.read_seconds(file.size))
        try:
            if settings.proof is Proof.ALL and file.size <= settings.limits.output_bytes:
                digest = sha256(file.whole())
                refuse_blocked(digest, settings.blocked)
            assert settings.proof is not None
            found = index_in_place(file, settings.limits, settings.proof)
        except StorageError as error:
            raise _verdict(first, error) from error
    except (SourceError, MemoryError) as error:
        for task in tasks:
            yield replace(failure(task, error), source_sha256=digest)
        return
    for task in tasks:
        outcome = attempt(task, partial(_cut, task, found, file.version))
        yield replace(outcome, source_sha256=digest, bytes_in=file.size)


def _open(task: SourceTask) -> FileReader:
    """Open the file of a task."""
    try:
        faults.reach("source")
        storage, name = open_file(task.path)
        begun = storage.begin(name, BLOCK)
    except StorageError as error:
        raise _verdict(task, error) from error
    except FastvidError as error:
        raise SourceError(error.message, reason=Reason.UNREACHABLE) from error
    if begun is None:
        raise SourceError("the file is not there", reason=Reason.MISSING)
    version, head = begun
    if task.tag is not None and version.tag is not None and bare_tag(task.tag) != bare_tag(version.tag):
        raise SourceError("the file was replaced after the sources were listed", reason=Reason.CHANGED)
    if not version.size:
        raise SourceError("the file has no bytes", reason=Reason.EMPTY)
    return FileReader(storage, name, version, head=head)


def _verdict(task: SourceTask, error: StorageError) -> SourceError:
    if is_remote(task.path):
        return verdict(error)
    if error.message == CHANGED:
        return SourceError("the file changed while it was read", reason=Reason.CHANGED)
    return SourceError(f"cannot read the file: {error.message}", reason=Reason.UNREADABLE, transient=True)


def _cut(task: SourceTask, found: IndexedVideo, version: Version) -> Outcome:
    place: dict[str, object] = {}
    if task.frames is not None:
        found = cut_index(found, *task.frames)
    elif task.start is not None or task.end is not None:
        first, count = frames_between(found, task.start, task.end)
        rate = float(found.info.fps)
        start = first / rate if found.seconds is None else float(found.seconds[first])
        stop = first + count
        known = found.seconds is not None and stop < len(found.seconds)
        end = float(found.seconds[stop]) if found.seconds is not None and known else start + count / rate
        found = cut_index(found, first, count)
        place = {"parent": task.parent or task.source_id, "start_seconds": start, "end_seconds": end}
    sample = pack_found(task.key, found)
    modified = None if version.tag else version.modified.isoformat()
    meta = dict(sample.meta) | place | {"version": {"size": version.size, "tag": version.tag, "modified": modified}}
    return Outcome(task.index, (replace(sample, meta=meta),), warnings=found.notes)
