"""Compare the same small job written with fastvid and with other libraries: lines, speed, and the same clips again.

Each program of `bench/load/loop_programs.py` runs in its own process, in alternating rounds, on the same videos.
`repeats` says whether the first batches are the same when the program starts again with the same seed, and `elastic`
whether they are with another number of workers.
"""

from __future__ import annotations

import argparse
import inspect
import itertools
import statistics
import time
import zlib
from collections.abc import Callable, Iterator
from multiprocessing import set_start_method
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from bench.common.harness import Record, options
from bench.common.rounds import apart, in_turn, ratios
from bench.load.loop_programs import PROGRAMS
from fastvid.errors import JobError
from fastvid.tune.measure import Corpus

SCHEMA: Final = "fastvid-bench-loops/1"

_WARM: Final = 4  # batches
_COMPARED: Final = 3  # batches


add_arguments = options(
    "workers batch rounds",
    json="loops.json",
    data=(str, "a dataset of videos of at least 224x224 pixels", {"required": True, "metavar": "DIR"}),
    batches=(20, "batches per round"),
)


def run(args: argparse.Namespace) -> int:
    """Run the benchmark."""
    files = list(map(str, Corpus(args.data, "tsn8").files))
    record = Record(SCHEMA, args, "workers", "batch", "batches", dataset=Path(args.data).name)
    rows: dict[str, dict[str, Any]] = {
        name: {"program": name, "lines": lines_of(one)} for name, one in PROGRAMS.items()
    }
    works = []
    for name, row in rows.items():
        try:
            counts = (args.workers, args.workers, args.workers + 1)
            found = [apart(digests, name, args.data, files, args.batch, workers) for workers in counts]
        except JobError as error:
            row["refused"] = error.message
            continue
        row |= {"repeats": found[0] == found[1], "elastic": found[0] == found[2]}
        works.append(name)
    inputs = (args.data, files, args.batch, args.workers, args.batches)
    rates = in_turn(works, args.rounds, lambda name, _: float(apart(rate, name, *inputs)))
    for name, own in rates.items():
        times = ratios(own, rates["ClipLoader"])
        rows[name] |= {"clips_per_s": statistics.median(own), "of_clip_loader": statistics.median(times)}
        rows[name]["of_clip_loader_range"] = [min(times), max(times)]
    record["rows"] = list(rows.values())
    return record.finish()


def lines_of(program: Callable[..., Any]) -> int:
    """Return the lines of a program's body without its docstring and blank lines."""
    body = inspect.getsource(program).split('"""', 2)[2]
    return sum(bool(line.strip()) for line in body.splitlines())


def digests(name: str, *inputs: Any) -> list[int]:
    """Return a checksum of each of the first batches, after checking their shape."""
    torch.manual_seed(0)
    np.random.seed(0)
    found = []
    for batch in itertools.islice(_started(name, *inputs), _COMPARED):
        assert batch.shape[1:] == (3, 8, 224, 224), batch.shape
        assert batch.dtype is torch.uint8
        found.append(zlib.crc32(batch.contiguous().numpy().tobytes()))
    return found


def rate(name: str, url: str, files: list[str], batch: int, workers: int, batches: int) -> float:
    """Return clips per second."""
    made = _started(name, url, files, batch, workers)
    for _ in range(_WARM):
        next(made)
    begun = time.perf_counter()
    for _ in range(batches):
        next(made)
    return batch * batches / (time.perf_counter() - begun)


def _started(name: str, *inputs: Any) -> Iterator[torch.Tensor]:
    torch.set_num_threads(1)
    set_start_method("fork", force=True)  # as in a user's program; a spawned process would spawn its workers too
    return PROGRAMS[name](*inputs)
