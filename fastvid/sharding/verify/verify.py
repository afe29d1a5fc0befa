"""Proves a dataset: every promise of the format, checked against the bytes.

Work is cut into pieces that processes do side by side, see `fastvid.sharding.verify.check_processes`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import pyarrow as pa

from fastvid.errors import FastvidError, UsageError
from fastvid.format.generations import Generation, check_annotations, read_annotations, read_generation
from fastvid.format.schema import FOREIGN, annotations_file
from fastvid.format.shard import index_shard
from fastvid.runtime.cores import available_cores
from fastvid.runtime.hashing import sha256
from fastvid.sharding.verify.check_processes import check, check_all
from fastvid.sharding.verify.check_shard import Findings, Problem, ShardTask
from fastvid.storage import Storage, open_storage

CHECKS: Final = {
    "annotations": "annotations are the ones committed, and fit the shards",
    "tar": "every tar has the size and SHA-256 that were committed, and reads to its end",
    "idx": "DALI's tar index is what the tar gives",
    "parquet": "facts are what the tar gives",
    "pkt": "packet sidecars match their checksums",
    "packets": "every packet matches its checksum",
    "index": "every index row is what the sample's bytes give",
    "timing": "frames of profiles lie on a constant grid from zero",
    "shape": "frames of profiles are upright with square pixels and sides of multiples of 16, all of the indexed size",
    "colour": "frames of profiles are 8-bit 4:2:0, BT.601 limited (JPEG, flow: full), tagged in container and stream",
    "decode": "every sample decodes to the frames it promises",
    "audio": "the sound of every sample decodes",
    "plan": "frames decoded from planned packets are those a player shows",
    "process": "no checking process died",
}
"""Every check with what it proves, in the order of the report."""

_SIDECAR_CHECKS: Final = frozenset({"idx", "parquet", "pkt", "packets", "index", "plan"})

# Pieces per worker: small enough that the last one to finish does not wait for long.
_PIECES: Final = 8
# Decoding a sample takes tens of milliseconds; a piece below this is mostly overhead.
_MIN_ROWS: Final = 16


@dataclass(slots=True)
class Report:
    """What an audit found.

    Attributes:
        generation: The generation that was checked.
        samples: Samples that were decoded.
        total: Samples in the generation.
        checked: How many things each check looked at.
        problems: Broken promises, in the order of the shards.
        repaired: Shards whose sidecars were written anew.
    """

    generation: int
    samples: int = 0
    total: int = 0
    checked: Counter[str] = field(default_factory=Counter)
    problems: list[Problem] = field(default_factory=list)
    repaired: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems

    def to_json(self) -> dict[str, Any]:
        """The report as JSON holds it."""
        found = Counter(problem.check for problem in self.problems)
        return {
            "ok": self.ok,
            "generation": self.generation,
            "samples_checked": self.samples,
            "samples": self.total,
            "checks": {name: {"checked": self.checked[name], "problems": found[name]} for name in CHECKS},
            "problems": [problem._asdict() for problem in self.problems],
            "repaired": list(self.repaired),
        }


def verify_dataset(
    url: str,
    *,
    generation: int | None = None,
    sample: int | None = None,
    seed: int = 0,
    workers: int | None = None,
    shards: Sequence[str] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Report:
    """Checks a generation of a dataset, removed samples included.

    Args:
        url: The dataset's folder.
        generation: Which generation; the current one by default.
        sample: Check that many samples, drawn with `seed`, instead of all, and hash no tar.
        seed: For `sample`.
        workers: Processes; one for each core by default, none beside this one for 1.
        shards: Check these shards only.
        progress: Called with samples that are decoded since the last call, and samples in all.

    Raises:
        UsageError: An argument is wrong.
        StorageError: There is no dataset or generation.
        FormatError: The commit record or the generation's record is broken.
    """
    if sample is not None and sample < 1:
        raise UsageError(f"{sample} samples cannot be checked")
    storage = open_storage(url)
    _, record = read_generation(storage, generation)
    workers = available_cores() if workers is None else workers
    if workers < 1:
        raise UsageError(f"{workers} workers cannot check anything")
    report = Report(record.number, total=record.num_samples)
    tasks = _sampled(url, record, sample, seed) if sample is not None else _all(url, record, workers)
    tasks = [task for task in tasks if shards is None or task.record.name in shards]
    wanted = sum(len(task.rows) for task in tasks)
    facts: dict[str, dict[int, tuple[str, str, int]]] = {}
    problems: dict[Problem, None] = {}
    for task, findings in _done(tasks, workers):
        report.checked.update(findings.checked)
        report.samples += findings.samples
        facts.setdefault(task.record.name, {}).update(findings.facts)
        # Pieces of one shard may report the same thing.
        problems.update(dict.fromkeys(findings.problems))
        if progress is not None:
            progress(len(task.rows), wanted)
    order = {shard.name: number for number, shard in enumerate(record.shards)}
    names = list(CHECKS)
    found = [*_annotation_problems(storage, record, facts), *problems]
    if sample is not None:
        found += _missing_files(storage, record, known={task.record.name for task in tasks})
    report.checked["annotations"] = sum(map(len, facts.values()))
    report.problems = sorted(found, key=lambda p: (order.get(p.shard, -1), names.index(p.check)))
    return report


def repair_sidecars(url: str, report: Report) -> tuple[str, ...]:
    """Computes the sidecars of shards anew from their tars, where only sidecars are damaged.

    Args:
        url: The dataset's folder.
        report: Of an audit of all samples.

    Returns:
        The shards whose sidecars were written. Those whose tars are damaged are left as they are: sidecars made from
        them would make the damage look right.
    """
    # Half of the package stands behind it, and only repairs need it.
    from fastvid.sharding.job.index import rebuild

    storage = open_storage(url)
    _, generation = read_generation(storage, report.generation)
    foreign = {shard.name for shard in generation.shards if shard.profile.get("name") == FOREIGN}
    checks: dict[str, set[str]] = {}
    for problem in report.problems:
        checks.setdefault(problem.shard, set()).add(problem.check)
    stems = [
        shard.name
        for shard in generation.shards
        if checks.get(shard.name, set()) & _SIDECAR_CHECKS and "tar" not in checks[shard.name]
    ]
    done = []
    for stem in stems:
        try:
            if stem in foreign:
                rebuild(url, shards=[stem])
            else:
                index_shard(storage, stem, streams=generation.streams)
        except FastvidError:
            continue  # the sample that cannot be indexed stands in the report
        done.append(stem)
    return tuple(done)


def _all(url: str, generation: Generation, workers: int) -> list[ShardTask]:
    """Pieces that check everything: the first of each shard checks its files as well."""
    size = max(_MIN_ROWS, -(-generation.num_samples // (workers * _PIECES)))
    tasks = []
    for shard in generation.shards:
        for start in range(0, max(1, shard.samples), size):
            rows = tuple(range(start, min(start + size, shard.samples)))
            tasks.append(ShardTask(url, shard, generation.streams, rows, files=not start))
    return tasks


def _sampled(url: str, generation: Generation, sample: int, seed: int) -> list[ShardTask]:
    """One piece for each shard that holds chosen samples."""
    total = generation.num_samples
    chosen = np.sort(np.random.default_rng(seed).choice(total, min(sample, total), replace=False))
    tasks, start = [], 0
    for shard in generation.shards:
        rows = chosen[(chosen >= start) & (chosen < start + shard.samples)] - start
        if len(rows):
            tasks.append(ShardTask(url, shard, generation.streams, tuple(rows.tolist()), alone=True))
        start += shard.samples
    return tasks


def _done(tasks: list[ShardTask], workers: int) -> Iterator[tuple[ShardTask, Findings]]:
    if workers == 1 or len(tasks) <= 1:
        for task in tasks:
            yield task, check(task)
        return
    yield from check_all(tasks, min(workers, len(tasks)), CHECKS)


def _missing_files(storage: Storage, generation: Generation, *, known: set[str]) -> Iterator[Problem]:
    """A look at the shards that hold no chosen sample: whether their files are there."""
    for shard in generation.shards:
        if shard.name in known:
            continue
        try:
            size = storage.size(f"{shard.name}.tar")
        except FastvidError as error:
            yield Problem("tar", error.message, shard.name)
            continue
        if size != shard.bytes:
            yield Problem("tar", f"tar has {size} bytes, the generation says {shard.bytes}", shard.name)
        for suffix in ("idx", "parquet", "pkt"):
            if not storage.exists(f"{shard.name}.{suffix}"):
                yield Problem(suffix, "file does not exist", shard.name)


def _annotation_problems(
    storage: Storage, generation: Generation, facts: dict[str, dict[int, tuple[str, str, int]]]
) -> Iterator[Problem]:
    """Holds annotations against their checksum and against what the tars gave."""
    name = annotations_file(generation.number)
    try:
        content = storage.read(name)
        if generation.annotations_sha256 and sha256(content) != generation.annotations_sha256:
            yield Problem("annotations", f"{name} differs from its SHA-256")
        table = read_annotations(storage, generation.number)
        check_annotations(generation, table)
    except FastvidError as error:
        yield Problem("annotations", error.message)
        return
    yield from _label_problems(generation, table)
    columns = [table[name].to_pylist() for name in ("key", "source_id", "num_frames")]
    start = 0
    for shard in generation.shards:
        for row, found in sorted(facts.get(shard.name, {}).items()):
            if row >= shard.samples:
                continue
            expected = tuple(column[start + row] for column in columns)
            for what, a, b in zip(("key", "source", "frames"), expected, found, strict=True):
                if a != b:
                    yield Problem("annotations", f"{what} is {a!r}, in the shard {b!r}", shard.name, found[0])
        start += shard.samples


def _label_problems(generation: Generation, table: pa.Table) -> Iterator[Problem]:
    if not generation.classes:
        return
    for key, label in zip(table["key"].to_pylist(), table["label"].to_pylist(), strict=True):
        if label is not None and not 0 <= label < len(generation.classes):
            yield Problem("annotations", f"label {label} is no class: there are {len(generation.classes)}", key=key)
