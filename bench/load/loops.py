"""Compare the same small job written with fastvid and with other libraries: lines, speed, and the same clips again.

Each program of `bench/load/loop_programs.py` runs in its own process, in alternating rounds, on the same videos.
`repeats` says whether the first batches are the same when the program starts again with the same seed, and `elastic`
whether they are with another number of workers.
"""

from __future__ import annotations

import argparse
import inspect
import itertools
import json
import os
import statistics
import time
import zlib
from collections.abc import Callable
from multiprocessing import get_context, set_start_method
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from bench.common.harness import RESULTS, machine_facts, write_json
from bench.load.loop_programs import PROGRAMS
from fastvid.runtime.processes import available_cores
from fastvid.tune.measure import Corpus

SCHEMA: Final = "fastvid-bench-loops/1"

_WARM: Final = 4  # batches
_COMPARED: Final = 3  # batches


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``python -m bench loops``."""
    parser.add_argument("--data", required=True, metavar="DIR", help="a dataset of videos of at least 224x224 pixels")
    parser.add_argument("--workers", type=int, default=available_cores(), help="(default: all cores, %(default)s)")
    parser.add_argument("--batch", type=int, default=16, help="clips per batch (default %(default)s)")
    parser.add_argument("--batches", type=int, default=20, help="batches per round (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds (default %(default)s)")
    parser.add_argument("--json", type=Path, default=RESULTS / "loops.json", help="result file (%(default)s)")


def run(args: argparse.Namespace) -> int:
    """Run the benchmark."""
    files = list(map(str, Corpus(args.data, "tsn8").files))
    record: dict[str, Any] = {"schema": SCHEMA, "machine": machine_facts(), "dataset": Path(args.data).name}
    record |= {"workers": args.workers, "batch": args.batch, "batches": args.batches, "rows": []}
    rates: dict[str, list[float]] = {}
    for name, program in PROGRAMS.items():
        row: dict[str, Any] = {"program": name, "lines": lines_of(program)}
        record["rows"].append(row)
        try:
            counts = (args.workers, args.workers, args.workers + 1)
            found = [_apart("digests", name, args.data, files, args.batch, workers) for workers in counts]
        except RuntimeError as error:
            row["refused"] = str(error)
            continue
        row |= {"repeats": found[0] == found[1], "elastic": found[0] == found[2]}
        rates[name] = []
    for number in range(args.rounds):
        order = list(rates)[number % len(rates) :] + list(rates)[: number % len(rates)]
        for name in order:
            rates[name].append(_apart("rate", name, args.data, files, args.batch, args.workers, args.batches))
    first = rates["ClipLoader"]
    for row in record["rows"]:
        if (own := rates.get(row["program"])) is not None:
            ratios = [mine / base for mine, base in zip(own, first, strict=True)]
            row |= {"clips_per_s": statistics.median(own), "of_clip_loader": statistics.median(ratios)}
            row["of_clip_loader_range"] = [min(ratios), max(ratios)]
    print(json.dumps(record["rows"], indent=1))
    write_json(args.json, record)
    return 0


def lines_of(program: Callable[..., Any]) -> int:
    """Return the lines of a program's body without its docstring and blank lines."""
    body = inspect.getsource(program).split('"""', 2)[2]
    return sum(bool(line.strip()) for line in body.splitlines())


def digests(name: str, *inputs: Any) -> list[int]:
    """Return a checksum of each of the first batches, after checking their shape."""
    torch.manual_seed(0)
    np.random.seed(0)
    found = []
    for batch in itertools.islice(PROGRAMS[name](*inputs), _COMPARED):
        assert batch.shape[1:] == (3, 8, 224, 224), batch.shape
        assert batch.dtype is torch.uint8
        found.append(zlib.crc32(batch.contiguous().numpy().tobytes()))
    return found


def rate(name: str, url: str, files: list[str], batch: int, workers: int, batches: int) -> float:
    """Return clips per second."""
    made = PROGRAMS[name](url, files, batch, workers)
    for _ in range(_WARM):
        next(made)
    begun = time.perf_counter()
    for _ in range(batches):
        next(made)
    return batch * batches / (time.perf_counter() - begun)


def _apart(question: str, *inputs: Any) -> Any:
    """Run `digests` or `rate` in a new process."""
    context = get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=_answer, args=(theirs, question, inputs))
    process.start()
    theirs.close()
    try:
        good, answer = mine.recv()
    except EOFError:
        good, answer = False, "its process died"
    process.join(20)
    if process.is_alive():
        process.kill()
    if not good:
        raise RuntimeError(answer)
    return answer


def _answer(pipe: Any, question: str, inputs: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    set_start_method("fork", force=True)  # as in a user's program; a spawned process would spawn its workers too
    try:
        pipe.send((True, {"digests": digests, "rate": rate}[question](*inputs)))
    except Exception as error:  # noqa: BLE001 - reported to the parent
        pipe.send((False, f"{type(error).__name__}: {error}"))
    finally:
        pipe.close()
        os._exit(0)  # do not wait for rivals' worker processes
