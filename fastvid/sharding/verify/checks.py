"""Checks one shard: its data must be the committed ones, and its sidecars must match them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from tarfile import BLOCKSIZE
from typing import Any, Final, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from fastvid.decode.pyav import PyAvDecoder
from fastvid.errors import FastvidError, SourceError
from fastvid.format.generations import ShardRecord
from fastvid.format.in_place import Root, read_files
from fastvid.format.packets import PacketTable
from fastvid.format.schema import AUDIO, FOREIGN, PACKET_DTYPE, StreamFlag, from_parquet, member_suffix
from fastvid.format.shard import Shard, index_shard
from fastvid.format.tar import TarMember, read_members, wds2idx
from fastvid.media.checks import Finding, Indexed, check_packets, check_sample
from fastvid.media.describe import KEEP
from fastvid.media.ffmpeg import Limits
from fastvid.media.file_tables import FileReader
from fastvid.media.index_video import check_index
from fastvid.media.prove import index_video
from fastvid.runtime.values import sha256
from fastvid.sharding.encode.audio import count_samples
from fastvid.storage import Storage, open_storage
from fastvid.storage.urls import open_file

# Packet fields that are read from the container and the headers; the checksum is computed from the bytes.
_STRUCTURE: Final = [name for name in PACKET_DTYPE.names or () if name != "crc32"]


class Problem(NamedTuple):
    """A broken promise."""

    check: str
    message: str
    shard: str = ""
    key: str = ""
    stream: str = ""


@dataclass(frozen=True, slots=True)
class ShardTask:
    """Work for one process."""

    url: str
    record: ShardRecord
    streams: tuple[str, ...]
    rows: tuple[int, ...]  # rows of the samples to decode
    files: bool = False  # whether to compare the shard's files, including the index rows and packets of all samples
    alone: bool = False  # whether to compare the index rows and packets of `rows` only
    root: Root | None = None


@dataclass(slots=True)
class Findings:
    """The findings of a task."""

    problems: list[Problem] = field(default_factory=list)
    checked: Counter[str] = field(default_factory=Counter)
    # key, source id and number of frames of the samples indexed from the tar, by row.
    facts: dict[int, tuple[str, str, int]] = field(default_factory=dict)
    samples: int = 0  # number of decoded samples


class ShardAudit:
    """Checks the shard of one task: one that fastvid wrote."""

    def __init__(self, task: ShardTask) -> None:
        self.task, self.stem = task, task.record.name
        self.storage = open_storage(task.url)
        self.findings = Findings()

    def note(self, check: str, message: str, key: str = "", stream: str = "") -> None:
        """Add a problem."""
        self.findings.problems.append(Problem(check, message, self.stem, key, stream))

    @contextmanager
    def noting(self, check: str, why: str = "", key: str = "", stream: str = "") -> Iterator[None]:
        """Add an error that the block raises as a problem of a check."""
        try:
            yield
        except FastvidError as error:
            self.note(check, why + error.message, key, stream)

    def note_all(self, findings: Iterable[Finding], key: str, stream: str) -> None:
        """Add the problems of a stream."""
        for check, message in findings:
            self.note(check, message, key, stream)

    def run(self) -> Findings:
        """Return the findings; raises only if the storage cannot be opened."""
        task, record = self.task, self.task.record
        # Each check catches its own errors; the remaining ones mean that the tar cannot be read.
        with self.noting("tar"):
            view = self.storage.map(f"{self.stem}.tar")
            self.findings.checked["tar"] += task.files
            if len(view) != record.bytes:
                self.note("tar", f"tar has {len(view)} bytes, the generation says {record.bytes}")
            elif task.files and sha256(view) != record.sha256:
                self.note("tar", "tar differs from its SHA-256")
            self.look(view)
        return self.findings

    def look(self, view: memoryview) -> None:
        """Check the contents of the tar."""
        members = list(read_members(view))
        groups = [(key, list(group)) for key, group in groupby(members, key=lambda member: member.key)]
        if len(groups) != self.task.record.samples:
            self.note("tar", f"tar contains {len(groups)} samples, the generation says {self.task.record.samples}")
        shard = self.sidecar(len(groups))
        if self.task.files:
            self.tar_index(members)
            self._index(view, groups, shard, range(len(groups)))
        elif self.task.alone:
            self._index(view, groups, shard, [row for row in self.task.rows if row < len(groups)])
        self._samples(view, groups, shard)

    def sidecar(self, samples: int) -> Shard | None:
        """Return the packet sidecar, or None if it is unusable."""
        self.findings.checked["pkt"] += self.task.files or self.task.alone
        task, streams = self.task, len(self.task.streams)
        with self.noting("pkt"):
            shard = Shard(self.storage, self.stem, task.record.sha256, streams=tuple(task.streams), root=task.root)
            shard.check()
            if (shard.num_samples, shard.num_streams) == (samples, streams):
                return shard
            found = f"{shard.num_samples} samples with {shard.num_streams} streams"
            self.note("pkt", f"sidecar contains {found}, the tar {samples} with {streams}")
        return None

    def facts(self) -> pa.Table | None:
        """Return the facts, or None if they cannot be read."""
        name, found = f"{self.stem}.parquet", list[pa.Table]()
        with self.noting("parquet"):
            found.append(from_parquet(self.storage.read(name), file=name))
        return next(iter(found), None)

    def tar_index(self, members: list[TarMember]) -> None:
        """Compare `.idx` with the tar."""
        self.findings.checked["idx"] += 1
        with self.noting("idx"):
            found, expected = bytes(self.storage.read(f"{self.stem}.idx")).splitlines(), wds2idx(members).splitlines()
            if found != expected:
                pairs = enumerate(zip(found, expected, strict=False), start=1)
                line = next((n for n, (a, b) in pairs if a != b), min(len(found), len(expected)) + 1)
                self.note("idx", f"tar index differs from the tar at line {line}")

    def _compare_facts(self, expected: pa.Table) -> None:
        """Compare `.parquet` with the tar."""
        found = self.facts()
        if found is None:
            return
        if found.num_rows != expected.num_rows:
            self.note("parquet", f"facts have {found.num_rows} rows, the tar {expected.num_rows}")
            return
        for column in expected.column_names:
            if column not in found.column_names:
                # A dataset of pictures only may lack the columns that audio and flow added to the format.
                if expected[column].null_count < expected.num_rows:
                    self.note("parquet", f"facts lack the column {column!r}")
            elif not found[column].equals(expected[column]):
                pairs = enumerate(zip(found[column].to_pylist(), expected[column].to_pylist(), strict=True))
                row, (a, b) = next((row, pair) for row, pair in pairs if pair[0] != pair[1])
                self.note(
                    "parquet", f"{column} is {_short(a)}, but {_short(b)} in the tar", expected["key"][row].as_py()
                )

    def _index(
        self, view: memoryview, groups: list[tuple[str, list[TarMember]]], shard: Shard | None, rows: Iterable[int]
    ) -> None:
        """Recompute index rows from the tar and compare them."""
        fresh: tuple[Shard, pa.Table] | None = None
        if self.task.files:
            self.findings.checked["parquet"] += 1
            try:
                fresh = self._recompute(view)
                self._compare_facts(fresh[1])
            except FastvidError:
                # One broken sample prevents indexing of the whole shard; below, each sample is indexed alone.
                self.note("parquet", "facts cannot be compared: a sample of the tar cannot be indexed")
        for row in rows:
            key, members = groups[row]
            self.findings.checked["index"] += 1
            self.findings.checked["packets"] += shard is not None
            try:
                again, facts = fresh or self._recompute(_piece(view, groups, row))
            except FastvidError as error:
                self.note("index", f"sample cannot be indexed: {error.message}", key)
                continue
            at = row if fresh else 0
            fact = at * len(self.task.streams)
            self.findings.facts[row] = (key, facts["source_id"][fact].as_py(), facts["num_frames"][fact].as_py())
            if shard is not None:
                for stream in self.task.streams:
                    member = next(member for member in members if member.suffix == member_suffix(stream))
                    self.note_all(_compare(view, member, (shard, row), (again, at), stream), key, stream)

    def _recompute(self, view: memoryview) -> tuple[Shard, pa.Table]:
        """Compute the index and the facts of a tar."""
        scratch = _TarStorage(view)
        index_shard(cast(Storage, scratch), self.stem, streams=self.task.streams)
        name = f"{self.stem}.parquet"
        facts = from_parquet(scratch.written[name], file=name)
        return Shard(cast(Storage, scratch), self.stem, streams=tuple(self.task.streams)), facts

    def _audio(self, data: memoryview) -> Iterator[Finding]:
        """Decode the audio of a sample."""
        self.findings.checked["audio"] += 1
        try:
            if not count_samples(data):
                yield "audio", "no audio sample decodes"
        except SourceError as error:
            yield "audio", error.message

    def _samples(self, view: memoryview, groups: list[tuple[str, list[TarMember]]], shard: Shard | None) -> None:
        decoder = PyAvDecoder()
        for row in self.task.rows:
            if row >= len(groups):
                continue
            key, members = groups[row]
            by_suffix = {member.suffix: member for member in members}
            if (sound := by_suffix.get(member_suffix(AUDIO))) is not None:
                self.note_all(self._audio(view[sound.offset : sound.offset + sound.size]), key, "audio")
            for stream in self.task.streams:
                member = by_suffix.get(member_suffix(stream))
                if member is None:
                    continue  # reported by the index check
                found = index_row(shard, row, stream) if shard is not None else ""
                indexed = None if isinstance(found, str) else found  # a problem is reported by the index check
                data = view[member.offset : member.offset + member.size]
                self.note_all(check_sample(key, stream, data, indexed, decoder), key, stream)
                self.findings.checked["decode"] += 1
                if indexed is not None:
                    self.findings.checked["plan"] += 1
                    if indexed.info.flags & StreamFlag.CONFORMS:
                        self.findings.checked.update(("timing", "shape", "colour"))
            self.findings.samples += 1


class _TarStorage:
    """A storage with one tar; files written to it are in `written`."""

    copies = True

    def __init__(self, tar: memoryview) -> None:
        self.written: dict[str, bytes] = {}
        self._tar = tar

    def map(self, name: str) -> memoryview:
        return self._tar if name.endswith(".tar") else memoryview(self.written[name])

    def write(self, name: str, data: bytes) -> None:
        self.written[name] = data

    def keep(self, name: str) -> bool:  # noqa: ARG002
        return False

    def discard(self, name: str) -> bool:  # noqa: ARG002
        return False


def _piece(view: memoryview, groups: list[tuple[str, list[TarMember]]], row: int) -> memoryview:
    """Return one sample of a tar as a separate tar, including long names."""
    start = _end(groups[row - 1][1][-1]) if row else 0
    return memoryview(bytes(view[start : _end(groups[row][1][-1])]) + bytes(2 * BLOCKSIZE))


def index_row(shard: Shard, row: int, stream: str) -> Indexed | str:
    """Return a stream's index row, or its problem."""
    try:
        return Indexed(shard.info(row, stream), shard.table(row, stream))
    except FastvidError as error:
        return error.message


