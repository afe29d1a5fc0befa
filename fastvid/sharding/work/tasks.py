"""Tasks and outcomes, which a job and its workers exchange, and their bytes, which also wait on disk to be packed.

Faults of a source become an outcome, never an exception. Tasks that read the same file form a group, for which a worker
fetches, hashes and probes the file once. A remote source is fetched whole: the probe and ffmpeg both read it and both
seek, so one copy costs less than reading ranges. The copy is an unlinked file, which disappears however this process
ends.
"""

from __future__ import annotations

import io
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from fractions import Fraction
from itertools import groupby
from typing import IO, Any, Final, TypeVar

from fastvid.errors import FastvidError, FormatError, SourceError, StorageError
from fastvid.format.packets import StreamInfo
from fastvid.media.ffmpeg import Limits, no_space, temporary_file
from fastvid.media.probe import OpenSource, open_source, unreadable
from fastvid.media.reasons import Reason
from fastvid.runtime import faults
from fastvid.runtime.processes import pack, unpack
from fastvid.runtime.values import as_type
from fastvid.sharding.sources.inside import put_together
from fastvid.sharding.sources.sources import bare_tag
from fastvid.storage import RemoteOptions
from fastvid.storage.protocol import CHANGED, Version, is_missing, is_replaced
from fastvid.storage.urls import PIECE_BYTES, FileUrl, is_remote, open_root

Record = TypeVar("Record")


def parse_record(value: object, kind: type[Record], what: str) -> Record:
    """Convert plain data to a dataclass; raise a FormatError that names the field if a type is wrong.

    `what`: name of the data, for the message.
    """
    try:
        return as_type(value, kind)
    except ValueError as error:  # also for halves of surrogate pairs, which are not valid text
        raise FormatError(f"{what} does not parse: {error}") from error


@dataclass(frozen=True, slots=True)
class SourceTask:
    """One source to encode."""

    index: int
    source_id: str
    path: str
    key: str  # name of its samples
    size: int = 0  # size of the source in bytes; 0 if unknown
    start: float | None = None  # where the clip begins in seconds; None for the start of the source
    end: float | None = None  # where the clip ends in seconds; None for the end of the source
    patience: float = 1.0  # factor of the time limits
    member: tuple[int, int] | None = None  # if `path` is a tar: byte offset and size of the video in it
    # byte offset and size of the M4A with the sound, if that is another member of the tar.
    sound: tuple[int, int] | None = None
    tag: str | None = None
    parent: str | None = None
    # first frame and number of frames of a clip that is given in frames; None otherwise.
    frames: tuple[int, int] | None = None
    copies: bool = False
    inside: str = ""  # see `fastvid.sharding.sources.sources.Source`

    def attempt(self, work: Callable[[], Outcome]) -> Outcome:
        """Return the outcome of `work`, with the seconds that it took; if it raises, the outcome with the reason."""
        started = time.monotonic()
        try:
            outcome = work()
        except (SourceError, MemoryError) as error:
            outcome = self.failure(error)
        return replace(outcome, seconds=outcome.seconds + time.monotonic() - started)

    def failure(self, error: SourceError | MemoryError) -> Outcome:
        """Return the outcome if the task failed with an error."""
        if isinstance(error, SourceError):
            return Outcome(self.index, reason=Reason(error.reason), message=error.message, transient=error.transient)
        return Outcome(self.index, reason=Reason.MEMORY, message="the worker ran out of memory")

    def place(self, start: float, end: float) -> dict[str, Any]:
        """Return the fields of a sample's JSON that say where it was cut from its file; `start`, `end`: in seconds."""
        return {"parent": self.parent or self.source_id, "start_seconds": start, "end_seconds": end}

    def cut_short(self, latest: float | Fraction) -> tuple[str, ...]:
        """Return a warning if a clip begins before its video, or ends after `latest` seconds: a frame after its end."""
        is_short = (self.start or 0) < 0 or (self.end is not None and self.end > latest)
        return ("clip-cut-short",) if is_short else ()

    def read_sound(self, limits: Limits, report: Report) -> bytes:
        """Return the sound, read from the tar."""
        assert self.sound is not None
        place = self.sound
        if is_remote(self.path):
            fetched = io.BytesIO()
            _fetch_range(self, place, fetched, limits, report)
            return fetched.getvalue()
        _check_size(place[1], limits)
        return self.read_member(place, "sound")

    def read_member(self, place: tuple[int, int], what: str) -> bytes:
        """Return a member of a local tar, given by its byte offset and size. `what`: what it is, for the message."""
        try:
            with open(self.path, "rb") as file:
                faults.reach("source")
                file.seek(place[0])
                data = file.read(place[1])
        except OSError as error:
            raise unreadable(error) from error
        if len(data) != place[1]:
            raise SourceError(f"the tar ends inside the {what}", reason=Reason.TRUNCATED)
        return data

    def check_version(self, version: Version, name: str) -> None:
        """Raise SourceError for a file that was replaced after the sources were listed. `name`: for the message."""
        if self.tag is not None and version.tag is not None and bare_tag(self.tag) != bare_tag(version.tag):
            raise SourceError(f"{name} was replaced after the sources were listed", reason=Reason.CHANGED)


