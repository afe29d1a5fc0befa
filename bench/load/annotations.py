"""Measure opening a dataset of ten million rows: time, memory of a node's processes, a query, a key.

The annotations are synthetic, with and without a caption of 16 words; there are no shards, for nothing here reads one.

first    a process opens the dataset while the node's cache is empty
later    other processes open it
memory   a process opens it without the cache, from the Parquet file
node     many processes have opened it, summed all labels and found 100 keys: their PSS together, which divides each
         page among the processes that map it, less that of processes that have only imported fastvid
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import numpy as np

from bench.common.harness import Record, options

SCHEMA: Final = "fastvid-bench-annotations/1"

CHUNK: Final = 2**20
SHARDS: Final = 1000
CLASSES: Final = 400
WHERE: Final = "class = 'class 7' AND num_frames BETWEEN 100 AND 200"
KEYS: Final = 100


add_arguments = options(
    json="annotations.json",
    rows=(10_000_000, "rows, a multiple of 1000"),
    processes=(8, "processes of the node"),
)


def run(args: argparse.Namespace) -> int:
    """Run the benchmark."""
    record = Record(SCHEMA, args, "rows", where=WHERE)
    for name, captions in (("plain", False), ("captions", True)):
        with tempfile.TemporaryDirectory(prefix="fastvid-annotations-") as scratch:
            folder = Path(scratch)
            make_dataset(folder / "data", args.rows, captions=captions)
            record[name] = found = _measure(folder, args.processes)
        for what, value in found.items():
            print(f"{name:10} {what:32} {value:12,.3f}", flush=True)
        record.save()
    return 0


def make_dataset(folder: Path, rows: int, *, captions: bool) -> None:
    """Write a generation's record and its annotations, in chunks: the table is never in memory."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    from fastvid.format.generations import Generation, ShardRecord, sealed, swap_head
    from fastvid.format.schema import ANNOTATION_FIELDS, annotations_file, generation_file
    from fastvid.runtime.values import sha256
    from fastvid.storage import LocalStorage

    storage, random = LocalStorage(folder), np.random.default_rng(0)
    folder.mkdir(parents=True)
    words = np.array([f"{a}{b}{c}" for a in "bdfgklmnprst" for b in "aeiou" for c in ("n", "ling", "ter", "mas")])
    # Two halves of eight words from pools of 10,000: a hundred million different captions.
    halves = pa.array([" ".join(chosen) for chosen in random.choice(words, (10_000, 8))])
    writer, path = None, folder / annotations_file(1)
    for start in range(0, rows, CHUNK):
        numbers = np.arange(start, min(start + CHUNK, rows))
        keys = pa.array([f"class_{n % CLASSES:03d}/video_{n * 7_919 % 100_000_007:09d}" for n in numbers.tolist()])
        columns: dict[str, Any] = {"key": keys, "source_id": pc.binary_join_element_wise(keys, "mp4", ".")}
        columns |= {"label": numbers % CLASSES, "num_frames": random.integers(30, 300, len(numbers))}
        columns["removed"] = np.zeros(len(numbers), dtype=bool)
        table = pa.table({name: pa.array(columns[name]).cast(kind) for name, kind in ANNOTATION_FIELDS.items()})
        table = table.append_column("split", pa.array(np.where(numbers % 10 == 0, "test", "train")))
        if captions:
            parts = [halves.take(pa.array(random.integers(0, len(halves), len(numbers)))) for _ in range(2)]
            table = table.append_column("caption", pc.binary_join_element_wise(*parts, " "))
        writer = writer or pq.ParquetWriter(path, table.schema, compression="zstd")
        writer.write_table(table)
    assert writer is not None
    writer.close()
    shards = tuple(ShardRecord(f"data-{n:06d}", 1, "0" * 64, rows // SHARDS) for n in range(SHARDS))
    digest = sha256(path.read_bytes())
    generation = Generation(1, shards, classes=tuple(f"class {n}" for n in range(CLASSES)), annotations_sha256=digest)
    storage.write(generation_file(1), sealed(asdict(generation)))
    swap_head(storage, None, dataset_id="rows", generation=1)


def _measure(folder: Path, processes: int) -> dict[str, float]:
    data, cache = folder / "data", folder / "cache"
    parquet = sum(path.stat().st_size for path in data.glob("*.parquet"))
    ((first, _),) = _together(1, str(data), str(cache))
    later = [_together(1, str(data), str(cache), queries=True)[0][0] for _ in range(3)]
    ((memory, alone),) = _together(1, str(data), "")
    node = _together(processes, str(data), str(cache))
    idle = _together(processes, "", "")
    return {
        "parquet_mb": parquet / 1e6,
        "cache_mb": sum(path.stat().st_size for path in cache.glob("??/*")) / 1e6,
        "first_open_s": first["open_s"],
        "first_peak_mb": first["peak_mb"],
        **{f"later_{name}": statistics.median(one[name] for one in later) for name in ("open_s", "query_s", "find_us")},
        "memory_open_s": memory["open_s"],
        "memory_pss_mb": alone - idle[0][1],
        "node_processes": processes,
        "node_pss_mb": sum(pss for _, pss in node) - sum(pss for _, pss in idle),
        "node_private_mb": statistics.mean(one["private_mb"] for one, _ in node)
        - statistics.mean(one["private_mb"] for one, _ in idle),
    }


def _together(count: int, data: str, cache: str, *, queries: bool = False) -> Sequence[tuple[dict[str, float], float]]:
    """Run `opened` in processes that exist at the same time; return their results and their PSS in MB."""
    context = get_context("spawn")
    started = []
    for _ in range(count):
        ours, theirs = context.Pipe()
        process = context.Process(target=opened, args=(theirs, data, cache, queries))
        process.start()
        theirs.close()
        started.append((process, ours))
    answers = [pipe.recv() for _, pipe in started]
    # All pages are mapped now, so their division among the processes is the final one.
    for _, pipe in started:
        pipe.send("measure")
    measured = [pipe.recv() for _, pipe in started]
    for process, pipe in started:
        pipe.send("end")
        process.join()
    return [(answer | one, one["pss_mb"]) for answer, one in zip(answers, measured, strict=True)]


def opened(pipe: Connection, data: str, cache: str, queries: bool) -> None:
    """Open a dataset, use it, and tell times; then memory, when asked."""
    from fastvid.format.dataset import Dataset

    os.environ["FASTVID_CACHE"] = cache
    answer: dict[str, float] = {}
    if data:
        start = time.perf_counter()
        dataset = Dataset(data)
        answer["open_s"] = time.perf_counter() - start
        answer["sum"] = int(dataset.labels.sum() + dataset.num_frames.sum())
        keys = [dataset.key(n) for n in np.random.default_rng(os.getpid()).integers(0, len(dataset), KEYS).tolist()]
        dataset.find(keys[0])  # without the cache, the first look-up sorts all keys
        start = time.perf_counter()
        for key in keys:
            dataset.find(key)
        answer["find_us"] = 1e6 * (time.perf_counter() - start) / KEYS
        if queries:
            start = time.perf_counter()
            Dataset(data, where=WHERE)
            answer["query_s"] = time.perf_counter() - start
        answer["peak_mb"] = _kilobytes("/proc/self/status", "VmHWM") / 1e3
    pipe.send(answer)
    pipe.recv()
    pss, private = (_kilobytes("/proc/self/smaps_rollup", name) / 1e3 for name in ("Pss", "Private_Dirty"))
    pipe.send({"pss_mb": pss, "private_mb": private})
    pipe.recv()
    sys.exit(0)


def _kilobytes(file: str, name: str) -> int:
    for line in Path(file).read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1])
    raise ValueError(f"{file} has no {name}")
