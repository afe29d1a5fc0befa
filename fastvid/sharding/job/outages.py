"""Detects outages that are no fault of a source: a full or failing disk, or a store that is down or denies access.

On the web, a server that does not answer is an ordinary fault of one source. In contrast, all sources in the user's own
bucket fail together, for example when credentials expire during a job. So that they are not all rejected, the job
stops, and resumes when it is run again. A source on a disk that was listed but cannot be read is not rejected either:
the disk may be unmounted or failing. The job processes all other sources, and then stops.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from typing import Final

from fastvid.errors import StorageError
from fastvid.media.reasons import Reason
from fastvid.runtime.names import encode_name
from fastvid.runtime.values import things
from fastvid.sharding.sources.sources import Source
from fastvid.sharding.work.tasks import Outcome
from fastvid.storage import RemoteOptions
from fastvid.storage.urls import FileUrl, is_remote, open_root

MOST_IN_A_ROW: Final = 16
"""Number of failures in a row after which a job stops, without trying the other sources."""

_HINT: Final = "run the job again to resume it; nothing is lost"
_REJECT: Final = "or reject such sources with --reject-unreadable"


class OutageDetector:
    """Distinguishes an outage from faults of a few sources."""

    def __init__(self, *, reject_unreadable: bool = False) -> None:
        self._reject_unreadable = reject_unreadable
        self._in_a_row = 0
        self._failed = ""
        self._good: dict[str, Source] = {}
        self._unread: list[tuple[Source, Outcome]] = []

    def add_readable(self, sources: Iterable[Source]) -> None:
        """Record sources that an earlier run has read."""
        for source in sources:
            if _in_store(source):
                self._good[FileUrl.parse(source.path).root] = source
                return

    def add_outcome(self, source: Source, outcome: Outcome) -> None:
        """Record the first outcome of a source."""
        on_disk = self._is_unread(source, outcome)
        if on_disk:
            _check_folder(source)
        lost_store = outcome.reason is Reason.UNREACHABLE and _in_store(source)
        if on_disk or lost_store or outcome.reason is Reason.NO_SPACE:
            # Clips of one file fail together: count them once.
            self._in_a_row += source.path != self._failed
            self._failed = source.path
            if self._in_a_row >= MOST_IN_A_ROW:
                raise _stop(source, outcome, f"{self._in_a_row} sources in a row failed: ")
            return
        self._in_a_row, self._failed = 0, ""
        if outcome.reason is None:
            self.add_readable([source])

    def add_final_outcome(self, source: Source, outcome: Outcome) -> bool:
        """Record the final outcome of a source, after it was retried alone.

        Returns False if the outcome is the fault of a disk, not of the source; then `finish` raises.
        """
        if outcome.reason is Reason.NO_SPACE:
            raise _stop(source, outcome)
        if outcome.reason is Reason.UNREACHABLE and _in_store(source) and not self._store_answers(source):
            raise _stop(source, outcome)
        if self._is_unread(source, outcome):
            _check_folder(source)
            self._unread.append((source, outcome))
            return False
        return True

    def finish(self) -> None:
        """Raise a StorageError if a disk did not deliver a source."""
        if self._unread:
            raise _stop(*self._unread[0], f"{things(len(self._unread), 'source')} cannot be read, the first: ")

    def _is_unread(self, source: Source, outcome: Outcome) -> bool:
        unread = outcome.reason in (Reason.MISSING, Reason.UNREADABLE) and not is_remote(source.path)
        return unread and not self._reject_unreadable

    def _store_answers(self, source: Source) -> bool:
        """Return whether another source of the same store, which was read before, can still be read."""
        good = self._good.get(FileUrl.parse(source.path).root)
        if good is None:
            return False
        url = FileUrl.parse(good.path)
        try:
            open_root(url, RemoteOptions(cache="")).read_into(url.name, [(0, memoryview(bytearray(1)))])
        except StorageError:
            return False
        return True


def _in_store(source: Source) -> bool:
    return is_remote(source.path) and FileUrl.parse(source.path).is_listable


def _check_folder(source: Source) -> None:
    """Raise a StorageError if the folder of a source is gone, or empty like that of an unmounted disk."""
    folder = os.path.dirname(source.path)
    try:
        problem = "" if os.listdir(folder) else "it is empty"
    except OSError as error:
        problem = error.strerror or str(error)
    if problem:
        raise StorageError(
            f"folder of the sources is gone: {problem}",
            file=encode_name(folder),
            source=encode_name(source.id),
            hint=f"mount or restore it, then {_HINT}",
        )


def _stop(source: Source, outcome: Outcome, before: str = "") -> StorageError:
    said, name = f"{before}{outcome.message}", encode_name(source.id)
    if outcome.reason is Reason.NO_SPACE:
        hint = f"free some space, or name another folder in TMPDIR; {_HINT}"
        return StorageError(said, file=tempfile.gettempdir(), source=name, hint=hint)
    if is_remote(source.path):
        return StorageError(said, file=FileUrl.parse(source.path), hint=_HINT)
    hint = f"repair the disk, or restore the file or its permissions, then {_HINT}; {_REJECT}"
    return StorageError(said, file=encode_name(source.path), source=name, hint=hint)