@dataclass(frozen=True, slots=True)
class EncodedSample:
    """One sample, ready to be packed."""

    key: str
    meta: Mapping[str, Any]
    streams: Mapping[str, bytes]

    @property
    def num_frames(self) -> int:
        """Frames of its first video stream."""
        return int(self.meta["num_frames"])


# A sample in the header of an outcome: its key, its meta, and the size of each stream in bytes.
_Stored = tuple[str, dict[str, Any], dict[str, int]]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of processing a source: samples, or the reason why it is rejected."""

    index: int
    samples: tuple[EncodedSample, ...] = ()  # at least one when `reason` is None
    reason: Reason | None = None
    message: str = ""
    transient: bool = False
    seconds: float = 0.0
    warnings: tuple[str, ...] = field(default=())
    bytes_in: int = 0  # size of the source in bytes, as it was read; 0 if unknown
    source_sha256: str = ""  # SHA-256 of the source's bytes, hex; empty if they were not hashed

    def to_bytes(self) -> bytes:
        """Return the outcome as bytes with a checksum."""
        stored = [(one.key, one.meta, {name: len(data) for name, data in one.streams.items()}) for one in self.samples]
        blobs = (data for sample in self.samples for data in sample.streams.values())
        return pack({**asdict(replace(self, samples=())), "samples": stored}, *blobs)

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> Outcome:
        """Return the outcome from the result of `to_bytes`."""
        return cls.from_parts(*unpack(data))

    @classmethod
    def from_parts(cls, header: Mapping[str, Any], blobs: memoryview) -> Outcome:
        """Return the outcome from an unpacked message: its header, and the bytes of all streams."""
        stored = parse_record(header.get("samples"), list[_Stored], "an outcome")
        outcome = parse_record({**header, "samples": ()}, cls, "an outcome")
        samples, position = [], 0
        for key, meta, sizes in stored:
            streams = {}
            for name, size in sizes.items():
                streams[name] = bytes(blobs[position : position + size])
                position += size
            samples.append(EncodedSample(key, meta, streams))
        if position != len(blobs):
            raise FormatError(f"an outcome claims {position} bytes of streams and has {len(blobs)}")
        return replace(outcome, samples=tuple(samples))


Report = Callable[[str, float], None]
"""Called when a phase begins, with its name and the seconds it may take."""


def refuse_blocked(digest: str, blocked: Collection[str]) -> None:
    """Raise SourceError for a source whose SHA-256 is on the dataset's block list."""
    if digest in blocked:
        raise SourceError(Reason.BLOCKED.meaning, reason=Reason.BLOCKED)


def group_by_file(tasks: Iterable[SourceTask]) -> Iterator[list[SourceTask]]:
    """Yield the consecutive tasks of each file as a list. Lazy: takes only one task beyond the list from `tasks`."""
    for _, group in groupby(tasks, key=_file):
        yield list(group)


def _file(task: SourceTask) -> tuple[object, ...]:
    return task.path, task.member, task.tag, task.patience


_OPTIONS: Final = RemoteOptions(concurrency=4, patience_seconds=60.0, cache="")
# Maximum seconds until the first response to a request: those in which the library retries, and a last try that starts
# just before their end.
_ANSWER_SECONDS: Final = 180.0


