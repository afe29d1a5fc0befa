"""Verifies a dataset: checks everything that the format promises against the bytes.

The work is divided among processes, see `fastvid.sharding.verify.checks`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from fastvid.errors import FastvidError
from fastvid.format.generations import Generation, check_annotations, read_annotations, read_generation
from fastvid.format.schema import FOREIGN
from fastvid.format.writing import index_shard
from fastvid.media.checks import CHECKS
from fastvid.runtime.processes import available_cores
from fastvid.runtime.values import check_integers
from fastvid.sharding.verify.checks import Findings, Problem, ShardTask, check, check_all
from fastvid.storage import Storage, open_storage

_SIDECAR_CHECKS: Final = frozenset({"idx", "parquet", "pkt", "packets", "index", "plan"})

# Number of tasks per worker: so many that, at the end, no worker waits long for another.
_PIECES: Final = 8
# Minimum number of samples in a task: decoding a sample takes tens of milliseconds, and smaller tasks are mostly
# overhead.
_MIN_ROWS: Final = 16


@dataclass(slots=True, kw_only=True)
class VerifyReport(Findings):
    """The result of a verification."""

    generation: int
    total: int = 0  # number of samples in the generation
    repaired: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether there are no problems."""
        return not self.problems

    def to_json(self) -> dict[str, Any]:
        """Return the report for JSON."""
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
    generation: int | str | None = None,
    sample: int | None = None,
    seed: int = 0,
    workers: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> VerifyReport:
    """Check a generation of a dataset, including removed samples, except those in place, whose files may be gone.

    Args:
        url: The dataset's folder.
        generation: Number or tag of the generation; the current one by default.
        sample: Check only this many samples, drawn with `seed`, and do not hash the tars.
        seed: Seed for `sample`.
        workers: Worker processes; by default one per core. With 1, everything runs in this process.
        progress: Called with the number of samples decoded since the last call, and the total number of samples.

    Raises:
        UsageError: If an argument is wrong.
        StorageError: If there is no dataset or generation.
        FormatError: If the commit record or the generation's record is broken.
    """
    check_integers(1, sample=sample, workers=workers)
    check_integers(0, seed=seed)
    storage = open_storage(url)
    _, record = read_generation(storage, generation)
    workers = available_cores() if workers is None else workers
    report = VerifyReport(generation=record.number, total=record.num_samples)
    seen = _seen(storage, record)
    tasks = list(_sampled(url, record, seen, sample, seed) if sample is not None else _all(url, record, seen, workers))
    wanted = sum(len(task.rows) for task in tasks)
    facts: dict[str, dict[int, tuple[str, str, int]]] = {}
    problems: dict[Problem, None] = {}
    with closing(_done(tasks, workers)) as answers:
        for task, findings in answers:
            report.checked.update(findings.checked)
            report.samples += findings.samples
            facts.setdefault(task.record.name, {}).update(findings.facts)
            # Several tasks of one shard may report the same problem.
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


def repair_sidecars(url: str, report: VerifyReport) -> tuple[str, ...]:
    """Rebuild the sidecars of shards from their tars, if only sidecars are damaged.

    `report`: result of verifying all samples. Returns the shards whose sidecars were rebuilt. Shards with a damaged
    tar are left unchanged: rebuilt sidecars would hide the damage.
    """
    # Imported late, because it loads half of the package and only repairs need it.
    from fastvid.sharding.in_place import reindex
    from fastvid.sharding.job.index import rebuild

    storage = open_storage(url)
    _, generation = read_generation(storage, report.generation)
    checks: dict[str, set[str]] = {}
    for problem in report.problems:
        checks.setdefault(problem.shard, set()).add(problem.check)
    done = []
    for shard in generation.shards:
        found = checks.get(shard.name, set())
        if not found & _SIDECAR_CHECKS or found & {"tar", "files"}:
            continue
        # Ignore the error: the sample that cannot be indexed is in the report.
        with suppress(FastvidError):
            if shard.is_in_place:
                reindex(url, shards=[shard.name])
            elif shard.profile.get("name") == FOREIGN:
                rebuild(url, shards=[shard.name])
            else:
                index_shard(storage, shard.name, streams=generation.streams)
            done.append(shard.name)
    return tuple(done)


def _seen(storage: Storage, generation: Generation) -> npt.NDArray[np.bool_]:
    """Return which samples are checked, bool [N]."""
    counts = [shard.samples for shard in generation.shards]
    in_place = np.repeat(np.array([shard.is_in_place for shard in generation.shards], bool), counts)
    with suppress(FastvidError):  # damaged annotations are a problem of their own
        if in_place.any():
            in_place &= read_annotations(storage, generation)["removed"].to_numpy()
            return ~in_place
    return np.ones(generation.num_samples, dtype=bool)


def _all(url: str, generation: Generation, seen: npt.NDArray[np.bool_], workers: int) -> Iterator[ShardTask]:
    """Yield the tasks that check everything; the first task of each shard also checks its files."""
    size = max(_MIN_ROWS, -(-generation.num_samples // (workers * _PIECES)))
    ends = np.cumsum([shard.samples for shard in generation.shards])
    for shard, end in zip(generation.shards, ends, strict=True):
        mine = seen[end - shard.samples : end]
        for start in range(0, max(1, shard.samples), size):
            rows = tuple((np.flatnonzero(mine[start : start + size]) + start).tolist())
            yield ShardTask(url, shard, generation.streams, rows, files=not start, root=generation.root_of(shard))


def _sampled(
    url: str, generation: Generation, seen: npt.NDArray[np.bool_], sample: int, seed: int
) -> Iterator[ShardTask]:
    """Yield one task for each shard that contains chosen samples."""
    some, start = np.flatnonzero(seen), 0
    chosen = np.sort(np.random.default_rng(seed).choice(some, min(sample, len(some)), replace=False))
    for shard in generation.shards:
        rows = tuple((chosen[(chosen >= start) & (chosen < start + shard.samples)] - start).tolist())
        start += shard.samples
        if rows:
            yield ShardTask(url, shard, generation.streams, rows, alone=True, root=generation.root_of(shard))


def _done(tasks: list[ShardTask], workers: int) -> Generator[tuple[ShardTask, Findings]]:
    if workers == 1 or len(tasks) <= 1:
        for task in tasks:
            yield task, check(task)
        return
    yield from check_all(tasks, min(workers, len(tasks)), CHECKS)


def _missing_files(storage: Storage, generation: Generation, *, known: set[str]) -> Iterator[Problem]:
    """Check that the files of shards without chosen samples exist."""
    for shard in generation.shards:
        if shard.name in known:
            continue
        try:
            size = storage.size(shard.data)
        except FastvidError as error:
            yield Problem("tar", error.message, shard.name)
            continue
        if size != shard.bytes:
            yield Problem("tar", f"{shard.data} has {size} bytes, the generation says {shard.bytes}", shard.name)
        for suffix in shard.suffixes[1:]:
            if not storage.exists(f"{shard.name}.{suffix}"):
                yield Problem(suffix.partition(".")[0], "file does not exist", shard.name)


def _annotation_problems(
    storage: Storage, generation: Generation, facts: dict[str, dict[int, tuple[str, str, int]]]
) -> Iterator[Problem]:
    """Compare annotations with their checksum and with the tars."""
    try:
        table = read_annotations(storage, generation)
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
            yield Problem("annotations", f"label {label} is not one of the {len(generation.classes)} classes", key=key)
