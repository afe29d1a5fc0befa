"""Time to an accuracy on the demo's motion dataset with four ranks over a slow wire, by strategy.

Every run trains a smaller edition of the recipe ``motion_tsm`` from scratch, with the real loader, model, trainer and
strategy, on the same clips. Time is counted (`bench.strategies.slow_network`): a rank computes a clip in 8 ms, which is
about its CPU time here, and messages take their latency and their bytes over the rate of a rank's link. All contenders
are looked at after every epoch of 384 clips; gradients of ddp may travel during the whole backward pass.
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
from fastvid.errors import UsageError

SCHEMA: Final = "fastvid-bench-motion-wire/1"
GOAL: Final = Goal(0.9, accuracy=True, window=1)
RANKS: Final = 4
CLIP_S: Final = 0.008
BATCH: Final = 16
EPOCH: Final = 384
NETWORKS: Final = (
    Network("none"),
    Network("100 Mbit/s", delay_s=0.005, bits_per_s=100e6),
    Network("20 Mbit/s", delay_s=0.01, bits_per_s=20e6),
)
RECIPE: Final = ("model.options.width=8", "data.spatial=random_crop:48")
WAYS: Final[tuple[tuple[str, str, dict[str, Any]], ...]] = (
    ("ddp", "ddp", {}),
    ("kavg K=8", "kavg", {"period": 8}),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``python -m bench motion_wire``."""
    parser.add_argument("--data", type=Path, required=True, help="the dataset made by `fastvid demo`")
    parser.add_argument("--seeds", type=int, default=5, help="runs per contender (default %(default)s)")
    parser.add_argument("--epochs", type=int, default=16, help="epochs per run (default %(default)s)")
    parser.add_argument("--json", type=Path, default=RESULTS / "motion_wire.json", help="result file (%(default)s)")
