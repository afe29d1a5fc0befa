"""A sweep by relay against task-parallel training that moves the data over a slow wire (Chen et al. 2015).

Two workers train four models for three epochs (`bench.strategies.rank_run`), on datasets on both sides of the rule:
per epoch relay moves every model's state once to each of S parts, and task-parallel training every byte of the dataset
D once to each model, so that relay moves less if and only if |state| < |D| / S. Every worker's link has the same rate,
its latency included; a step sleeps in place of a GPU. All ways must end with the same weights bit by bit.
"""

from __future__ import annotations

import argparse
import logging
from dataclasses import replace
from typing import Any, Final

from bench.common.harness import Record, machine_facts, options
from bench.strategies.contest import Network, migration_table
from bench.strategies.rank_run import RATES
from bench.strategies.ranks import Ranks, RunSpec
from bench.strategies.toy_task import CLIP_BYTES

_log = logging.getLogger(__name__)

SCHEMA: Final = "fastvid-bench-migration/1"
WORKERS: Final = 2
EPOCHS: Final = 3
NETWORK: Final = Network("20 Mbit/s", delay_s=0.01, bits_per_s=20e6)
CLIPS: Final = (1024, 8192, 32768)
WAYS: Final = (
    ("relay", "relay", False),
    ("data moves", "migrate", False),
    ("data moves once and is kept", "migrate", True),
)


add_arguments = options("seeds", json="migration.json", clips=(list(CLIPS), "sizes of the dataset"))


def run(args: argparse.Namespace) -> int:
    """Run the benchmark; return 1 if the ways end with different weights."""
    record = Record(SCHEMA, args, "seeds", workers=WORKERS, models=len(RATES), epochs=EPOCHS)
    record["network"] = {"name": NETWORK.name, **NETWORK.as_row()}
    found: dict[tuple[int, str], list[list[dict[str, Any]]]] = {}
    with Ranks(WORKERS) as ranks:
        for seed in range(args.seeds):
            for clips in args.clips:
                for name, sync, cached in WAYS:
                    spec = replace(_spec(clips), sync=sync, cached=cached, seed=seed)
                    found.setdefault((clips, name), []).append(ranks.run(spec))
                    _log.info("%s, %d clips, seed %d: %.1f s", name, clips, seed, found[clips, name][-1][0]["seconds"])
            record["rows"] = [_row(clips, name, runs) for (clips, name), runs in found.items()]
            record["equal_weights"] = _equal(found, args.clips)
            record["machine"] = machine_facts()
            record.save()
    print(migration_table(record))
    return 0 if record["equal_weights"] else 1


def _spec(clips: int) -> RunSpec:
    return RunSpec(
        "relay", optim={"base_lr": 0.1}, batch=512, clips=clips, dataset_clips=clips, clip_s=0.00005, epochs=EPOCHS,
        links=[NETWORK.link],
    )  # fmt: skip


def _row(clips: int, name: str, runs: list[list[dict[str, Any]]]) -> dict[str, Any]:
    heads = [run[0] for run in runs]
    return {
        "clips": clips,
        "way": name,
        "dataset_mb": clips * CLIP_BYTES / 1e6,
        "part_mb": clips * CLIP_BYTES / WORKERS / 1e6,
        "state_mb": max(head["state_bytes"] for head in heads) / 1e6,
        "seconds": [round(head["seconds"], 3) for head in heads],
        "data_wire_mb": [sum(rank["data_bytes"] for rank in run) / 1e6 for run in runs],
        "state_wire_mb": [sum(rank["state_wire_bytes"] for rank in run) / 1e6 for run in runs],
        "losses": [head["losses"] for head in heads],
    }


def _equal(found: dict[tuple[int, str], list[list[dict[str, Any]]]], sizes: list[int]) -> bool:
    """Return whether all ways ended with the same weights, for every dataset and seed."""
    for clips in sizes:
        for runs in zip(*(found[clips, name] for name, _, _ in WAYS), strict=True):
            if len({tuple(run[0]["digests"]) for run in runs}) > 1:
                return False
    return True
