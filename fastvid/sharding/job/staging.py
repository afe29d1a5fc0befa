"""Stores encoded samples until their shard is complete, so that a killed job loses only what was being encoded.

They are in the folder of the ledger's parts, which shows every other command that a job is unfinished.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from fastvid.errors import FormatError
from fastvid.format.schema import LEDGER_PARTS
from fastvid.sharding.job.identity import digest
from fastvid.sharding.work.messages import Outcome
from fastvid.storage import LocalStorage, Storage

_JOB: Final = f"{LEDGER_PARTS}/job.json"
_SAMPLES: Final = f"{LEDGER_PARTS}/staging"
_ADDITION: Final = f"{LEDGER_PARTS}/add/"  # of another command; see `fastvid.sharding.change.add`
_BUILD_DIGITS: Final = 8


class Staging:
    """The record of an unfinished job, and the samples of its unfinished shards, by shard and slot.

    `scratch`: where samples are stored; by default the dataset's folder, so that any machine can resume the job.
    `encoder`: build of the encoder; samples of other builds are ignored.
    """

    def __init__(
        self, storage: Storage, scratch: Storage | None = None, encoder: Mapping[str, Any] | None = None
    ) -> None:
        self.storage, self.scratch = storage, scratch or storage
        self._build = f"build-{digest(encoder or {})[:_BUILD_DIGITS]}"

    def job(self) -> dict[str, Any] | None:
        """Return the identity of the unfinished job here; None if there is none."""
        if not self.storage.exists(_JOB):
            return None
        try:
            record: dict[str, Any] = json.loads(self.storage.read(_JOB))
        except ValueError as error:
            raise FormatError(f"record of the unfinished job is broken: {error}", file=_JOB) from error
        return record

    def begin(self, identity: Mapping[str, Any], *, replace: bool = False) -> dict[str, Any] | None:
        """Record the unfinished job, unless one is recorded already and `replace` is false.

        Returns the identity recorded already, perhaps by another part that began at the same moment; otherwise
        None.
        """
        record = (json.dumps(identity, indent=1, sort_keys=True) + "\n").encode()
        if replace:
            self.storage.write(_JOB, record)
            return None
        return None if self.storage.swap(_JOB, record, None) else self.job()

    def slots(self) -> dict[str, set[int]]:
        """Return the slots with a stored outcome, by shard."""
        found: dict[str, set[int]] = {}
        for name in self.scratch.list(f"{_SAMPLES}/{self._build}/"):
            stem, slot = name.split("/")[-2:]
            found.setdefault(stem, set()).add(int(slot))
        return found

    def put(self, stem: str, slot: int, outcome: Outcome) -> None:
        """Store an outcome atomically."""
        self.scratch.write(self._name(stem, slot), outcome.to_bytes())

    def get(self, stem: str, slot: int) -> Outcome | None:
        """Return an outcome; None if it is damaged, for example by a power failure."""
        try:
            return Outcome.from_bytes(self.scratch.read(self._name(stem, slot)))
        except FormatError:
            return None

    def drop(self, stem: str) -> None:
        """Delete the samples of a shard."""
        folder = f"{_SAMPLES}/{self._build}/{stem}"
        for name in self.scratch.list(f"{folder}/"):
            self.scratch.delete(name)
        _prune(self.scratch, folder)

    def end(self) -> None:
        """Delete everything that belongs to the job, including the ledger's parts."""
        # Delete the job's record last: until then the next run knows what the other files are.
        for name in self.scratch.list(f"{_SAMPLES}/"):
            self.scratch.delete(name)
        _prune(self.scratch, _SAMPLES)
        names = [name for name in self.storage.list(f"{LEDGER_PARTS}/") if not name.startswith((_JOB, _ADDITION))]
        for name in [*names, _JOB]:
            self.storage.delete(name)
        _prune(self.storage, LEDGER_PARTS)

    def _name(self, stem: str, slot: int) -> str:
        return f"{_SAMPLES}/{self._build}/{stem}/{slot:06d}"


def _prune(storage: Storage, folder: str) -> None:
    """Remove empty folders, if the storage has folders."""
    if isinstance(storage, LocalStorage):
        storage.prune(folder)
