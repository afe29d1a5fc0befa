"""The demo's motion dataset from scratch by each way of agreeing, with the sample budget of ddp.

    python -m bench motion_sync asgd --data runs/demo/shards

kavg and asgd train the recipe ``motion_tsm``, relay the three models of ``motion_sweep``. A run that is in its folder
goes on, and one that is over is recorded as it is. Relay needs a dataset of at least two shards.
"""

from __future__ import annotations

import argparse
import logging
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench.harness import RESULTS, machine_facts, write_json
from fastvid.train import metrics, recipes
from fastvid.train.checkpoint import Checkpoints, decode

_log = logging.getLogger(__name__)

SCHEMA: Final = "fastvid-bench-motion-sync/1"
TARGET_PERCENT: Final = 95.0


@dataclass(frozen=True)
class Plan:
    """A run.

    Attributes:
        recipe: Its recipe.
        ranks: Processes.
        changes: Of the recipe.
    """

    recipe: str
    ranks: int
    changes: tuple[str, ...] = ()


PLANS: Final = {
    "ddp": Plan("motion_tsm", 2, ("sync=ddp",)),
    # Post-local: rounds of 8 steps after four epochs of averaged gradients, which is past the warm-up of the rate.
    "kavg": Plan("motion_tsm", 2, ("sync=kavg", "sync_options.period=8", "sync_options.local_after=4")),
    # A warm start, then gradients two updates old; less momentum, because asynchrony acts like some.
    "asgd": Plan(
        "motion_tsm", 3,
        ("sync=asgd", "sync_options.warm_up=200", "sync_options.lease_batches=4", "optim.momentum=0.85",
         "data.num_threads=1"),
    ),
    "relay": Plan("motion_sweep", 2),
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``python -m bench motion_sync``."""
    parser.add_argument("sync", choices=list(PLANS), help="how replicas agree")
    parser.add_argument("--data", type=Path, required=True, help="the dataset that fastvid demo makes")
    parser.add_argument("--out", type=Path, default=Path("runs/bench-motion-sync"), help="folder of runs (%(default)s)")
    parser.add_argument("--json", type=Path, help="result file (default: motion_SYNC.json among the results)")


def run(args: argparse.Namespace) -> int:
    """Trains, records, and returns 1 where a model is below the target."""
    plan, out = PLANS[args.sync], args.out / args.sync
    changes = (*plan.changes, f"data.path={args.data}", f"run.out={out}")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(plan.ranks)]
    environment = os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    done = subprocess.run(
        [*command, "-m", "fastvid.train", plan.recipe, *changes], env=environment, stdout=subprocess.PIPE, check=False
    )
    if done.returncode:
        return 1
    record = {
        "schema": SCHEMA,
        "machine": machine_facts(),
        "sync": args.sync,
        "recipe": plan.recipe,
        "ranks": plan.ranks,
        "changes": list(plan.changes),
        "target_percent": TARGET_PERCENT,
        **(sweep(out) if args.sync == "relay" else single(out)),
    }
    write_json(args.json or RESULTS / f"motion_{args.sync}.json", record)
    top1 = [model["top1_percent"] for model in record["models"]]
    print(f"{args.sync}: {', '.join(f'{value:.2f} %' for value in top1)} of {record['scored']} held-out videos")
    return 0 if min(top1) >= TARGET_PERCENT else 1


def single(out: Path) -> dict[str, Any]:
    """What a run of one model left."""
    rows = metrics.read(out / metrics.METRICS_FILE)
    scores = metrics.curve(rows, "eval")
    found = Checkpoints(str(out / "checkpoints")).newest()
    assert found is not None
    state = decode(found.data, found.name)
    facts: dict[str, Any] = {
        "samples": state["replica"]["samples"],
        "samples_by_epoch": [entry["samples"] for entry in state["lineage"]],
        "scored": scores[-1]["scored"],
        "models": [{"top1_percent": scores[-1]["top1_percent"]}],
        "curve": [[row["samples"], row["top1_percent"]] for row in scores],
    }
    servers = state["strategy"]["state"].get("servers") if state["strategy"]["name"] == "asgd" else None
    return facts | (_staleness(servers[0]) if servers else {})


def _staleness(head: Mapping[str, Any]) -> dict[str, Any]:
    counts = {int(staleness): int(times) for staleness, times in head["staleness"].items()}
    return {
        "updates": sum(counts.values()),
        "staleness_mean": sum(staleness * times for staleness, times in counts.items()) / sum(counts.values()),
        "staleness": {str(staleness): counts[staleness] for staleness in sorted(counts)},
        "pushes_by_client": {str(number): client["pushes"] for number, client in head["clients"].items()},
    }


def sweep(out: Path) -> dict[str, Any]:
    """What a sweep left."""
    import json

    results = json.loads((out / "results.json").read_text())
    rows = metrics.read(out / metrics.METRICS_FILE)
    visits = {(row["model"], row["epoch"], row["partition"]): row for row in rows if row["kind"] == "visit"}
    configs = recipes.load_all("motion_sweep")
    return {
        "scored": next(row["scored"] for row in reversed(rows) if row["kind"] == "eval"),
        "partitions": results["partitions"],
        "order": results["order"],
        "dataset_bytes": results["dataset_bytes"],
        "lost": results["lost"],
        "models": [
            {
                "model": model["model"],
                "top1_percent": model["score"],
                "scores": model["scores"],
                "settings": model["settings"],
                "visits": len(model["visits"]),
                "samples": sum(row["samples"] for (number, _, _), row in visits.items() if number == model["model"]),
            }
            for model in results["models"]
        ],
        "epochs": configs[0].run.epochs,
    }