def _compare(
    view: memoryview, member: TarMember, stored: tuple[Shard, int], expected: tuple[Shard, int], stream: str
) -> Iterator[Finding]:
    """Compare a stream's index row with the tar."""
    old, new = index_row(*stored, stream), index_row(*expected, stream)
    if isinstance(old, str) or isinstance(new, str):
        yield "index", f"index row is broken: {old if isinstance(old, str) else new}"
        return
    for message in _differences(old, new):
        yield "index", message
    place = stored[0].member(stored[1], stream)
    if place != (member.offset, member.size):
        yield "index", f"member is indexed at {place[0]}+{place[1]}, but is at {member.offset}+{member.size}"
    yield from _packets(view[member.offset : member.offset + member.size], old)


def _packets(data: memoryview, indexed: Indexed) -> Iterator[Finding]:
    return check_packets(lambda at, size: data[at : at + size], indexed.table.records)


def _differences(stored: Indexed, expected: Indexed) -> Iterator[str]:
    for name in type(stored.info).__dataclass_fields__:
        old, new = getattr(stored.info, name), getattr(expected.info, name)
        if old != new:
            yield f"{name} is {_short(old)}, but {_short(new)} in the tar"
    yield from _packet_differences(stored.table, expected.table)


def _packet_differences(table: PacketTable, fresh: PacketTable) -> Iterator[str]:
    if len(table) != len(fresh):
        yield f"{len(table)} packets are indexed, the tar contains {len(fresh)}"
        return
    differs: npt.NDArray[np.bool_] = table.records[_STRUCTURE] != fresh.records[_STRUCTURE]
    if differs.any():
        packet = int(np.argmax(differs))
        old, new = table.records[packet], fresh.records[packet]
        fields = ", ".join(f"{name} {old[name]} for {new[name]}" for name in _STRUCTURE if old[name] != new[name])
        yield f"{int(differs.sum())} packets are indexed wrongly; packet {packet} with {fields}"


