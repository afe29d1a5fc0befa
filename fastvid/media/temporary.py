"""Temporary files of workers, and the transient error when the disk is full, which rejects no source."""

from __future__ import annotations

import errno
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

from fastvid.errors import SourceError
from fastvid.media.reasons import Reason


@contextmanager
def temporary_file() -> Iterator[IO[bytes]]:
    """Open an unlinked file in the folder TMPDIR: it disappears however this process ends."""
    try:
        file = tempfile.TemporaryFile(prefix="fastvid-")  # noqa: SIM115
    except OSError as error:
        raise no_space(error) from error
    with file:
        yield file


def is_full(error: OSError) -> bool:
    """Return whether the error means that a disk or a quota is full."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def no_space(error: OSError | None = None) -> SourceError:
    """Return the transient error for a temporary file that cannot be written."""
    what = "is full" if error is None or is_full(error) else f"cannot be written: {error.strerror}"
    return SourceError(
        f"disk for temporary files, {tempfile.gettempdir()}, {what}", reason=Reason.NO_SPACE, transient=True
    )
