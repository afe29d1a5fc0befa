"""Time to an accuracy on the demo's motion dataset with four ranks over a slow wire, by strategy.

Every run trains a smaller edition of the recipe ``motion_tsm`` from scratch, with the real loader, model, trainer and
strategy, on the same clips. Time is counted (`bench.strategies.slow_network`): a rank computes a clip in 4 ms, which is
about its CPU time here, and messages take their latency and their bytes over the rate of a rank's link. All contenders
are looked at every 384 clips; gradients of ddp may travel during the whole backward pass.

An epoch visits the dataset several times: kavg averages model and momentum in full precision at the end of each epoch,
which is rarer on a dataset of a usual size than on this one.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from bench.common.harness import RESULTS, machine_facts, write_json
from bench.strategies.contest import Contender, Goal, Network, Places, compete
from bench.strategies.ranks import RunSpec
from bench.strategies.tables import contest_table

SCHEMA: Final = "fastvid-bench-motion-wire/1"
GOAL: Final = Goal(0.75, accuracy=True, window=1)
RANKS: Final = 4
CLIP_S: Final = 0.004
BATCH: Final = 64
LOOK: Final = 384
EPOCH: Final = 8 * LOOK
NETWORKS: Final = (
    Network("none"),
    Network("100 Mbit/s", delay_s=0.005, bits_per_s=100e6),
    Network("20 Mbit/s", delay_s=0.01, bits_per_s=20e6),
)
WIDTH: Final = 8
# Rates that did best on another seed, of 0.06, 0.1 and 0.14.
WAYS: Final[tuple[tuple[str, str, dict[str, Any], tuple[float, ...]], ...]] = (
    ("ddp", "ddp", {}, (0.1,)),
    ("kavg K=8", "kavg", {"period": 8}, (0.1,)),
    ("kavg K=2", "kavg", {"period": 2}, (0.1,)),
    ("kavg K=2, int4", "kavg", {"period": 2, "compress": "int4"}, (0.06, 0.1)),
    ("kavg K=1, int4", "kavg", {"period": 1, "compress": "int4"}, (0.1,)),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``python -m bench motion_wire``."""
    parser.add_argument("--data", type=Path, required=True, help="the dataset made by `fastvid demo`")
    parser.add_argument("--seeds", type=int, default=5, help="runs per contender (default %(default)s)")
    parser.add_argument("--epochs", type=int, default=3, help=f"of {EPOCH} clips each (default %(default)s)")
    parser.add_argument("--json", type=Path, default=RESULTS / "motion_wire.json", help="result file (%(default)s)")


def contenders(data: Path, epochs: int) -> list[Contender]:
    """Return the contenders; the others are compared with the first."""
    # The dataset twice, in equal shares, because only a mixture has epochs of any length.
    changes = [f"data.mixture.again.path={data}", "data.mixture.again.weight=1", "data.weight=1"]
    changes += [f"data.epoch_samples={EPOCH}", f"run.epochs={epochs}", f"optim.warmup_epochs={LOOK / EPOCH}"]
    base = RunSpec(
        "", clips=epochs * EPOCH, look_clips=LOOK, batch=BATCH, clip_s=CLIP_S, counted=True, data=str(data),
        changes=[f"model.options.width={WIDTH}", *changes],
    )  # fmt: skip
    return [
        Contender(name, RANKS, replace(base, sync=sync, options=options), rates, NETWORKS)
        for name, sync, options, rates in WAYS
    ]


def run(args: argparse.Namespace) -> int:
    """Run the benchmark."""
    record: dict[str, Any] = {
        "schema": SCHEMA, "seeds": args.seeds, "clips": args.epochs * EPOCH, "batch": BATCH, "clip_ms": 1000 * CLIP_S,
        "goal": vars(GOAL), "look_clips": LOOK, "width": WIDTH,
        "networks": {n.name: {"delay_ms": 1000 * n.delay_s, "mbit_per_s": n.bits_per_s / 1e6} for n in NETWORKS},
    }  # fmt: skip

    def done(rows: list[dict[str, Any]]) -> None:
        record["rows"] = rows
        write_json(args.json, {**record, "machine": machine_facts()})

    with Places() as places:
        compete(places.run, contenders(args.data, args.epochs), range(args.seeds), GOAL, done=done)
    print(contest_table(record))
    return 0
