"""Receipts of takedowns: what was removed, by hash and without a name; and the search that proves it.

A receipt, ``removals/000001.json`` and so on, is written once. What is left to do is seen from the dataset itself.

The search reads every file, whoever wrote it: its name, its raw bytes, and what is compressed in it, which are the
columns of Parquet files. Of every tar each member is hashed. Allowed are the block list, the receipts and the rows of
the ledger without a name, which contain hashes on purpose.
"""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from fastvid.errors import FormatError, StorageError, UsageError
from fastvid.format.generations import read_generation, read_head
from fastvid.format.schema import AUDIO, BLOCKED, GENERATIONS, LEDGER, REMOVALS, from_parquet, member_suffix
from fastvid.format.tar import TarMember, read_members, sample_groups
from fastvid.runtime.names import encode_name
from fastvid.runtime.values import sha256
from fastvid.sharding.job.ledger import is_nameless, read_blocked
from fastvid.storage import LocalStorage, RemoteOptions, Storage, open_storage
from fastvid.storage.urls import read_pieces

_FORMAT: Final = "fastvid-removal"
_VERSIONS: Final = (1, 2)  # the first also recorded each step
_FEWEST_LETTERS: Final = 3

HIDDEN: Final = "no reader sees the samples; `fastvid compact` rewrites their shards"
"""What is left to do after a takedown."""
_COMPACTED: Final = "no current shard contains them; `fastvid gc --yes` deletes the old shards and generations"


@dataclass(frozen=True, slots=True)
class RemovedFile:
    """Bytes that were removed."""

    sha256: str | None  # hex; None if it is unknown, for a source that nobody has hashed
    bytes: int  # of the stored samples for a source, of one member of a tar for a member
    samples: int = 1  # samples that were made of it


@dataclass(frozen=True, slots=True)
class Receipt:
    """The record of one takedown."""

    number: int
    dataset_id: str
    time: str  # when it began, ISO 8601 in UTC
    reason: str  # in the words of who removed it
    sources: tuple[RemovedFile, ...]
    members: tuple[RemovedFile, ...]  # videos and sound tracks in the shards
    shards: Mapping[str, str]  # SHA-256 by name, hex, of the shards that contained them

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
        shards = [{"name": name, "sha256": digest} for name, digest in self.shards.items()]
        record = {"format": _FORMAT, "version": _VERSIONS[-1], **totals, **asdict(self), "shards": shards}
        return (json.dumps(record, indent=1) + "\n").encode()

    @classmethod
    def from_bytes(cls, data: bytes, *, file: str) -> Receipt:
        """Return the receipt that `to_bytes` wrote."""
        try:
            record: dict[str, Any] = msgspec.json.decode(data)
            if record["format"] != _FORMAT or record["version"] not in _VERSIONS:
                raise ValueError(f"not version {_VERSIONS[-1]} of {_FORMAT}")
            record["shards"] = {entry["name"]: entry["sha256"] for entry in record["shards"]}
            return msgspec.convert(record, cls)
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise FormatError(f"cannot parse the receipt: {error}", file=file) from error


def receipt_file(number: int) -> str:
    """Return the path of a receipt inside a dataset."""
    return f"{REMOVALS}/{number:06d}.json"


def read_receipts(storage: Storage) -> list[Receipt]:
    """Return the receipts of a dataset, oldest first."""
    names = [name for name in storage.list(f"{REMOVALS}/") if name.endswith(".json")]
    return [Receipt.from_bytes(storage.read(name), file=name) for name in names]


def steps_left(storage: Storage, receipt: Receipt) -> str | None:
    """Return what is left to do until no file of the dataset contains the samples; None if nothing."""
    numbers = [int(name[-11:-5]) for name in storage.list(f"{GENERATIONS}/")]
    current = read_head(storage).generation
    records = [read_generation(storage, number)[1] for number in numbers if number <= current]
    touched = [one for one in records if any(shard.name in receipt.shards for shard in one.shards)]
    if any(one.number == current for one in touched):
        return HIDDEN
    stems = {name.partition(".")[0] for name in storage.list()}
    return _COMPACTED if touched or not stems.isdisjoint(receipt.shards) else None


@dataclass(frozen=True, slots=True)
class Trace:
    """Something that should be gone, or a door that is open."""

    file: str
    what: str


@dataclass(frozen=True, slots=True)
class Audit:
    """The result of `audit_removals`."""

    files: int  # files that were searched
    bytes: int
    members: int  # members of tars that were hashed
    traces: tuple[Trace, ...]  # empty if nothing is left

    @property
    def ok(self) -> bool:
        """Whether nothing was found."""
        return not self.traces

    def to_json(self) -> dict[str, Any]:
        """As JSON."""
        found = [{"file": trace.file, "found": trace.what} for trace in self.traces]
        return {"files": self.files, "bytes": self.bytes, "members": self.members, "found": found, "ok": self.ok}


