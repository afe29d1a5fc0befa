"""Troubles that are no verdict on a source: a full disk, a store that is down or no longer lets us in.

Of the web, one server that does not answer is an ordinary fault of one source. Sources in one's own bucket fail all
together, when credentials run out in the middle of a job; to reject what is left would lose it, so the job stops, and
goes on when it is run again.
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
"""So many failures of this kind, with no source read in between, stop a job before it has tried all others."""

_HINT: Final = "nothing is lost: the job goes on where it was when it is run again"


class Trouble:
    """Tells an outage from bad luck with a few files."""

    def __init__(self) -> None:
        self._in_a_row = 0
        self._good: dict[str, Source] = {}

    def learn(self, sources: Iterable[Source]) -> None:
        """Takes in sources that an earlier run has read."""
        for source in sources:
            if _in_store(source):
                self._good[FileUrl.parse(source.path).root] = source
                return

    def note(self, source: Source, outcome: Outcome) -> None:
        """Takes in the first outcome of a source.

        Raises:
            StorageError: Too many have failed one after another.
        """
        if outcome.reason is Reason.NO_SPACE or (outcome.reason is Reason.UNREACHABLE and _in_store(source)):
            self._in_a_row += 1
            if self._in_a_row >= MOST_IN_A_ROW:
                raise _stop(source, outcome, f"{self._in_a_row} sources in a row failed: ")
            return
        self._in_a_row = 0
        if outcome.reason is None:
            self.learn([source])

    def judge(self, source: Source, outcome: Outcome) -> None:
        """Takes in the last outcome of a source, which was tried alone.

        Raises:
            StorageError: It says nothing about the source.
        """
        if outcome.reason is Reason.NO_SPACE:
            raise _stop(source, outcome)
        if outcome.reason is Reason.UNREACHABLE and _in_store(source) and not self._store_answers(source):
            raise _stop(source, outcome)

    def _store_answers(self, source: Source) -> bool:
        """Whether a source of the same store that was read before can still be read."""
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
        where, hint = tempfile.gettempdir(), f"make room, or name another folder in TMPDIR; {_HINT}"
        return StorageError(f"{before}{outcome.message}", file=where, source=encode_name(source.id), hint=hint)
    return StorageError(f"{before}{outcome.message}", file=FileUrl.parse(source.path), hint=_HINT)