@contextmanager
def open_task(task: SourceTask, limits: Limits, report: Report) -> Iterator[OpenSource]:
    """Open the source of a task; fetch it first if it is remote. Reports the phases ``fetch`` and ``probe``."""
    if not task.inside and not is_remote(task.path):
        report("probe", task.patience * limits.read_seconds(task.size))
        with open_source(task.path, task.member) as source:
            _check_size(source.size, limits)
            yield source
        return
    with temporary_file() as file:
        if task.inside:
            report("fetch", _ANSWER_SECONDS + task.patience * limits.read_seconds(task.size))
            put_together(task.path, task.member, task.inside, file)
        elif task.member is None:
            _fetch(task, _Scratch(file), limits, report)
        else:
            _fetch_range(task, task.member, _Scratch(file), limits, report)
        size = os.fstat(file.fileno()).st_size
        _check_size(size, limits)
        report("probe", task.patience * limits.read_seconds(size))
        with open_source(f"/proc/self/fd/{file.fileno()}") as source:
            yield replace(source, private=True)


def _fetch_range(task: SourceTask, place: tuple[int, int], file: io.IOBase, limits: Limits, report: Report) -> None:
    """Fetch a member of a tar."""
    url, (offset, size) = FileUrl.parse(task.path), place
    _check_size(size, limits)
    report("fetch", _ANSWER_SECONDS + task.patience * limits.read_seconds(size))
    with source_errors(task):
        storage = open_root(url, _OPTIONS)
        for start in range(0, size, PIECE_BYTES):
            piece = memoryview(bytearray(min(PIECE_BYTES, size - start)))
            storage.read_into(url.name, [(offset + start, piece)])
            file.write(piece)


def _fetch(task: SourceTask, file: _Scratch, limits: Limits, report: Report) -> None:
    url = FileUrl.parse(task.path)

    def check(version: Version) -> None:
        task.check_version(version, str(url))
        _check_size(version.size, limits)
        report("fetch", _ANSWER_SECONDS + task.patience * limits.read_seconds(version.size))

    report("fetch", _ANSWER_SECONDS)
    with source_errors(task):
        open_root(url, _OPTIONS).download(url.name, file, check)


def _check_size(size: int, limits: Limits) -> None:
    if size > limits.source_bytes:
        raise SourceError(f"file has {size} bytes, at most {limits.source_bytes} are allowed", reason=Reason.TOO_LARGE)


@contextmanager
def source_errors(task: SourceTask) -> Iterator[None]:
    """Convert storage errors that the block raises to a SourceError with the reason for the task's source."""
    try:
        yield
    except SourceError:
        raise
    except StorageError as error:
        raise _verdict(error, remote=is_remote(task.path)) from error
    except FastvidError as error:
        raise SourceError(error.message, reason=Reason.UNREACHABLE) from error


def _verdict(error: StorageError, *, remote: bool) -> SourceError:
    if not remote:
        if error.message == CHANGED:
            return SourceError("the file changed while it was read", reason=Reason.CHANGED)
        return SourceError(f"cannot read the file: {error.message}", reason=Reason.UNREADABLE, transient=True)
    if is_missing(error):
        return SourceError("the file is not there", reason=Reason.MISSING)
    if is_replaced(error):
        return SourceError("the file was replaced while it was being read", reason=Reason.CHANGED)
    return SourceError(error.message, reason=Reason.UNREACHABLE, transient=True)


class _Scratch(io.FileIO):
    """A file that raises SourceError if it cannot be written, so that a full disk is not taken for a server's fault."""

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file.fileno(), "r+", closefd=False)

    def write(self, data: Any) -> int:
        view, done = memoryview(data), 0
        try:
            while done < len(view):
                done += super().write(view[done:])
        except OSError as error:
            raise no_space(error) from error
        return done


def stream_meta(info: StreamInfo, rate: Fraction, pix_fmt: str, *, conforms: bool) -> dict[str, Any]:
    """Return the fields of a sample's JSON about a stream. `rate`: frames per second."""
    facts = {name: getattr(info, name) for name in ("num_frames", "width", "height")}
    return facts | {"fps": str(rate), "pix_fmt": pix_fmt, "conforms": conforms}
