"""Sources that lie elsewhere: fetched whole to the local disk before anything looks into them.

A video is read twice, by the probe and by ffmpeg, and both seek; so one copy costs less than ranges would. The copy has
no name: whatever happens to this process, nothing is left behind.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import IO, Any, Final

from fastvid.errors import FastvidError, SourceError, StorageError
from fastvid.media.limits import Limits
from fastvid.media.reasons import Reason
from fastvid.media.source_file import OpenSource, open_source
from fastvid.media.temporary import no_space, temporary_file
from fastvid.sharding.work.messages import SourceTask
from fastvid.storage import RemoteOptions
from fastvid.storage.transfer import PIECE_BYTES
from fastvid.storage.urls import FileUrl, is_remote, open_root
from fastvid.storage.version import Version

_OPTIONS: Final = RemoteOptions(concurrency=4, patience_seconds=60.0, cache="")
# What a request may take before its first answer: the library's tries, and one more that began just before the end.
_ANSWER_SECONDS: Final = 180.0


@contextmanager
def open_task(task: SourceTask, limits: Limits, report: Callable[[str, float], None]) -> Iterator[OpenSource]:
    """Open the source of a task, fetched first if it lies elsewhere; reports the phases ``fetch``, ``probe``."""
    if not is_remote(task.path):
        report("probe", task.patience * limits.read_seconds(task.size))
        with open_source(task.path, task.member) as source:
            _check_size(source.size, limits)
            yield source
        return
    with temporary_file() as file:
        if task.member is None:
            size = _fetch(task, _Scratch(file), limits, report)
        else:
            size = _fetch_range(task, task.member, _Scratch(file), limits, report)
        report("probe", task.patience * limits.read_seconds(size))
        with open_source(f"/proc/self/fd/{file.fileno()}") as source:
            yield replace(source, private=True)


def read_sound(task: SourceTask, place: tuple[int, int], limits: Limits, report: Callable[[str, float], None]) -> bytes:
    """Read the sound of a task from its tar.

    `place`: first byte and bytes of the sound.
    """
    with temporary_file() as file:
        if is_remote(task.path):
            _fetch_range(task, place, _Scratch(file), limits, report)
            file.seek(0)
            return file.read()
    _check_size(place[1], limits)
    with open(task.path, "rb") as tar:
        tar.seek(place[0])
        data = tar.read(place[1])
    if len(data) < place[1]:
        raise SourceError("file ends inside the sound", reason=Reason.TRUNCATED)
    return data


def _fetch_range(
    task: SourceTask, place: tuple[int, int], file: _Scratch, limits: Limits, report: Callable[[str, float], None]
) -> int:
    """Fetches a member of a tar; returns its bytes."""
    url, (offset, size) = FileUrl.parse(task.path), place
    _check_size(size, limits)
    report("fetch", _ANSWER_SECONDS + task.patience * limits.read_seconds(size))
    try:
        storage = open_root(url, _OPTIONS)
        for start in range(0, size, PIECE_BYTES):
            piece = memoryview(bytearray(min(PIECE_BYTES, size - start)))
            storage.read_into(url.name, [(offset + start, piece)])
            file.write(piece)
    except SourceError:
        raise
    except StorageError as error:
        raise verdict(error) from error
    except FastvidError as error:
        raise SourceError(error.message, reason=Reason.UNREACHABLE) from error
    return size


def _fetch(task: SourceTask, file: _Scratch, limits: Limits, report: Callable[[str, float], None]) -> int:
    url = FileUrl.parse(task.path)

    def check(version: Version) -> None:
        if task.tag is not None and version.tag is not None and bare_tag(task.tag) != bare_tag(version.tag):
            raise SourceError(f"{url} was replaced after the sources were listed", reason=Reason.CHANGED)
        _check_size(version.size, limits)
        report("fetch", _ANSWER_SECONDS + task.patience * limits.read_seconds(version.size))

    report("fetch", _ANSWER_SECONDS)
    try:
        return open_root(url, _OPTIONS).download(url.name, file, check).size
    except SourceError:
        raise
    except StorageError as error:
        raise verdict(error) from error
    except FastvidError as error:
        raise SourceError(error.message, reason=Reason.UNREACHABLE) from error


def _check_size(size: int, limits: Limits) -> None:
    if size > limits.source_bytes:
        raise SourceError(f"file has {size} bytes, at most {limits.source_bytes} are allowed", reason=Reason.TOO_LARGE)


def verdict(error: StorageError) -> SourceError:
    from fastvid.storage.client import is_missing, is_replaced

    if is_missing(error):
        return SourceError("the file is not there", reason=Reason.MISSING)
    if is_replaced(error):
        return SourceError("the file was replaced while it was being read", reason=Reason.CHANGED)
    return SourceError(error.message, reason=Reason.UNREACHABLE, transient=True)


def bare_tag(tag: str) -> str:
    """A tag without its quotes: listings of some stores have them, others not."""
    return tag.removeprefix("W/").strip('"')


class _Scratch:
    """A file whose writes fail with SourceError, so that nobody takes a full disk for a fault of the server."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def write(self, data: Any) -> int:
        try:
            # Past the file's buffer: an error shows where it happens.
            view, done = memoryview(data), 0
            while done < len(view):
                done += os.write(self._file.fileno(), view[done:])
        except OSError as error:
            raise no_space(error) from error
        return done

    def seek(self, position: int) -> int:
        return os.lseek(self._file.fileno(), position, os.SEEK_SET)

    def truncate(self) -> int:
        position = os.lseek(self._file.fileno(), 0, os.SEEK_CUR)
        os.ftruncate(self._file.fileno(), position)
        return position

    def fileno(self) -> int:
        return self._file.fileno()
