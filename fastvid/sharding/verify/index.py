"""Makes a dataset of tars that other tools wrote, without touching their bytes; and rebuilds sidecars of any dataset.

Each video is indexed and proved in a process that may die (`fastvid.media.prove`); what cannot be indexed gets a row
in the ledger. The dataset appears with its last write, as with every job.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from fastvid.errors import FormatError, JobError, StorageError, UsageError
from fastvid.format.dataset import annotation_table
from fastvid.format.generations import Generation, ShardRecord, commit_generation, read_annotations, read_generation
from fastvid.format.indexed import IndexedSample, IndexedStream
from fastvid.format.parquet import from_parquet
from fastvid.format.schema import DATASET_JSON, LEDGER, shard_stem
from fastvid.format.shard import index_shard
from fastvid.format.tar import TarMember
from fastvid.media.ffmpeg import find_ffmpeg
from fastvid.media.limits import Limits
from fastvid.media.reasons import Reason
from fastvid.runtime.hashing import sha256
from fastvid.runtime.progress import Progress
from fastvid.sharding.encode.profiles import get_profile
from fastvid.sharding.engines.engine import Engine
from fastvid.sharding.engines.local_engine import LocalEngine
from fastvid.sharding.job.identity import digest
from fastvid.sharding.job.job import MAX_SECONDS, JobReport
from fastvid.sharding.job.ledger import Row, ledger_row, write_ledger
from fastvid.sharding.sources.sources import Source, encode_name
from fastvid.sharding.sources.tars import TarSample, find_tars, missing_video, read_tar, sample_keys
from fastvid.sharding.verify.check_foreign import FOREIGN
from fastvid.sharding.work.index_source import unpack_found
from fastvid.sharding.work.messages import Outcome, Settings, Task
from fastvid.storage import LocalStorage, Storage, open_storage

_ID_DIGITS: Final = 32
# A video that was too slow among others gets this much more time when it is tried alone.
_PATIENCE: Final = 4.0


@dataclass(frozen=True, slots=True)
class _Tar:
    """A tar to index: the stem of its sidecars, where it lies, and its samples; or why it has none."""

    stem: str
    path: str
    samples: Sequence[TarSample] = ()
    problem: str = ""


def index_tars(
    sources: Sequence[str],
    out: str | None = None,
    *,
    class_names: Sequence[str] = (),
    workers: int | None = None,
    limits: Limits | None = None,
) -> JobReport:
    """Makes a dataset of tars that other tools wrote; what ``fastvid index`` does.

    Args:
        sources: Tars, or folders of tars.
        out: Folder of the dataset: the tars are linked into it as ``data-000000.tar`` and so on. By default the dataset
            is made where the tars lie, and they keep their names.
        class_names: Names for integer labels.
        workers: Processes; by default one for each core.
        limits: What one video may cost.

    Raises:
        UsageError: There is no tar, there is a dataset already, or a file of another tool would be overwritten.
        JobError: Not one video could be indexed.
        StorageError: The folder cannot be written.
        WorkerError: Workers cannot be started.
    """
    paths = find_tars(sources)
    storage = open_storage(out if out is not None else _common_folder(paths))
    if not isinstance(storage, LocalStorage):
        raise UsageError("tars are indexed on a local disk", file=storage.url)
    if storage.exists(DATASET_JSON):
        raise UsageError("there is a dataset already", file=storage.url, hint="`fastvid index` of it alone rebuilds it")
    tars = []
    for number, path in enumerate(paths):
        stem = os.path.basename(path).removesuffix(".tar") if out is None else shard_stem(number)
        if out is None:
            _check_sidecar(storage, stem)
        else:
            _link(path, storage, stem)
        tars.append(_open_tar(storage, stem, path))
    with contextlib.closing(_engine(workers, limits)) as engine:
        work = _Work(storage, tars, engine)
        records = [record for tar in tars if (record := work.index(tar)) is not None]
        work.progress.finish()
    identity = {"tars": [[record.name, record.bytes, record.sha256] for record in records], "profile": FOREIGN}
    ledger = write_ledger(storage, work.rows, identity)
    if not records:
        reasons = ", ".join(f"{count} {name}" for name, count in Counter(ledger["reason"].to_pylist()).most_common())
        raise JobError(f"not one video could be indexed: {reasons}", file=storage.url, hint=f"{LEDGER} says why")
    classes = _set_labels(work.annotations, class_names)
    generation = Generation(1, tuple(records), ("rgb",), classes, note="fastvid index")
    commit_generation(storage, digest(identity)[:_ID_DIGITS], generation, annotation_table(work.annotations))
    return JobReport(storage.url, ledger, {})


def rebuild(
    url: str,
    *,
    shards: Collection[str] | None = None,
    workers: int | None = None,
    limits: Limits | None = None,
) -> tuple[str, ...]:
    """Computes the sidecars of shards of a dataset anew from their tars. Returns the shards.

    Args:
        url: The dataset's folder.
        shards: Which; all by default.
        workers: Processes for tars of other tools; by default one for each core.
        limits: What one video of those may cost.

    Raises:
        StorageError: There is no dataset, or it cannot be written.
        FormatError: A tar is damaged, or no longer holds the samples that the dataset lists.
    """
    storage = open_storage(url)
    _, generation = read_generation(storage)
    foreign = [record.name for record in generation.shards if record.profile.get("name") == FOREIGN]
    chosen = [record.name for record in generation.shards if shards is None or record.name in shards]
    for stem in chosen:
        if stem not in foreign:
            index_shard(storage, stem, streams=generation.streams)
    if set(foreign) & set(chosen):
        if not isinstance(storage, LocalStorage):
            raise UsageError("tars are indexed on a local disk", file=storage.url)
        keys = read_annotations(storage, generation.number)["key"].to_pylist()
        wanted, start = {}, 0
        for record in generation.shards:
            wanted[record.name] = keys[start : start + record.samples]
            start += record.samples
        tars = [_open_tar(storage, stem, str(storage.path(f"{stem}.tar"))) for stem in foreign]
        with contextlib.closing(_engine(workers, limits)) as engine:
            # Keys tell samples of all tars apart, whichever are indexed now.
            work = _Work(storage, tars, engine, wanted)
            tars = [tar for tar in tars if tar.stem in chosen]
            work.progress = Progress(sum(len(tar.samples) for tar in tars))
            for tar in tars:
                if tar.problem:
                    raise FormatError(tar.problem, shard=tar.stem)
                work.index(tar)
            work.progress.finish()
    return tuple(chosen)


class _Work:
    """Indexes tars one after the other; collects ledger rows and annotations."""

    def __init__(
        self, storage: LocalStorage, tars: Sequence[_Tar], engine: Engine, wanted: Mapping[str, list[str]] | None = None
    ) -> None:
        self.storage, self.engine, self.wanted = storage, engine, wanted
        self.keys = sample_keys({tar.stem: tar.samples for tar in tars})
        self.rows: list[Row] = []
        self.annotations: list[dict[str, Any]] = []
        self.progress = Progress(sum(len(tar.samples) for tar in tars))

    def index(self, tar: _Tar) -> ShardRecord | None:
        """Writes the sidecars of a tar; None when there is nothing to index in it."""
        if tar.problem:
            self.rows.append(_row(tar, os.path.basename(tar.path), "", None, tar.problem))
            return None
        outcomes = self._outcomes(tar)
        found: dict[int, IndexedSample] = {}
        for number, sample in enumerate(tar.samples):
            name, key = self.keys[tar.stem, sample.first]
            outcome = outcomes[number]
            self.rows.append(_row(tar, name, key, outcome, "", sample))
            if outcome.reason is None:
                found[sample.first] = _indexed(sample, encode_name(name), key, outcome)
        if self.wanted is not None:
            listed = [sample.key for sample in found.values()]
            if listed != self.wanted[tar.stem]:
                lost = sorted(set(self.wanted[tar.stem]) - set(listed))
                raise FormatError(
                    f"the tar gives {len(listed)} samples, the dataset lists {len(self.wanted[tar.stem])}"
                    + (f"; {lost[0]!r} cannot be indexed any more" if lost else ""),
                    shard=tar.stem,
                )
        if not found:
            return None

        def indexer(
            _view: memoryview, _name: str, members: Sequence[TarMember], _streams: tuple[str, ...]
        ) -> IndexedSample | None:
            return found.get(members[0].offset)

        samples = index_shard(self.storage, tar.stem, indexer=indexer)
        by_first = {sample.first: sample for sample in tar.samples}
        for first, indexed in found.items():
            self.annotations.append(_annotation(by_first[first], indexed))
        view = self.storage.map(f"{tar.stem}.tar")
        return ShardRecord(tar.stem, len(view), sha256(view), len(samples), {"name": FOREIGN}, {})

    def _outcomes(self, tar: _Tar) -> dict[int, Outcome]:
        """What became of each sample, by its number in the tar."""
        outcomes: dict[int, Outcome] = {}
        tasks = []
        for number, sample in enumerate(tar.samples):
            problem = missing_video(sample)
            if problem is not None or sample.video is None:
                reason, message = problem or (Reason.NO_VIDEO_STREAM, "")
                outcomes[number] = Outcome(number, reason=reason, message=message)
                self.progress.advance(rejected=True)
                continue
            name, key = self.keys[tar.stem, sample.first]
            place = (sample.video.offset, sample.video.size)
            size = sample.video.size
            tasks.append(Task(number, encode_name(name), self._path(tar), key, size=size, member=place, indexes=True))
        again = []
        for outcome in self.engine.run(tasks):
            if outcome.transient:
                again.append(outcome.index)
            else:
                outcomes[outcome.index] = outcome
                self.progress.advance(rejected=outcome.reason is not None)
        for number in again:
            task = next(task for task in tasks if task.index == number)
            for outcome in self.engine.run([replace(task, patience=_PATIENCE)]):
                outcomes[number] = replace(outcome, transient=False)
                self.progress.advance(rejected=outcome.reason is not None)
        return outcomes

    def _path(self, tar: _Tar) -> str:
        return str(self.storage.path(f"{tar.stem}.tar"))


def _engine(workers: int | None, limits: Limits | None) -> LocalEngine:
    # The profile stands for nothing here: nothing is encoded.
    return LocalEngine(Settings(get_profile("compact"), find_ffmpeg(), limits or Limits(), MAX_SECONDS), workers)


def _open_tar(storage: Storage, stem: str, path: str) -> _Tar:
    try:
        return _Tar(stem, path, read_tar(storage.map(f"{stem}.tar")))
    except FormatError as error:
        return _Tar(stem, path, problem=error.message)


def _common_folder(paths: Sequence[str]) -> str:
    folders = sorted({os.path.dirname(path) for path in paths})
    if len(folders) > 1:
        raise UsageError(f"the tars lie in {len(folders)} folders", file=folders[0], hint="name a folder with --out")
    return folders[0]


def _check_sidecar(storage: Storage, stem: str) -> None:
    """Refuses to overwrite a table of another tool: video2dataset writes ``00000.parquet`` beside ``00000.tar``."""
    name = f"{stem}.parquet"
    if not storage.exists(name):
        return
    try:
        from_parquet(storage.read(name), file=name, columns=["member_offset"])
    except FormatError as error:
        raise UsageError(
            "a file of another tool has the name of a sidecar",
            file=name,
            hint="name another folder with --out; the tars are linked into it, not copied",
        ) from error


def _link(path: str, storage: LocalStorage, stem: str) -> None:
    target = storage.path(f"{stem}.tar")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)
        try:
            os.link(os.path.realpath(path), target)
        except OSError:  # another file system
            target.symlink_to(os.path.realpath(path))
    except OSError as error:
        raise StorageError(f"tar cannot be linked: {error.strerror}", file=str(target)) from error


def _indexed(sample: TarSample, name: str, key: str, outcome: Outcome) -> IndexedSample:
    assert sample.video is not None
    info, records, facts = unpack_found(outcome.samples[0])
    meta = {"source_id": name, "pix_fmt": facts["pix_fmt"]}
    return IndexedSample(key, meta, (IndexedStream("rgb", sample.video, info, records),))


def _annotation(sample: TarSample, indexed: IndexedSample) -> dict[str, Any]:
    row: dict[str, Any] = {
        "key": indexed.key,
        "source_id": indexed.meta["source_id"],
        "label": sample.label,
        "num_frames": indexed.streams[0].info.num_frames,
        "removed": False,
    }
    # A table may have a column of our names for something else, such as its own count of frames.
    return row | {f"source_{name}" if name in row else name: value for name, value in sample.columns.items()}


def _set_labels(rows: Sequence[dict[str, Any]], class_names: Sequence[str]) -> tuple[str, ...]:
    """Turns class names in rows into numbers; gives the classes.

    Raises:
        UsageError: A number has no name among those given.
    """
    labels = [row["label"] for row in rows if row["label"] is not None]
    if all(isinstance(label, int) for label in labels):
        if class_names and labels and max(labels) >= len(class_names):
            raise UsageError(f"label {max(labels)} has no name: {len(class_names)} are given")
        return tuple(class_names)
    classes = tuple(class_names) or tuple(sorted({str(label) for label in labels}))
    numbers = {name: number for number, name in enumerate(classes)}
    for row in rows:
        if row["label"] is not None:
            if str(row["label"]) not in numbers:
                raise UsageError(f"label {row['label']!r} is none of the {len(classes)} class names")
            row["label"] = numbers[str(row["label"])]
    return classes


def _row(tar: _Tar, name: str, key: str, outcome: Outcome | None, problem: str, sample: TarSample | None = None) -> Row:
    video = sample.video if sample is not None else None
    path = tar.path if video is None else f"{tar.path}/{video.name}"
    source = Source(name, path, 0 if video is None else video.size, key=key)
    outcome = outcome or Outcome(-1, reason=Reason.BROKEN_CONTAINER, message=f"the tar is broken: {problem}")
    row = ledger_row(source, outcome, tar.stem)
    # The video stays what it is; the blobs of an outcome are its index.
    row["bytes_out"] = source.size if outcome.reason is None else None
    row["warnings"] = [*outcome.warnings, *(sample.notes if sample is not None else ())]
    return row
