"""Train the demo's motion dataset from scratch with each strategy, on as many samples as ddp.

    python -m bench motion_sync asgd --data runs/demo/shards --seeds 3

All train the recipe ``motion_tsm``, whose rate decays. An unfinished run in its folder is resumed, a finished one is
recorded as it is.

Records about samples:

    each_sample_once     whether the run's lineage equals that of the dataset, position by position and epoch by epoch
    acknowledged, returned, lost    counts of asgd's server: positions done, positions returned by dead clients, dead
                         clients
"""

from __future__ import annotations

import argparse
import logging
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from bench.common.harness import RESULTS, Record, machine_facts, options
from fastvid.errors import WorkerError
from fastvid.train.config import config as recipes
from fastvid.train.records import records as metrics
from fastvid.train.records.checkpoint import Checkpoints, decode
from fastvid.train.strategies.link import TOKEN_VARIABLE

_log = logging.getLogger(__name__)

SCHEMA: Final = "fastvid-bench-motion-sync/2"
TARGET_PERCENT: Final = 95.0
STALENESS: Final = 1.0
"""Minimum mean staleness of asgd's gradients, in updates; with less it would be plain SGD."""


RECIPE: Final = "motion_tsm"


@dataclass(frozen=True)
class SyncRecipe:
    """How to train with one strategy."""

    ranks: int
    changes: tuple[str, ...] = ()


