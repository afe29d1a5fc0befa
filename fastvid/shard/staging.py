"""Encoded samples that wait for their shard to be complete, so that a killed job loses only what was being encoded.

They lie in the folder of the ledger's parts, which tells every other command that a job is unfinished here.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from typing import Any, Final

from fastvid.errors import FormatError
from fastvid.format.schema import LEDGER_PARTS
from fastvid.shard.wire import Outcome
from fastvid.storage import LocalStorage, Storage

_JOB: Final = f"{LEDGER_PARTS}/job.json"
_SAMPLES: Final = f"{LEDGER_PARTS}/staging"


class Staging:
    """The samples of unfinished shards, by shard and slot."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage

    def job(self) -> dict[str, Any] | None:
        """Identity of the unfinished job here; None when there is none.

        Raises:
            FormatError: Its record is broken.
        """
        if not self.storage.exists(_JOB):
            return None
        try:
            record: dict[str, Any] = json.loads(self.storage.read(_JOB))
        except ValueError as error:
            raise FormatError(f"record of the unfinished job is broken: {error}", file=_JOB) from error
        return record

    def begin(self, identity: Mapping[str, Any]) -> None:
        """Records which job is unfinished here."""
        self.storage.write(_JOB, (json.dumps(identity, indent=1, sort_keys=True) + "\n").encode())

    def slots(self, stem: str) -> list[int]:
        """Slots of a shard that hold something."""
        return [int(name.rpartition("/")[2]) for name in self.storage.list(f"{_SAMPLES}/{stem}/")]

    def put(self, stem: str, slot: int, outcome: Outcome) -> None:
        """Keeps an outcome, atomically."""
        self.storage.write(_name(stem, slot), outcome.to_bytes())

    def get(self, stem: str, slot: int) -> Outcome | None:
        """An outcome; None when what is there is damaged, as a power cut may leave it."""
        try:
            return Outcome.from_bytes(self.storage.read(_name(stem, slot)))
        except FormatError:
            return None

    def drop(self, stem: str) -> None:
        """Deletes the samples of a shard."""
        for name in self.storage.list(f"{_SAMPLES}/{stem}/"):
            self.storage.delete(name)
        self._prune(f"{_SAMPLES}/{stem}")

    def end(self) -> None:
        """Deletes everything that belongs to the job: the ledger's parts too."""
        # The job's record goes last: until then the next run knows what the rest is.
        names = [name for name in self.storage.list(f"{LEDGER_PARTS}/") if name != _JOB]
        for name in [*names, _JOB]:
            self.storage.delete(name)
        self._prune(_SAMPLES)
        self._prune(LEDGER_PARTS)

    def _prune(self, folder: str) -> None:
        """Removes an empty folder, where there are folders."""
        if isinstance(self.storage, LocalStorage):
            with contextlib.suppress(OSError):
                self.storage.path(folder).rmdir()


def _name(stem: str, slot: int) -> str:
    return f"{_SAMPLES}/{stem}/{slot:06d}"
