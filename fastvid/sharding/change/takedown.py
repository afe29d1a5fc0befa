"""Takes sources down: removes every sample of them and of equal files, refuses their return, and leaves a receipt.

The steps are: write a receipt that says what is removed; add the SHA-256 of the sources to the block list, which every
job reads again when it commits; commit a generation that hides their samples, including samples that a job has added in
the meantime; delete all names from their ledger rows. `compact_shards` and `collect_garbage` then delete the bytes. A
step that is done already is skipped, so running the same command again completes a takedown that was killed.

A receipt, ``removals/000001.json`` and so on, lists the hashes of what was removed, without names. It is written once;
`steps_left` finds the remaining steps from the state of the dataset.

`audit_removals` searches every file, whoever wrote it, for the names and hashes: in its name, its raw bytes, and the
decompressed columns of Parquet files. It also hashes each member of every tar. Hashes are allowed in the block list,
the receipts, and the nameless rows of the ledger.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import PurePosixPath
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from fastvid.errors import FormatError, StorageError, UsageError
from fastvid.format.dataset import Dataset
from fastvid.format.generations import Generation, read_annotations, read_generation, read_head
from fastvid.format.reason import now
from fastvid.format.schema import AUDIO, BLOCKED, GENERATIONS, LEDGER, REMOVALS, from_parquet, member_suffix, read_facts
from fastvid.format.tar import TarMember, read_members, sample_groups
from fastvid.runtime import faults
from fastvid.runtime.arrays import BoolArray
from fastvid.runtime.names import encode_name
from fastvid.runtime.near_names import near_names
from fastvid.runtime.values import as_type, sha256, things
from fastvid.sharding.change.edit import hide_samples, rows_of
from fastvid.sharding.change.repack import pieces_of
from fastvid.sharding.job import ledger
from fastvid.sharding.job.ledger import Row, source_hashes
from fastvid.storage import LocalStorage, RemoteOptions, Storage, open_storage
from fastvid.storage.urls import read_pieces

_FORMAT: Final = "fastvid-removal"
_VERSIONS: Final = (1, 2)  # version 1 also recorded each step
_FEWEST_LETTERS: Final = 3
_FILES: Final = 100  # searched files between two lines of the log
_LOG = logging.getLogger(__name__)

HIDDEN: Final = "no reader sees the samples; `fastvid compact` rewrites their shards"
"""What is left to do after a takedown."""
_COMPACTED: Final = "no current shard contains them; `fastvid gc --yes` deletes the old shards and generations"


@dataclass(frozen=True, slots=True)
class RemovedFile:
    """Bytes that were removed."""

    sha256: str | None  # hex; None for a source that was never hashed
    bytes: int  # of a source: size of its stored samples; of a member of a tar: its size
    samples: int = 1  # number of samples that were made from it


@dataclass(frozen=True, slots=True)
class Receipt:
    """The record of one takedown."""

    number: int
    dataset_id: str
    time: str  # when it began, ISO 8601 in UTC
    reason: str  # as the user gave it
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
        """Parse the result of `to_bytes`. `file`: its name, for messages."""
        try:
            record: dict[str, Any] = msgspec.json.decode(data)
            if record["format"] != _FORMAT or record["version"] not in _VERSIONS:
                raise ValueError(f"not version {_VERSIONS[-1]} of {_FORMAT}")
            record["shards"] = {entry["name"]: entry["sha256"] for entry in record["shards"]}
            return as_type(record, cls)
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
    touched = [one for one in records if any(receipt.shards.get(shard.name) == shard.sha256 for shard in one.shards)]
    if any(one.number == current for one in touched):
        return HIDDEN
    # A deleted shard's name may be given again, to other bytes.
    given_again = {shard.name for one in records for shard in one.shards}
    stems = {name.partition(".")[0] for name in storage.list()} - given_again
    return _COMPACTED if touched or not stems.isdisjoint(receipt.shards) else None


@dataclass(frozen=True, slots=True)
class Trace:
    """A finding of an audit: something that should be gone, or a missing step of the takedown."""

    file: str
    found: str


@dataclass(frozen=True, slots=True)
class Audit:
    """The result of `audit_removals`."""

    files: int  # files that were searched
    bytes: int
    members: int  # members of tars that were hashed
    found: tuple[Trace, ...]  # empty if nothing is left

    @property
    def ok(self) -> bool:
        """Whether nothing was found."""
        return not self.found

    def to_json(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self) | {"ok": self.ok}


def audit_removals(
    url: str,
    receipts: Sequence[Receipt],
    *,
    names: Sequence[str] = (),
) -> Audit:
    """Search a dataset, and this machine's cache, for the hashes and stored bytes that receipts list, and for names.

    `names`: any text of at least three letters that must not occur; receipts contain none.
    """
    if not receipts and not names:
        raise UsageError("there is nothing to search for", hint="give the file of a receipt with --receipt, or --name")
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
        if number % _FILES == 0:
            _LOG.info("%d of %d files", number, len(files))
        search.file(place, name, f"{prefix}{name}")
    for receipt in receipts:
        search.traces += _open_ends(storage, receipt)
    return Audit(len(files), search.bytes, search.members, tuple(dict.fromkeys(search.traces)))


def _open_ends(storage: Storage, receipt: Receipt) -> Iterator[Trace]:
    """Yield what is left to do after a takedown: hashes that are not blocked, steps that were not taken."""
    number = len(receipt.hashes.difference(ledger.read_blocked(storage)))
    if number:
        yield Trace(BLOCKED, f"{number} of {len(receipt.hashes)} hashes are not blocked")
    if (left := steps_left(storage, receipt)) is not None:
        yield Trace(f"receipt {receipt.number}", left)


def _every_file(storage: Storage) -> list[str]:
    """Return the names of all files, on a local disk also of those that are being written."""
    return list(storage.every()) if isinstance(storage, LocalStorage) else storage.list()


class _Search:
    """Searches files for names and hashes."""

    def __init__(self, names: Sequence[str], receipts: Sequence[Receipt]) -> None:
        self.traces: list[Trace] = []
        self.bytes = self.members = 0
        self._names: dict[bytes, str] = {}
        for name in names:
            # Search for the name as tables store it, where `encode_name` escapes bytes that are not UTF-8, and as JSON
            # in shards escapes it.
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
        # Of the ledger, hashes are searched only in decoded rows, because nameless rows may contain them.
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
            # It was a temporary file, which has been deleted since the listing.

    def _tar(self, storage: Storage, name: str, shown: str) -> None:
        view = storage.map(name)
        try:
            for _, members in sample_groups(read_members(view)):
                data = {member: view[member.offset : member.offset + member.size] for member in members}
                self.members += len(members)
                for member, content in data.items():
                    # The same audio in a sample of another source is no trace: silence has the same bytes everywhere.
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
            # A hash is allowed in the row of a source that was taken down: search the other rows only.
            named = [not ledger.is_nameless(row) for row in table.to_pylist()]
            self._columns(table.filter(pa.array(named, pa.bool_())), shown, self._hashes)
        self._columns(table, shown, terms)

    def _columns(self, table: pa.Table, shown: str, terms: Mapping[bytes, str]) -> None:
        for name in table.column_names:
            # Write the column uncompressed: then all its texts, however nested, are in the bytes.
            plain = io.BytesIO()
            pq.write_table(table.select([name]), plain, compression="none", use_dictionary=False)
            self._find(plain.getvalue(), terms, shown, f", in column {name!r}")

    def _find(self, data: bytes, terms: Mapping[bytes, str], shown: str, where: str = "") -> None:
        self.traces += [Trace(shown, what + where) for term, what in terms.items() if term in data]


# The reason may contain names of fewer letters, because they occur by chance in any text.
_NAME_LETTERS: Final = 4


@dataclass(frozen=True, slots=True)
class SourceSelection:
    """Which sources to remove: all that any of these fields names."""

    sources: Sequence[str] = ()
    keys: Sequence[str] = ()  # keys of samples
    where: str | None = None
    hashes: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class TakenDown:
    """The result of `take_down`."""

    receipt: Receipt
    generation: int  # number of the current one
    named: int  # number of sources that the selection names
    copies: int  # number of further sources with equal bytes


@dataclass(frozen=True, slots=True)
class _Target:
    """What is removed: all sources with one of these hashes, and sources without a known hash by their ids."""

    hashes: frozenset[str]
    unhashed: frozenset[str]

    def has(self, source_id: str, digest: str | None) -> bool:
        """Return whether a source is removed."""
        return digest in self.hashes or source_id in self.unhashed

    def mask(self, table: pa.Table, hashes: pa.ChunkedArray) -> BoolArray:
        """Return which rows of the annotations are removed; bool [N]."""
        return np.array([self.has(*pair) for pair in _pairs(table["source_id"], hashes)], dtype=bool)

    def named(self, rows: Iterable[Row]) -> list[Row]:
        """Return the rows of the ledger that name a removed source."""
        return [row for row in rows if self.has(row["source_id"], row["source_sha256"]) and not ledger.is_nameless(row)]


def take_down(storage: Storage, selection: SourceSelection, *, reason: str) -> TakenDown:
    """Remove every sample of some sources and of all sources with equal bytes, and block their return.

    All segments and clips of a file are removed with it; naming a clip names its file. Afterwards no reader sees the
    samples; `compact_shards` and `collect_garbage` delete their bytes and names. A receipt with hashes remains. After
    an interruption, the same call completes the takedown.

    Args:
        storage: The dataset's folder.
        selection: The sources. A hash that the dataset does not know is blocked in advance.
        reason: Why; recorded, so it must not contain the names of the sources.

    Raises:
        UsageError: If a source or key is unknown, nothing is selected, or the reason names a source; nothing is
            changed.
        StorageError: If there is no dataset.
        ConflictError: If other changes kept winning the race to commit.
    """
    if not reason.strip():
        raise UsageError("the reason is empty", hint="say why the sources are removed, without naming them")
    if not (selection.sources or selection.keys or selection.where is not None or selection.hashes):
        raise UsageError("nothing is selected", hint="name --source, --keys, --where or --sha256")
    dataset_id, generation = read_generation(storage)
    table, hashes = read_annotations(storage, generation), source_hashes(storage, generation)
    ledger.keep_ledger(storage, generation)
    digests = {name: digest for name, digest in _pairs(table["source_id"], hashes) if digest is not None}
    rows = _hashed(ledger.read_ledger(storage)[0].to_pylist(), digests)
    chosen, sources = _selected(storage, table, hashes, selection, rows)
    samples = pa.array(chosen)
    named = {(row["source_id"], row["source_sha256"]) for row in sources}
    named |= set(_pairs(table["source_id"].filter(samples), hashes.filter(samples)))
    target = _Target(
        frozenset(selection.hashes).union(digest for _, digest in named if digest is not None),
        frozenset(name for name, digest in named if digest is None),
    )
    mask = target.mask(table, hashes)
    gone = table.select(["key", "source_id"]).append_column("sha256", hashes).filter(pa.array(mask))
    every = {*gone["source_id"].to_pylist(), *(row["source_id"] for row in target.named(rows))}
    _check_reason(reason, every, gone["key"].to_pylist())
    receipt = Receipt(0, dataset_id, now(), reason, **_inventory(storage, generation, gone, mask, target))
    receipt = _written(storage, receipt, is_new=bool(every))
    faults.reach("receipt")
    ledger.block(storage, target.hashes)
    faults.reach("blocked")
    hidden = hide_samples(
        storage,
        lambda generation, table: pa.array(target.mask(table, source_hashes(storage, generation))),
        lambda number: f"take down {things(number, 'sample')}, receipt {receipt.number}",
    )
    faults.reach("hidden")
    _forget(storage, target, digests, receipt.message)
    ids = {name for name, _ in named}
    return TakenDown(receipt, hidden.generation, len(ids), len(every - ids))


def select_keys(storage: Storage, selection: SourceSelection) -> list[str]:
    """Return the keys of the selected samples, for `remove_samples`; samples of equal copies are not included."""
    generation = read_generation(storage)[1]
    table = read_annotations(storage, generation)
    hashes = source_hashes(storage, generation) if selection.hashes else pa.nulls(table.num_rows, pa.string())
    keys: list[str] = table["key"].filter(pa.array(_selected(storage, table, hashes, selection)[0])).to_pylist()
    return keys


def _selected(
    storage: Storage, table: pa.Table, hashes: pa.ChunkedArray, selection: SourceSelection, rows: Sequence[Row] = ()
) -> tuple[BoolArray, list[Row]]:
    """Return which samples a selection names, bool [N], and which of the ledger's rows; without equal copies.

    Raises UsageError for the name of no source.
    """
    ledger.check_hashes(selection.hashes)
    wanted, digests = dict.fromkeys(map(encode_name, selection.sources)), frozenset(selection.hashes)
    known = set[str]()  # all names that were compared, for the hint

    def is_named(*names: str | None) -> bool:
        every = {one for name in names if name for one in (name, ledger.whole_name(name))}
        known.update(every)
        return any(name in wanted for name in every)

    parents = table["parent"].to_pylist() if "parent" in table.column_names else [None] * table.num_rows
    pairs = zip(_pairs(table["source_id"], hashes), parents, strict=True)
    chosen = np.array([is_named(name, parent) | (digest in digests) for (name, digest), parent in pairs], bool)
    named = [row for row in rows if is_named(row["source_id"], row["path"])]
    if unknown := next((name for name in wanted if name not in known), None):
        near = near_names(pa.chunked_array([pa.array(sorted(known), pa.string())]), unknown)
        hint = f"did you mean {', '.join(map(repr, near))}? nothing was changed" if near else "nothing was changed"
        raise UsageError(f"no source is called {unknown!r}", file=storage.url, hint=hint)
    if selection.keys:
        chosen[rows_of(table, pa.array(selection.keys, pa.string()), storage)] = True
    if selection.where is not None:
        # By keys, not by rows: the dataset may have another generation by now.
        chosen |= pc.is_in(table["key"], value_set=Dataset(storage.url, where=selection.where).keys).to_numpy()
    return chosen, named


def _pairs(names: pa.ChunkedArray, hashes: pa.ChunkedArray) -> Iterable[tuple[str, str | None]]:
    return zip(names.to_pylist(), hashes.to_pylist(), strict=True)


def _hashed(rows: Sequence[Row], digests: Mapping[str, str]) -> list[Row]:
    """Return ledger rows with hashes of their sources; missing ones, as of fastvid 0.1, are taken from `digests`."""
    return [row | {"source_sha256": row["source_sha256"] or digests.get(row["source_id"])} for row in rows]


def _written(storage: Storage, receipt: Receipt, *, is_new: bool) -> Receipt:
    """Write a receipt under the next free number and return it; return an existing receipt of the same takedown."""
    known = read_receipts(storage)
    for old in known:
        again = old.hashes == receipt.hashes and not (is_new or receipt.unknown)
        if again or (old.sources, old.members, old.shards) == (receipt.sources, receipt.members, receipt.shards):
            return old
    number = max((old.number for old in known), default=0)
    while True:
        number += 1
        receipt = replace(receipt, number=number)
        if storage.swap(receipt_file(number), receipt.to_bytes(), None):
            return receipt


def _forget(storage: Storage, target: _Target, digests: Mapping[str, str], message: str) -> None:
    def edit(rows: list[Row]) -> list[Row] | None:
        rows = _hashed(rows, digests)
        gone = target.named(rows)
        if not gone:
            return None
        names = {row["source_id"] for row in gone}
        kept = {row["source_id"]: row for row in rows if row["source_id"] not in names}
        number = sum(name.startswith("removed:unknown-") for name in kept)
        for row in gone:
            new = ledger.removed_row(row["source_sha256"], message, number=number)
            number += row["source_sha256"] is None
            kept[new["source_id"]] = new  # replaces the row of an equal copy that was refused before
        return list(kept.values())

    ledger.edit_ledger(storage, edit)


def _check_reason(reason: str, sources: Collection[str], keys: Collection[str]) -> None:
    """Raise UsageError if the reason names what is removed: the dataset keeps the reason for ever."""
    names = {*sources, *keys} | {PurePosixPath(ledger.whole_name(source)).stem for source in sources}
    told = next((name for name in sorted(names) if len(name) >= _NAME_LETTERS and name in reason), None)
    if told is not None:
        raise UsageError(
            f"the reason contains {told!r}, a name of what is removed",
            hint="refer to it by the number of a ticket: the receipt keeps the reason; nothing was changed",
        )


def _inventory(
    storage: Storage, generation: Generation, gone: pa.Table, mask: BoolArray, target: _Target
) -> dict[str, Any]:
    """Return the receipt's fields about the removed sources, members and shards."""
    touched = [piece.shard for piece in pieces_of(storage, generation, mask) if piece.samples]
    members: list[RemovedFile] = []
    sizes: Counter[str] = Counter()
    for shard in touched:
        if shard.is_in_place:
            continue  # a shard of videos in place contains no bytes of them
        facts = read_facts(storage, shard.name, ["key", "member_offset", "member_size"])
        facts = facts.filter(pc.is_in(facts["key"], value_set=gone["key"].combine_chunks()))
        for key, offset, size in zip(*facts.to_pydict().values(), strict=True):
            data = memoryview(bytearray(size))
            storage.read_into(f"{shard.name}.tar", [(offset, data)])
            members.append(RemovedFile(sha256(data), size))
            sizes[key] += size
    samples: Counter[str] = Counter()
    stored: Counter[str] = Counter()
    for key, source, digest in zip(*gone.to_pydict().values(), strict=True):
        # Count sources with equal bytes as one; a source without a hash counts by itself.
        samples[digest or source] += 1
        stored[digest or source] += sizes[key]
    sources = [RemovedFile(digest, stored[digest], samples[digest]) for digest in sorted(target.hashes)]
    sources += [RemovedFile(None, stored[name], samples[name]) for name in sorted(target.unhashed)]
    shards = {shard.name: shard.sha256 for shard in touched}
    return {"sources": tuple(sources), "members": tuple(members), "shards": shards}
