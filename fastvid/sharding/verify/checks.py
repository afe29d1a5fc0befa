"""Checks one shard: its data must be as committed, and its sidecars must match its data.

`check_all` runs checks in parallel processes, each on a part of a shard. The processes decode untrusted files, so they
return their findings as plain data. If a process dies, only its task is affected: it is retried alone, and if its
process dies again, that is reported as a problem.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from fastvid.decode.pyav import PyAvDecoder
from fastvid.errors import FastvidError, FormatError, error_from_json, error_to_json
from fastvid.format.annotations import read_signals
from fastvid.format.generations import ShardRecord
from fastvid.format.in_place import Root, read_files
from fastvid.format.schema import AUDIO, FOREIGN, PACKET_DTYPE, StreamFlag, from_parquet, member_suffix
from fastvid.format.shard import Shard
from fastvid.format.tar import TarMember, read_members, sample_groups, wds2idx
from fastvid.format.writing import IndexedSample, IndexedStream, facts_parquet, index_sample, pack_index
from fastvid.media.checks import Finding, Indexed, check_packets, check_sample
from fastvid.media.describe import KEEP
from fastvid.media.ffmpeg import Limits
from fastvid.media.file_tables import FileReader
from fastvid.media.index_video import check_index
from fastvid.media.prove import index_video
from fastvid.runtime import faults
from fastvid.runtime.arrays import RecordArray
from fastvid.runtime.processes import pack
from fastvid.runtime.values import as_type, sha256
from fastvid.sharding.encode.audio import count_samples
from fastvid.sharding.engines.local import Child, Parent
from fastvid.storage import open_storage
from fastvid.storage.urls import open_file

# Fields of a packet's record that are read from the container and from headers: all but the checksum.
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
    files: bool = False  # whether to check the shard's files, and the index rows and packets of all samples
    alone: bool = False  # whether to check the index rows and packets of the samples in `rows` only
    root: Root | None = None


@dataclass(slots=True)
class Findings:
    """The findings of a task."""

    problems: list[Problem] = field(default_factory=list)
    checked: Counter[str] = field(default_factory=Counter)
    # key, source id and number of frames of each sample that was indexed from the tar, by its row.
    facts: dict[int, tuple[str, str, int]] = field(default_factory=dict)
    samples: int = 0  # number of decoded samples


class ShardAudit:
    """Checks the shard of one task, which fastvid wrote; subclasses check other kinds of shards."""

    def __init__(self, task: ShardTask) -> None:
        self.task, self.stem = task, task.record.name
        self.storage = open_storage(task.url)
        self.findings = Findings()

    def note(self, check: str, message: str, key: str = "", stream: str = "") -> None:
        """Add a problem."""
        self.findings.problems.append(Problem(check, message, self.stem, key, stream))

    @contextmanager
    def noting(self, check: str, key: str = "", stream: str = "") -> Iterator[None]:
        """If the block raises an error of fastvid, add it as a problem of a check."""
        try:
            yield
        except FastvidError as error:
            self.note(check, error.message, key, stream)

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
        groups, task = sample_groups(members), self.task
        if len(groups) != task.record.samples:
            self.note("tar", f"tar contains {len(groups)} samples, the generation says {task.record.samples}")
        shard = self.sidecar(len(groups))
        rows = [row for row in task.rows if row < len(groups)]
        if task.files:
            self.tar_index(members)
            self._compare_facts([self._index(view, *groups[row], shard, row) for row in range(len(groups))])
        elif task.alone:
            for row in rows:
                self._index(view, *groups[row], shard, row)
        decoder = PyAvDecoder()
        for row in rows:
            self._decode(view, *groups[row], shard, row, decoder)

    def sidecar(self, samples: int) -> Shard | None:
        """Return the packet sidecar, or None if it is unusable."""
        self.findings.checked["pkt"] += self.task.files or self.task.alone
        task, streams = self.task, len(self.task.streams)
        with self.noting("pkt"):
            shard = Shard(self.storage, self.stem, task.record.sha256, streams=task.streams, root=task.root)
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

    def signals(self) -> None:
        """Compare the signals with their checksum, and count their rows."""
        self.findings.checked["signals"] += 1
        with self.noting("signals"):
            name = f"{self.stem}.parquet"
            facts = from_parquet(self.storage.read(name), file=name, columns=["stream", "num_frames"])
            frames = facts.filter(pc.equal(facts["stream"], self.task.streams[0]))["num_frames"]
            read_signals(self.storage, self.task.record, pc.sum(frames).as_py())

    def tar_index(self, members: list[TarMember]) -> None:
        """Compare `.idx` with the tar."""
        self.findings.checked["idx"] += 1
        with self.noting("idx"):
            found, expected = bytes(self.storage.read(f"{self.stem}.idx")).splitlines(), wds2idx(members).splitlines()
            if found != expected:
                pairs = enumerate(zip(found, expected, strict=False), start=1)
                line = next((n for n, (a, b) in pairs if a != b), min(len(found), len(expected)) + 1)
                self.note("idx", f"tar index differs from the tar at line {line}")

    def _index(
        self, view: memoryview, key: str, members: list[TarMember], shard: Shard | None, row: int
    ) -> IndexedSample | None:
        """Index a sample of the tar again, compare it with the index row, and return it; None if that is impossible."""
        self.findings.checked["index"] += 1
        self.findings.checked["packets"] += shard is not None
        try:
            again = index_sample(view, key, members, self.task.streams)
        except FastvidError as error:
            self.note("index", f"sample cannot be indexed: {error.message}", key)
            return None
        self.findings.facts[row] = (key, str(again.meta.get("source_id")), again.streams[0].info.num_frames)
        if shard is not None:
            for stream in again.streams:
                self.note_all(_compare(view, stream, shard, row), key, stream.name)
        return again

    def _compare_facts(self, samples: Sequence[IndexedSample | None]) -> None:
        """Compare `.parquet` with the samples of the tar."""
        self.findings.checked["parquet"] += 1
        fresh = [sample for sample in samples if sample is not None]
        if len(fresh) < len(samples):
            self.note("parquet", "facts cannot be compared: a sample of the tar cannot be indexed")
            return
        rows = pack_index(fresh, self.task.streams, bytes(32).hex())[1]
        found, expected = self.facts(), from_parquet(facts_parquet(fresh, rows), file=self.stem)
        if found is None:
            return
        if found.num_rows != expected.num_rows:
            self.note("parquet", f"facts have {found.num_rows} rows, the tar {expected.num_rows}")
            return
        for column in expected.column_names:
            if column not in found.column_names:
                # A dataset without audio and flow may lack the columns that they added to the format later.
                if expected[column].null_count < expected.num_rows:
                    self.note("parquet", f"facts lack the column {column!r}")
            elif not found[column].equals(expected[column]):
                pairs = enumerate(zip(found[column].to_pylist(), expected[column].to_pylist(), strict=True))
                row, (a, b) = next((row, pair) for row, pair in pairs if pair[0] != pair[1])
                self.note(
                    "parquet", f"{column} is {_short(a)}, but {_short(b)} in the tar", expected["key"][row].as_py()
                )

    def _decode(
        self, view: memoryview, key: str, members: list[TarMember], shard: Shard | None, row: int, decoder: PyAvDecoder
    ) -> None:
        """Decode the streams of a sample."""
        by_suffix = {member.suffix: view[member.offset : member.offset + member.size] for member in members}
        if (sound := by_suffix.get(member_suffix(AUDIO))) is not None:
            self.findings.checked["audio"] += 1
            with self.noting("audio", key, "audio"):
                if not count_samples(sound):
                    self.note("audio", "no audio sample decodes", key, "audio")
        for stream in self.task.streams:
            data = by_suffix.get(member_suffix(stream))
            if data is None:
                continue  # reported by the index check
            found = index_row(shard, row, stream) if shard is not None else ""
            indexed = None if isinstance(found, str) else found  # a problem is reported by the index check
            self.note_all(check_sample(key, stream, data, indexed, decoder), key, stream)
            self.findings.checked["decode"] += 1
            if indexed is not None:
                self.findings.checked["plan"] += 1
                if indexed.info.flags & StreamFlag.CONFORMS:
                    self.findings.checked.update(("timing", "shape", "colour"))
        self.findings.samples += 1


def index_row(shard: Shard, row: int, stream: str) -> Indexed | str:
    """Return a stream's info and packets from the sidecar; if it is broken, return the problem as text."""
    try:
        return Indexed(shard.info(row, stream), shard.table(row, stream))
    except FastvidError as error:
        return error.message