def audit_removals(
    url: str,
    receipts: Sequence[Receipt],
    *,
    names: Sequence[str] = (),
    progress: Callable[[int, int], None] | None = None,
) -> Audit:
    """Search a dataset, and the cache of this machine, for what receipts say is gone.

    `names`: any text of at least three letters that must not occur; receipts contain none. `progress`: called before
    each file with the number of searched files and their total.
    """
    if not receipts and not names:
        raise UsageError("there is nothing to search for", hint="give a receipt, or text with --name")
    short = next((name for name in names if len(name) < _FEWEST_LETTERS), None)
    if short is not None:
        raise UsageError(f"{short!r} is too short to search for", hint="give at least three letters")
    search = _Search(names, receipts)
    storage = open_storage(url)
    places = [(storage, "")]
    cache = RemoteOptions().cache_folder()
    if not isinstance(storage, LocalStorage) and cache is not None and cache.is_dir():
        places.append((open_storage(cache), f"{cache}/"))
    files = [(place, name, prefix) for place, prefix in places for name in _every_file(place)]
    for number, (place, name, prefix) in enumerate(files):
        if progress is not None:
            progress(number, len(files))
        search.file(place, name, f"{prefix}{name}")
    for receipt in receipts:
        search.traces += _open_ends(storage, receipt)
    return Audit(len(files), search.bytes, search.members, tuple(dict.fromkeys(search.traces)))


def _open_ends(storage: Storage, receipt: Receipt) -> Iterator[Trace]:
    """Yield what is left to do: hashes that are not blocked, steps that were not taken."""
    number = len(receipt.hashes.difference(read_blocked(storage)))
    if number:
        yield Trace(BLOCKED, f"{number} of {len(receipt.hashes)} hashes are not blocked")
    if (left := steps_left(storage, receipt)) is not None:
        yield Trace(f"receipt {receipt.number}", left)


def _every_file(storage: Storage) -> list[str]:
    """Return the names of all files, on a local disk also of those that are being written."""
    if not isinstance(storage, LocalStorage):
        return storage.list()
    root = Path(storage.root)
    return sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())


class _Search:
    """Searches files for names and hashes."""

    def __init__(self, names: Sequence[str], receipts: Sequence[Receipt]) -> None:
        self.traces: list[Trace] = []
        self.bytes = self.members = 0
        self._names: dict[bytes, str] = {}
        for name in names:
            # As text, as the JSON of shards escapes it, and as tables store what is not UTF-8.
            stored = encode_name(name)
            for form in (stored.encode(), json.dumps(stored)[1:-1].encode()):
                self._names[form] = f"the name {name!r}"
        self._hashes = {
            digest.encode(): f"the hash of source {digest[:16]}" for receipt in receipts for digest in receipt.hashes
        }
        self._stored = {member.sha256 for receipt in receipts for member in receipt.members}

    def file(self, storage: Storage, name: str, shown: str) -> None:
        """Search one file."""
        records = name == BLOCKED or name.startswith(f"{REMOVALS}/")
        # Rows of the ledger are told apart by their decoded columns; hashes are not in their raw bytes alone.
        terms = self._names if records or name == LEDGER else self._names | self._hashes
        self._find(name.encode(errors="surrogateescape"), terms, shown)
        try:
            size, longest = storage.size(name), max(map(len, terms), default=1)
            tail = head = b""
            for piece in read_pieces(storage, name):
                head, data = head or bytes(piece[:512]), tail + piece
                self._find(data, terms, shown)
                tail = data[-longest + 1 :] if longest > 1 else b""
            self.bytes += size
            if head.startswith(b"PAR1"):
                self._parquet(storage, name, shown, terms)
            elif head[257:262] == b"ustar":
                self._tar(storage, name, shown)
        except StorageError:
            if storage.exists(name):
                raise
            # It was temporary, and has been deleted meanwhile.

    def _tar(self, storage: Storage, name: str, shown: str) -> None:
        view = storage.map(name)
        try:
            for _, members in sample_groups(read_members(view)):
                data = {member: view[member.offset : member.offset + member.size] for member in members}
                self.members += len(members)
                for member, content in data.items():
                    # Silence is encoded to the same bytes for every source.
                    silence = member.suffix == member_suffix(AUDIO) and self._has_other_source(data)
                    if sha256(content) in self._stored and not silence:
                        self.traces.append(Trace(shown, f"the bytes of a removed sample, as member {member.name!r}"))
        except FormatError as error:
            self.traces.append(Trace(shown, f"a tar that cannot be read to its end: {error.message}"))

    def _has_other_source(self, members: Mapping[TarMember, memoryview]) -> bool:
        """Return whether a sample's JSON names the hash of a source that was not removed."""
        for member, content in members.items():
            if member.suffix == "json":
                with contextlib.suppress(ValueError, AttributeError, RecursionError):
                    digest = json.loads(bytes(content)).get("source_sha256")
                    return isinstance(digest, str) and digest.encode() not in self._hashes
        return False

    def _parquet(self, storage: Storage, name: str, shown: str, terms: Mapping[bytes, str]) -> None:
        try:
            table = from_parquet(storage.read(name), file=name)
        except FormatError as error:
            self.traces.append(Trace(shown, f"a table that cannot be read: {error.message}"))
            return
        if name == LEDGER:
            # Here a hash may stand, and only here: in the row of a source that was taken down.
            named = [not is_nameless(row) for row in table.to_pylist()]
            self._columns(table.filter(pa.array(named, pa.bool_())), shown, self._hashes)
        self._columns(table, shown, terms)

    def _columns(self, table: pa.Table, shown: str, terms: Mapping[bytes, str]) -> None:
        for name in table.column_names:
            # The same column as bytes in which every text of it stands, at any depth.
            plain = io.BytesIO()
            pq.write_table(table.select([name]), plain, compression="none", use_dictionary=False)
            self._find(plain.getvalue(), terms, shown, f", in column {name!r}")

    def _find(self, data: bytes, terms: Mapping[bytes, str], shown: str, where: str = "") -> None:
        self.traces += [Trace(shown, what + where) for term, what in terms.items() if term in data]
