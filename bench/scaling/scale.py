"""Measure training part by part on an increasing number of ranks, or predict it for a cluster from measured parts.

Measured, with the recipe's loader, model and optimiser:

    python -m bench scale RECIPE [key=value ...] --ranks 1 2 4              starts torchrun for each number of ranks
    python -m bench scale RECIPE --ranks 2 4 --network 200                  each rank on its own host, 200 Mbit/s
    torchrun ... -m bench scale RECIPE [key=value ...] --json w64.json      one size of a cluster, any launcher
    python -m bench scale --join w8.json w64.json --json cluster.json       merges such files

Each prints throughput, efficiency against one rank, the cost of data, communication and computation, and the slowest
rank. With several sizes it also prints what the scaling model predicts from the measured parts.

Predicted: ``--model FILE.toml``, from one GPU to ten thousand; see bench/scaling/model_file.py.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from bench.common.harness import RESULTS, machine_facts, write_json
from bench.common.hosts import Hosts
from bench.scaling import predict
from bench.scaling.model import SyncSpec
from fastvid.errors import UsageError, WorkerError

SCHEMA: Final = "fastvid-bench-scale/1"
_ROOT: Final = Path(__file__).parents[2]
_TIMEOUT_S: Final = 900.0
# Parts of a step, in the order of printing; defined in bench/scaling/scale_rank.py.
PARTS: Final = ("compute", "sharing", "stragglers", "communication", "data")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``python -m bench scale``."""
    parser.add_argument("recipe", nargs="?", help="recipe to measure, a name or a file")
    parser.add_argument("changes", nargs="*", metavar="key=value", help="overrides of the recipe")
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2], help="numbers of ranks (1 2)")
    parser.add_argument("--network", type=float, metavar="MBIT", help="run each rank on its own host; 0 is unlimited")
    parser.add_argument("--clips", type=int, default=8, help="clips per rank and batch (8)")
    parser.add_argument("--steps", type=int, default=24, help="timed steps per part (24)")
    parser.add_argument("--sync", nargs="+", default=["ddp", "kavg:8"], help="strategies (ddp kavg:8)")
    parser.add_argument("--join", nargs="+", type=Path, metavar="FILE", help="merge measured files")
    predict.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Measure, merge or predict; return 0."""
    if args.model:
        if args.recipe or args.join:
            raise UsageError("--model cannot be combined with a recipe or --join")
        return predict.run(args)
    if args.join:
        record = joined(args.join)
    elif args.recipe is None:
        raise UsageError("nothing to do", hint="pass a recipe, --join or --model")
    elif "RANK" in os.environ:
        return _rank(args)
    else:
        record = _drive(args)
    print(table(record))
    write_json(args.json or RESULTS / "scale.json", record)
    return 0


def _rank(args: argparse.Namespace) -> int:
    """Measure one rank of a torchrun job."""
    from bench.scaling.scale_rank import analyse, measure
    from fastvid.train.config import config as recipes

    strategies = tuple(SyncSpec.parse(text) for text in args.sync)
    found = measure(recipes.load(args.recipe, args.changes), args.clips, args.steps, strategies)
    if found is not None:
        world = {**found, "machine": machine_facts(), "analysis": analyse(found), "network_mbit": args.network}
        record = complete({"schema": SCHEMA, "recipe": args.recipe, "changes": args.changes, "worlds": [world]})
        print(table(record), file=sys.stderr)
        if args.json:
            write_json(args.json, record)
    return 0


def _drive(args: argparse.Namespace) -> dict[str, Any]:
    """Run torchrun for each number of ranks and merge the results."""
    files = []
    with tempfile.TemporaryDirectory() as folder:
        for size in args.ranks:
            files.append(Path(folder, f"{size}.json"))
            command = [
                "-m", "bench", "scale", args.recipe, *args.changes, "--clips", str(args.clips),
                "--steps", str(args.steps), "--sync", *args.sync, "--json", str(files[-1]),
            ]  # fmt: skip
            with _launched(size, args.network) as launch:
                launch([*command, "--network", str(args.network)] if args.network is not None else command)
        return joined(files)


@contextlib.contextmanager
def _launched(size: int, mbit: float | None) -> Iterator[Any]:
    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    if mbit is None or size == 1:
        local = [*torchrun, "--standalone", "--nproc-per-node", str(size)]
        yield lambda words: _wait([_start([*local, *words], {})])
        return
    with Hosts(size) as hosts:
        hosts.limit(int(mbit * 1e6))
        node = [
            *torchrun, "--nnodes", str(size), "--nproc-per-node", "1", "--rdzv-backend", "c10d",
            "--rdzv-endpoint", f"{hosts.addresses[0]}:29400", "--rdzv-id", "scale",
        ]  # fmt: skip

        def launch(words: Sequence[str]) -> None:
            processes = []
            for number, address in enumerate(hosts.addresses):
                # torchrun identifies its machine by host name, which is the same on all hosts here.
                own = ["--local-addr", address, "--rdzv-conf", f"is_host={int(not number)}"]
                processes.append(_start(hosts.command(number, [*node, *own, *words]), dict(hosts.environment)))
            _wait(processes)

        yield launch


def _start(command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    # torchrun sets OMP_NUM_THREADS=1 for several ranks; use the same for one rank.
    return subprocess.Popen(command, cwd=_ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"} | dict(environment))


def _wait(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    try:
        codes = [process.wait(_TIMEOUT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if any(codes):
        raise WorkerError(f"torchrun exited with code {max(codes)}", hint="see its messages above")


def joined(files: Sequence[Path]) -> dict[str, Any]:
    """Merge several records into one, sorted by world size."""
    records = []
    for file in files:
        try:
            records.append(json.loads(file.read_text()))
        except (OSError, ValueError) as error:
            raise UsageError(f"cannot read the measurement: {error}", file=file) from error
        if not isinstance(records[-1], dict) or records[-1].get("schema") != SCHEMA:
            raise UsageError(f"schema is not {SCHEMA}", file=file)
    first = records[0]
    for file, record in zip(files, records, strict=True):
        for key in ("recipe", "changes"):
            if record[key] != first[key]:
                raise UsageError(f"{key} is {record[key]!r}, in {files[0]} it is {first[key]!r}", file=file)
    worlds = sorted((world for record in records for world in record["worlds"]), key=lambda world: world["world_size"])
    return complete({key: first[key] for key in ("schema", "recipe", "changes")} | {"worlds": worlds})


def complete(record: dict[str, Any]) -> dict[str, Any]:
    """Return the record with the scaling model's predictions, if it contains all-reduces."""
    return record | {"prediction": predict.beside_measured(record["worlds"])}


