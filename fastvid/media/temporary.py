"""Temporary files of workers, and the verdict when there is no room for them: none on the source."""

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
    """A file without a name in the folder that TMPDIR names: nothing is left behind, however this process ends.

    Raises:
        SourceError: It cannot be made.
    """
    try:
        file = tempfile.TemporaryFile(prefix="fastvid-")  # noqa: SIM115
    except OSError as error:
        raise no_space(error) from error
    with file:
        yield file


def is_full(error: OSError) -> bool:
    """Whether a disk or a quota is full."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def no_space(error: OSError | None = None) -> SourceError:
    """The verdict when a temporary file cannot be written."""
    what = "is full" if error is None or is_full(error) else f"cannot be written: {error.strerror}"
    return SourceError(
        f"the disk for temporary files, {tempfile.gettempdir()}, {what}", reason=Reason.NO_SPACE, transient=True
    )