def _compare(view: memoryview, fresh: IndexedStream, shard: Shard, row: int) -> Iterator[Finding]:
    """Compare a stream's index row with the tar."""
    stored = index_row(shard, row, fresh.name)
    if isinstance(stored, str):
        yield "index", f"index row is broken: {stored}"
        return
    for name in type(fresh.info).__dataclass_fields__:
        old, new = getattr(stored.info, name), getattr(fresh.info, name)
        if old != new:
            yield "index", f"{name} is {_short(old)}, but {_short(new)} in the tar"
    for message in _packet_differences(stored.table.records, fresh.records):
        yield "index", message
    member, place = fresh.member, shard.member(row, fresh.name)
    if place != (member.offset, member.size):
        yield "index", f"member is indexed at {place[0]}+{place[1]}, but is at {member.offset}+{member.size}"
    yield from _packets(view[member.offset : member.offset + member.size], stored)


def _packets(data: memoryview, indexed: Indexed) -> Iterator[Finding]:
    return check_packets(lambda at, size: data[at : at + size], indexed.table.records)


def _packet_differences(stored: RecordArray, fresh: RecordArray) -> Iterator[str]:
    if len(stored) != len(fresh):
        yield f"{len(stored)} packets are indexed, the tar contains {len(fresh)}"
        return
    differs: npt.NDArray[np.bool_] = stored[_STRUCTURE] != fresh[_STRUCTURE]
    if differs.any():
        packet = int(np.argmax(differs))
        old, new = stored[packet], fresh[packet]
        fields = ", ".join(f"{name} {old[name]} for {new[name]}" for name in _STRUCTURE if old[name] != new[name])
        yield f"{int(differs.sum())} packets are indexed wrongly; packet {packet} with {fields}"