SYNC_RECIPES: Final = {
    "ddp": SyncRecipe(2, ("sync=ddp",)),
    # Post-local SGD: rounds of 8 steps after four epochs of averaged gradients, when the learning rate is warmed up.
    "kavg": SyncRecipe(2, ("sync=kavg", "sync_options.period=8", "sync_options.local_after=4")),
    # A warm start, then gradients about three updates old; less momentum, because asynchrony acts like momentum.
    "asgd": SyncRecipe(
        4,
        ("sync=asgd", "sync_options.warm_up=290", "sync_options.lease_batches=4",
         "optim.momentum=0.85", "data.num_threads=1"),
    ),
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``python -m bench motion_sync``."""
    parser.add_argument("sync", choices=list(SYNC_RECIPES), help="strategy")
    parser.add_argument("--json", type=Path, help="result file (default: motion_SYNC.json in bench/results)")
    _options(parser)


_options = options(
    data=(Path, "the dataset made by `fastvid demo`", {"required": True, "metavar": "DIR"}),
    seeds=1,
    change=(str, "additional override of the recipe", {"action": "append", "default": [], "metavar": "KEY=VALUE"}),
    out=(Path("runs/bench-motion-sync"), "folder of runs"),
)


def run(args: argparse.Namespace) -> int:
    """Train and record; return 1 if a run fails its check."""
    plan = SYNC_RECIPES[args.sync]
    # If a key is given twice, the later value counts.
    own = [
        f"{key}={value}" for key, value in dict(item.split("=", 1) for item in (*plan.changes, *args.change)).items()
    ]
    args.json = args.json or RESULTS / f"motion_{args.sync}.json"
    record = Record(SCHEMA, args, "sync", recipe=RECIPE, ranks=plan.ranks, changes=own, runs=[])
    record["target_percent"] = TARGET_PERCENT
    # Stop all processes of a run on SIGTERM.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    for seed in range(args.seeds):
        out = args.out / args.sync / f"seed-{seed}"
        changes = [*own, f"data.path={args.data}", f"run.seed={seed}"]
        began = time.monotonic()
        _train(plan, out, changes)
        seconds = time.monotonic() - began
        found = single(out, changes)
        record["runs"].append({"seed": seed, "seconds": round(seconds, 1), **found})
        record["machine"] = machine_facts()
        record.save()
        print(line(args.sync, record["runs"][-1]), flush=True)
    return 0 if all(passed(found) for found in record["runs"]) else 1


def passed(found: Mapping[str, Any]) -> bool:
    """Return whether a run passes its checks."""
    top1 = min(model["top1_percent"] for model in found["models"])
    stale = found.get("staleness_mean", STALENESS) >= STALENESS
    return bool(found["each_sample_once"] and stale and top1 >= TARGET_PERCENT)


def line(sync: str, found: Mapping[str, Any]) -> str:
    """Format a run as one line of text."""
    top1 = ", ".join(f"{model['top1_percent']:.2f} %" for model in found["models"])
    parts = [f"{sync}, seed {found['seed']}: {top1} of {found['scored']} held-out videos in {found['seconds']:.0f} s"]
    if "staleness_mean" in found:
        parts.append(f"staleness {found['staleness_mean']:.2f}")
    parts.append("each sample once" if found["each_sample_once"] else "NOT each sample once")
    return "; ".join(parts)


def _train(plan: SyncRecipe, out: Path, changes: Sequence[str]) -> None:
    done = subprocess.run(_torchrun(plan, out, changes), env=_environment(), stdout=subprocess.DEVNULL, check=False)
    if done.returncode:
        raise WorkerError(f"training failed with exit code {done.returncode}", file=out)


def _torchrun(plan: SyncRecipe, out: Path, changes: Sequence[str]) -> list[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(plan.ranks)]
    return [*command, "-m", "fastvid.train", RECIPE, *changes, f"run.out={out}"]


def _environment() -> dict[str, str]:
    # The token lets the clients of asgd, which are jobs of their own, join its server.
    own = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), TOKEN_VARIABLE: secrets.token_hex(32)}
    return os.environ | own


def _samples_per_epoch(config: Any) -> int:
    from fastvid.format.dataset import Dataset

    size = config.data.global_batch_size
    return len(Dataset(config.data.path, split=config.data.split)) // size * size


def single(out: Path, changes: Sequence[str]) -> dict[str, Any]:
    """Return the results of a run of one model."""
    rows = metrics.read(out / metrics.METRICS_FILE)
    scores = metrics.curve(rows, "eval")
    found = Checkpoints(str(out / "checkpoints")).newest()
    assert found is not None
    state = decode(found.data, found.name)
    (config,) = recipes.load_all(RECIPE, list(changes))
    facts: dict[str, Any] = {
        "samples": state["replica"]["samples"],
        "samples_by_epoch": [entry["samples"] for entry in state["lineage"]],
        "each_sample_once": state["lineage"] == lineage_of(config),
        "scored": scores[-1]["scored"],
        "models": [{"top1_percent": scores[-1]["top1_percent"]}],
        "curve": [[row["samples"], row["top1_percent"]] for row in scores],
    }
    return facts | (_server(state["strategy"]["state"]["servers"][0]) if state["strategy"]["name"] == "asgd" else {})


def lineage_of(config: Any) -> list[dict[str, int | str]]:
    """Compute, from keys alone, the lineage of a run that trains on each sample once per epoch at its position."""
    import numpy as np
    import torch

    from fastvid.format.dataset import Dataset
    from fastvid.load.order.draws import Permutation
    from fastvid.train.parts.replica import Lineage

    keys = Dataset(config.data.path, split=config.data.split).keys.to_pylist()
    positions = np.arange(_samples_per_epoch(config))
    whole = Lineage()
    for epoch in range(config.run.epochs):
        samples = Permutation(len(keys), config.run.seed, epoch).ids(positions)
        batch: Any = SimpleNamespace(position=torch.from_numpy(positions), key=[keys[sample] for sample in samples])
        whole.add(epoch, *Lineage.of(batch))
    return whole.state_dict()


def _server(head: Mapping[str, Any]) -> dict[str, Any]:
    counts = {int(staleness): int(times) for staleness, times in head["staleness"].items()}
    return {
        "acknowledged": head["leases"]["acknowledged"],
        "returned": head["leases"]["returned"],
        "lost": head["lost"],
        "updates": sum(counts.values()),
        "staleness_mean": sum(staleness * times for staleness, times in counts.items()) / sum(counts.values()),
        "staleness": {str(staleness): counts[staleness] for staleness in sorted(counts)},
    }
