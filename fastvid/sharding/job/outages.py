"""Detects outages that are no fault of a source: a full disk, or a store that is down or denies access.

On the web, a server that does not answer is an ordinary fault of one source. Sources in the user's own bucket all fail
together, for example when credentials expire during a job. Rejecting the rest would lose it, so the job stops and
resumes when it is run again.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from typing import Final

from fastvid.errors import StorageError
from fastvid.media.reasons import Reason
from fastvid.sharding.sources.sources import Source, encode_name
from fastvid.sharding.work.messages import Outcome
from fastvid.storage import RemoteOptions
from fastvid.storage.urls import FileUrl, is_remote, open_root

MOST_IN_A_ROW: Final = 16
"""This many failures in a row stop a job before it tries all other sources."""

_HINT: Final = "run the job again to resume it; nothing is lost"


class OutageDetector:
    """Distinguishes an outage from faults of a few sources."""

    def __init__(self) -> None:
        self._in_a_row = 0
        self._good: dict[str, Source] = {}

    def add_readable(self, sources: Iterable[Source]) -> None:
        """Record sources that an earlier run has read."""
        for source in sources:
            if _in_store(source):
                self._good[FileUrl.parse(source.path).root] = source
                return

    def add_outcome(self, source: Source, outcome: Outcome) -> None:
        """Record the first outcome of a source.

        Raises:
            StorageError: If too many sources in a row have failed.
        """
        if outcome.reason is Reason.NO_SPACE or (outcome.reason is Reason.UNREACHABLE and _in_store(source)):
            self._in_a_row += 1
            if self._in_a_row >= MOST_IN_A_ROW:
                raise _stop(source, outcome, f"{self._in_a_row} sources in a row failed: ")
            return
        self._in_a_row = 0
        if outcome.reason is None:
            self.add_readable([source])

    def add_final_outcome(self, source: Source, outcome: Outcome) -> None:
        """Record the final outcome of a source, after it was retried alone.

        Raises:
            StorageError: If the failure is an outage, not the source's fault.
        """
        if outcome.reason is Reason.NO_SPACE:
            raise _stop(source, outcome)
        if outcome.reason is Reason.UNREACHABLE and _in_store(source) and not self._store_answers(source):
            raise _stop(source, outcome)

    def _store_answers(self, source: Source) -> bool:
        """Return whether a source of the same store that was read before can still be read."""
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


def _stop(source: Source, outcome: Outcome, before: str = "") -> StorageError:
    if outcome.reason is Reason.NO_SPACE:
        where, hint = tempfile.gettempdir(), f"free some space, or name another folder in TMPDIR; {_HINT}"
        return StorageError(f"{before}{outcome.message}", file=where, source=encode_name(source.id), hint=hint)
    return StorageError(f"{before}{outcome.message}", file=FileUrl.parse(source.path), hint=_HINT)
