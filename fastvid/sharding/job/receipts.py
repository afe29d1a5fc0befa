"""Receipts of takedowns: what was removed, by hash and without a name, and what is left to do.

A receipt is written first, as the journal of its takedown, and updated by each later step: a command that was killed is
completed by the next one that changes the dataset. Receipts are ``removals/000001.json`` and so on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

from fastvid.errors import FormatError
from fastvid.format.schema import REMOVALS
from fastvid.storage import Storage

_FORMAT: Final = "fastvid-removal"
_VERSION: Final = 1

BEGUN: Final = "begun"
HIDDEN: Final = "hidden"
COMPACTED: Final = "compacted"
DELETED: Final = "deleted"

STATES: Final = {
    BEGUN: "interrupted: the next `fastvid remove`, `compact` or `gc` completes it",
    HIDDEN: "no reader sees the samples; `fastvid compact` rewrites their shards",
    COMPACTED: "no current shard contains them; `fastvid gc --yes` deletes the old shards and generations",
    DELETED: "no file of the dataset contains them",
}
"""What has been done, in order."""


@dataclass(frozen=True, slots=True)
class RemovedFile:
    """Bytes that were removed.

    Attributes:
        sha256: Their SHA-256, hex; None if it is unknown, for a source that nobody has hashed.
        bytes: Their number: of the stored samples for a source, of one member of a tar for a member.
        samples: Samples that were made of it.
    """

    sha256: str | None
    bytes: int
    samples: int = 1


@dataclass(frozen=True, slots=True)
class ReplacedShard:
    """A shard that contained removed samples.

    Attributes:
        name: Its name.
        sha256: SHA-256 of its tar, hex.
        successor: Name of the shard with its other samples; None if it has none, or is not rewritten yet.
        successor_sha256: SHA-256 of that shard's tar, hex.
    """

    name: str
    sha256: str
    successor: str | None = None
    successor_sha256: str | None = None


@dataclass(frozen=True, slots=True)
class Receipt:
    """The record of one takedown.

    Attributes:
        number: Its number in the dataset.
        dataset_id: The dataset.
        time: When it began, ISO 8601 in UTC.
        reason: Why, in the words of who removed it.
        command: By which command, without its arguments: they name what is gone.
        state: One of `STATES`.
        sources: The removed sources, by the hash of their bytes.
        members: The removed videos and sound tracks in the shards, by the hash of their bytes.
        shards: The shards that contained them.
        generations: Numbers of the generations ``before``, ``hidden`` and ``compacted``, as far as they exist.
        deleted: When the last file was deleted, ISO 8601 in UTC; empty before.
    """

    number: int
    dataset_id: str
    time: str
    reason: str
    command: str
    state: str = BEGUN
    sources: tuple[RemovedFile, ...] = ()
    members: tuple[RemovedFile, ...] = ()
    shards: tuple[ReplacedShard, ...] = ()
    generations: Mapping[str, int] = field(default_factory=dict)
    deleted: str = ""

    @property
    def hashes(self) -> frozenset[str]:
        """SHA-256 of the removed sources, as far as they are known."""
        return frozenset(source.sha256 for source in self.sources if source.sha256 is not None)

    @property
    def samples(self) -> int:
        """Number of removed samples."""
        return sum(source.samples for source in self.sources)

    @property
    def stored_bytes(self) -> int:
        """Bytes of the removed videos and sound tracks."""
        return sum(member.bytes for member in self.members)

    @property
    def unknown(self) -> int:
        """Number of removed sources whose hash is unknown: their bytes are not blocked."""
        return sum(source.sha256 is None for source in self.sources)

    @property
    def message(self) -> str:
        """When and why, for the ledger."""
        return f"{self.time}: {self.reason}"

    def to_bytes(self) -> bytes:
        """Return the receipt as JSON."""
        totals = {"samples": self.samples, "bytes": self.stored_bytes}
        return (
            json.dumps({"format": _FORMAT, "version": _VERSION, **totals, **asdict(self)}, indent=1) + "\n"
        ).encode()

    @classmethod
    def from_bytes(cls, data: bytes, *, file: str) -> Receipt:
        """Return the receipt that `to_bytes` wrote.

        Raises:
            FormatError: If it is none.
        """
        try:
            record: dict[str, Any] = json.loads(data)
            if record["format"] != _FORMAT or record["version"] != _VERSION:
                raise ValueError(f"not version {_VERSION} of {_FORMAT}")
            known = {name: value for name, value in record.items() if name in cls.__dataclass_fields__}
            known["sources"] = tuple(RemovedFile(**entry) for entry in known["sources"])
            known["members"] = tuple(RemovedFile(**entry) for entry in known["members"])
            known["shards"] = tuple(ReplacedShard(**entry) for entry in known["shards"])
            if known["state"] not in STATES:
                raise ValueError(f"unknown state {known['state']!r}")
            return cls(**known)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise FormatError(f"cannot parse the receipt: {error}", file=file) from error


def receipt_file(number: int) -> str:
    """Return the path of a receipt inside a dataset."""
    return f"{REMOVALS}/{number:06d}.json"


def read_receipts(storage: Storage) -> list[Receipt]:
    """Return the receipts of a dataset, oldest first.

    Raises:
        FormatError: If one is damaged.
    """
    names = [name for name in storage.list(f"{REMOVALS}/") if name.endswith(".json")]
    return [Receipt.from_bytes(storage.read(name), file=name) for name in names]


def add_receipt(storage: Storage, receipt: Receipt) -> Receipt:
    """Write a new receipt under the next free number, and return it."""
    number = max((known.number for known in read_receipts(storage)), default=0)
    while True:
        number += 1
        receipt = replace(receipt, number=number)
        if storage.swap(receipt_file(number), receipt.to_bytes(), None):
            return receipt


def update_receipt(storage: Storage, receipt: Receipt, **changes: Any) -> Receipt:
    """Write a receipt with some fields changed, and return it; two writers derive the same from the same dataset."""
    changed = replace(receipt, **changes)
    storage.write(receipt_file(receipt.number), changed.to_bytes())
    return changed