def _short(value: Any) -> str:
    text = repr(value) if isinstance(value, str | bytes) else str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


class _StoredAudit(ShardAudit):
    """Checks a shard whose videos fastvid did not write: the samples are listed in its facts, not in its tar."""

    def chosen(self, entries: int) -> Iterator[tuple[Shard, Mapping[str, Any], Indexed, int, str]]:
        """Yield sidecar, facts, index row, row and stream, for each stream of the task's samples that can be read.

        `entries`: required number of rows of the facts: one for each stream of each sample.
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
    """Checks a tar of another tool: indexing its videos again must reproduce the sidecar."""

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
        with self.noting("decode", key, stream):
            found = index_video(data, Limits(), hdr=KEEP)
            if found.info != stored.info or not np.array_equal(found.records, stored.table.records):
                # It may not be damage: an earlier version of fastvid stored less.
                self.note("index", "indexing the video again gives a different index; run `fastvid index`", key, stream)
            if found.info.flags & StreamFlag.WHOLE and not stored.info.flags & StreamFlag.WHOLE:
                self.note("plan", "a part of the stream cannot be decoded on its own", key, stream)


class _InPlaceAudit(_StoredAudit):
    """Checks videos in place: their list must be as committed, and their index must lead to the frames of a player."""

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
        with self.noting("decode", key, stream):
            assert shard.root is not None
            file = FileReader(*open_file(shard.root.locate(listed.file)), listed.version)
            self.note_all(check_index(file, stored.info, stored.table.records, Limits()), key, stream)


def check(task: ShardTask) -> Findings:
    """Run a task; all problems are in the findings."""
    is_foreign = task.record.profile.get("name") == FOREIGN
    audit = (_InPlaceAudit if task.record.is_in_place else _ForeignAudit if is_foreign else ShardAudit)(task)
    if task.files and task.record.signals:
        audit.signals()
    return audit.run()


_MODULE: Final = "fastvid.sharding.verify.checks"


def check_all(tasks: Iterable[ShardTask], workers: int, known: Container[str]) -> Iterator[tuple[ShardTask, Findings]]:
    """Run tasks in processes; yield each task with its findings, in any order. `known`: the names of checks."""
    mine, processes, lost = threading.local(), list[Child](), list[ShardTask]()

    def ask(task: ShardTask) -> Findings | None:
        """Return the findings of a task from the process of this thread; None if the process died."""
        if not hasattr(mine, "child"):
            mine.child = Child(_MODULE)
            processes.append(mine.child)
        mine.child.send(asdict(task))
        try:
            while not (answers := [header for header, _ in mine.child.receive()]):
                continue
            if len(answers) > 1:
                raise FormatError("the process replied to a task it was not given")
            found = _findings(answers[0], known)
        except (EOFError, FormatError):
            del mine.child
            return None
        if isinstance(found, Exception):
            raise found
        return found

    threads = ThreadPoolExecutor(workers, thread_name_prefix="verify")
    try:
        asked = {threads.submit(ask, task): task for task in tasks}
        for answer in as_completed(asked):
            if (findings := answer.result()) is None:
                lost.append(asked[answer])
            else:
                yield asked[answer], findings
        for task in lost:
            where = f"rows {task.rows[0]} to {task.rows[-1]}" if task.rows else "files"
            problem = Problem("process", f"the process that checked {where} died", task.record.name)
            yield task, threads.submit(ask, task).result() or Findings([problem])
    finally:
        threads.shutdown(wait=False, cancel_futures=True)
        for child in processes:
            child.stop()  # ends the tasks in flight
        threads.shutdown()
        for child in processes:
            child.kill()


def _findings(header: Mapping[str, Any], known: Container[str]) -> Findings | Exception:
    """Return the findings of a message after checking them, or the exception that the check raised."""
    try:
        if "error" in header:
            return error_from_json(header["error"])
        found = as_type(header, Findings, strict=False, dec_hook=_counter)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FormatError(f"cannot parse findings: {error!r}") from error
    if any(problem.check not in known for problem in found.problems):
        raise FormatError(f"findings name an unknown check: {found.problems}")
    return found


def _counter(_: type, value: Any) -> Counter[str]:
    return Counter(as_type(value, dict[str, int]))


def main() -> None:
    """Run the tasks of the process that started this one, until it closes the connection."""
    parent = Parent()
    while True:
        task = as_type(parent.messages.get(), ShardTask)
        faults.reach(f"check {task.record.name}")
        try:
            answer = msgspec.to_builtins(check(task), str_keys=True)
        except Exception as error:  # noqa: BLE001 - the parent handles it
            answer = {"error": error_to_json(error)}
        parent.send(pack(answer))


if __name__ == "__main__":
    main()