def table(record: Mapping[str, Any]) -> str:
    """Format a record as text."""
    lines = [
        f"{record['recipe']} {' '.join(record['changes'])}".rstrip(),
        f"{'ranks':>5} {'sync':8} {'clips/s':>8} {'of ideal':>9}   ms per step: compute + sharing + stragglers +"
        " communication + data",
    ]
    for world in record["worlds"]:
        analysis = world["analysis"]
        for row in analysis["rows"]:
            parts = " + ".join(f"{1e3 * row['parts_seconds'][part]:.1f}" for part in PARTS)
            lines.append(
                f"{world['world_size']:>5} {row['strategy']:8} {row['clips_per_second']:8.1f} {row['efficiency']:9.1%}"
                f"   {1e3 * row['step_seconds']:.1f} = {parts}"
            )
        slow = analysis["slowest"]
        if world["world_size"] > 1:
            lines.append(
                f"      loaders alone {analysis['load_clips_per_second']:.0f} clips/s, compute alone"
                f" {analysis['compute_clips_per_second']:.0f}; slowest rank: {slow['rank']} on {slow['host']},"
                f" {slow['behind_the_average']:.1%} slower than the average"
            )
    if record["prediction"]:
        lines += [
            "predicted from the parts, against the measured runs:",
            predict.comparison(record["prediction"]),
        ]
    return "\n".join(lines)