def _end(member: TarMember) -> int:
    """Return the offset of the next header."""
    return member.offset + -(-member.size // BLOCKSIZE) * BLOCKSIZE


def _short(value: Any) -> str:
    text = repr(value) if isinstance(value, str | bytes) else str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


class _StoredAudit(ShardAudit):
    """Checks a shard whose samples fastvid did not write, so that its facts say which they are."""

    def chosen(self, entries: int) -> Iterator[tuple[Shard, Mapping[str, Any], Indexed, int, str]]:
        """Yield sidecar, facts, index row, row and stream of what the task names, if all of them can be read.

        `entries`: how many rows the facts must have, those of all streams of all samples.
        """
        shard, facts, streams = self.sidecar(self.task.record.samples), self.facts(), self.task.streams
        self.findings.checked["parquet"] += self.task.files or self.task.alone
        if facts is not None and facts.num_rows != entries:
            self.note("parquet", f"facts have {facts.num_rows} rows, the generation {entries}")
        if shard is None or facts is None or facts.num_rows != entries:
            return
        rows = facts.to_pylist()
        for row in self.task.rows:
            for place, stream in enumerate(streams):
                fact = rows[row * len(streams) + place]
                self.findings.facts.setdefault(row, (fact["key"], fact["source_id"], fact["num_frames"]))
                self.findings.samples += not place
                self.findings.checked.update(("index", "decode", "plan"))
                stored = index_row(shard, row, stream)
                if isinstance(stored, str):
                    self.note("index", f"index row is broken: {stored}", fact["key"], stream)
                else:
                    yield shard, fact, stored, row, stream


class _ForeignAudit(_StoredAudit):
    """A tar of another tool: indexing its videos again must reproduce the sidecar."""

    def look(self, view: memoryview) -> None:
        """Check the contents of the tar."""
        if self.task.files:
            self.tar_index(list(read_members(view)))
        for shard, fact, stored, row, stream in self.chosen(self.task.record.samples):
            self.findings.checked["packets"] += 1
            key, (offset, size), info = fact["key"], shard.member(row), stored.info
            if (fact["member_offset"], fact["member_size"], fact["num_frames"]) != (offset, size, info.num_frames):
                self.note("parquet", "facts and index row differ", key, stream)
            data = view[offset : offset + size]
            broken = list(_packets(data, stored))
            self.note_all(broken, key, stream)
            if not broken:
                self._again(bytes(data), stored, key, stream)

    def _again(self, data: bytes, stored: Indexed, key: str, stream: str) -> None:
        with self.noting("decode", "", key, stream):
            found = index_video(data, Limits(), hdr=KEEP)
            if found.info != stored.info or not np.array_equal(found.records, stored.table.records):
                self.note("index", "indexing the video again gives a different index", key, stream)
            if found.info.flags & StreamFlag.WHOLE and not stored.info.flags & StreamFlag.WHOLE:
                self.note("plan", "a part of the stream cannot be decoded on its own", key, stream)


class _InPlaceAudit(_StoredAudit):
    """Videos in place: their list must be the committed one, and their index must lead to the same frames."""

    def run(self) -> Findings:
        """Return the findings; raises only if the storage cannot be opened."""
        record, entries = self.task.record, self.task.record.samples * len(self.task.streams)
        with self.noting("files"):
            listed = self.storage.read(record.data)
            self.findings.checked["files"] += self.task.files
            if len(listed) != record.bytes or sha256(listed) != record.sha256:
                self.note("files", "list of files differs from its SHA-256")
            elif (files := len(read_files(listed, file=record.data))) != entries:
                self.note("files", f"list has {files} files for {record.samples} samples")
            else:
                for shard, fact, stored, row, stream in self.chosen(entries):
                    self._file(shard, fact, stored, row, stream)
        return self.findings

    def _file(self, shard: Shard, fact: Mapping[str, Any], stored: Indexed, row: int, stream: str) -> None:
        listed, key = shard.file(row, stream), fact["key"]
        if (listed.key, listed.stream, stored.info.num_frames) != (key, stream, fact["num_frames"]):
            self.note("parquet", "facts, list and index row differ", key, stream)
            return
        with self.noting("decode", "", key, stream):
            assert shard.root is not None
            file = FileReader(*open_file(shard.root.locate(listed.file)), listed.version)
            self.note_all(check_index(file, stored.info, stored.table.records, Limits()), key, stream)


def check(task: ShardTask) -> Findings:
    """Run a task; all problems are in the findings."""
    if task.record.is_in_place:
        return _InPlaceAudit(task).run()
    return (_ForeignAudit if task.record.profile.get("name") == FOREIGN else ShardAudit)(task).run()
