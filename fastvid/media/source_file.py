"""Open a source file, and tell an error of its disk from damage."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final

from fastvid.errors import SourceError
from fastvid.media.containers import HEAD_BYTES, sniff
from fastvid.media.reasons import Reason
from fastvid.media.temporary import is_full, no_space, temporary_file
from fastvid.runtime import faults

_CHUNK: Final = 1 << 20
# Smaller files may be sparse: reading their zeros costs little.
_HOLES_FROM: Final = 64 << 20


@dataclass(frozen=True, slots=True)
class OpenSource:
    """An open source file; hostile file names and a replacement of the file cannot affect it."""

    descriptor: int
    size: int  # size in bytes
    container: str
    private: bool = False

    @property
    def url(self) -> str:
        """A URL for FFmpeg, valid in this process and in children that inherit the descriptor."""
        return f"file:/dev/fd/{self.descriptor}"


@contextmanager
def open_source(path: str, member: tuple[int, int] | None = None) -> Iterator[OpenSource]:
    """Open a source and recognise its container.

    `member`: offset and size in bytes of the source inside a tar; it is copied to a temporary file, because FFmpeg
    reads whole files.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise unreadable(error) from error
    try:
        faults.reach("source")
        if member is not None:
            tar, descriptor = descriptor, _copied_out(descriptor, *member)
            os.close(tar)
        size = os.fstat(descriptor).st_size
        if member is None:
            _check_holes(descriptor)
        head = os.pread(descriptor, HEAD_BYTES, 0)
        yield OpenSource(descriptor, size, sniff(head), private=member is not None)
    except OSError as error:
        if is_full(error):  # while the block wrote a file
            raise no_space(error) from error
        raise unreadable(error) from error
    finally:
        os.close(descriptor)


def unreadable(error: OSError) -> SourceError:
    """Return the transient error for a source that its disk does not deliver: that says nothing about its content."""
    if isinstance(error, FileNotFoundError):
        return SourceError("file does not exist", reason=Reason.MISSING, transient=True)
    message = f"cannot read the file: {error.strerror or error}"
    return SourceError(message, reason=Reason.UNREADABLE, transient=True)


@contextmanager
def private_copy(source: OpenSource) -> Iterator[OpenSource]:
    """Copy a source to an unlinked temporary file.

    FFmpeg reports an error of the disk like damage, or like the end of the file. Of a copy it can only report damage.
    """
    descriptor = _copied_out(source.descriptor, 0, source.size)
    try:
        yield replace(source, descriptor=descriptor, private=True)
    finally:
        os.close(descriptor)


def _check_holes(descriptor: int) -> None:
    """Raise a SourceError for a large file most of which was never written, such as an unfinished download."""
    found = os.fstat(descriptor)
    allocated = found.st_blocks * 512
    if found.st_size < _HOLES_FROM or 2 * allocated >= found.st_size:
        return
    # File systems that compress need fewer blocks, too, but have no holes.
    if os.lseek(descriptor, 0, os.SEEK_HOLE) < found.st_size:
        raise SourceError(
            f"file is sparse: {allocated} of its {found.st_size} bytes were written",
            reason=Reason.TRUNCATED,
            hint="download it again",
        )


def _copied_out(tar: int, offset: int, size: int) -> int:
    """Copy a range of a file, such as a member of a tar, to an unlinked file; return the copy's descriptor."""
    with temporary_file() as file:
        position = 0
        while position < size and (data := os.pread(tar, min(_CHUNK, size - position), offset + position)):
            file.write(data)
            position += len(data)
        if position < size:
            raise SourceError("file ends inside the video", reason=Reason.TRUNCATED)
        file.flush()
        return os.dup(file.fileno())
