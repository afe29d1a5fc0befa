"""K-step averaging with AdamW and an adaptive batch against one rank and ddp (Cong et al. 2018), on several networks.

The toy of `bench.strategies.toy_task` is trained by the real trainer and strategies on four ranks. Time is counted
(`bench.strategies.slow_network`): 2 ms a clip on a rank, the latency of each message, and its bytes over the rate of a
rank's link; gradients of ddp may travel during the whole backward pass. ``--wire`` checks the counted time against real
time over network namespaces limited by tc (needs root).
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any, Final

from bench.common.harness import options
from bench.common.hosts import Hosts
from bench.strategies.contest import Contender, Goal, Network, compete, contest_record, contest_table, grid
from bench.strategies.ranks import Ranks, RunSpec

SCHEMA: Final = "fastvid-bench-averaging/2"
GOAL: Final = Goal(1.4)
RANKS: Final = 4
BATCH: Final = 64
LOOK: Final = 512
CLIP_S: Final = 0.002
GRID: Final = grid(0.002, 0.004, 0.008)
NETWORKS: Final = (
    Network("none"),
    Network("1 Gbit/s", delay_s=0.001, bits_per_s=1e9),
    Network("100 Mbit/s", delay_s=0.005, bits_per_s=100e6),
    Network("20 Mbit/s", delay_s=0.01, bits_per_s=20e6),
)
_GROWING: Final = {"batch": "noise", "batch_window": 8, "batch_max": 256}
_SCHEDULED: Final = {"batch": "schedule", "batch_at": "0.4,0.7", "batch_lr": "keep"}
WAYS: Final[tuple[tuple[str, int, int, str, dict[str, Any]], ...]] = (
    ("one rank", 1, BATCH, "ddp", {}),
    ("ddp", RANKS, BATCH, "ddp", {}),
    ("ddp, batch 128", RANKS, 128, "ddp", {}),
    ("kavg K=8", RANKS, BATCH, "kavg", {"period": 8}),
    ("kavg K=32", RANKS, BATCH, "kavg", {"period": 32}),
    ("kavg K=8, batch=noise", RANKS, BATCH, "kavg", {"period": 8, **_GROWING}),
    ("kavg K=8, batch=schedule", RANKS, BATCH, "kavg", {"period": 8, **_SCHEDULED}),
    ("kavg K=8, int4", RANKS, BATCH, "kavg", {"period": 8, "compress": "int4"}),
)
_CHECKED: Final = ("ddp", "kavg K=8", "kavg K=8, int4")


add_arguments = options(
    "seeds",
    json="averaging.json",
    clips=(12288, "clips per run"),
    at_once=(2, "runs at the same time, which changes no result"),
    wire=(False, "compare the counted time with real time instead, over network namespaces; needs root"),
)


def contenders(clips: int) -> list[Contender]:
    """Return the contenders; all are looked at after the same clips."""
    base = RunSpec("", clips=clips, look_clips=LOOK, clip_s=CLIP_S, counted=True, optim={"name": "adamw"})
    return [
        Contender(name, ranks, replace(base, sync=sync, batch=batch, options=options), NETWORKS)
        for name, ranks, batch, sync, options in WAYS
    ]


def run(args: argparse.Namespace) -> int:
    """Run the benchmark."""
    if args.wire:
        for row in wire():
            print(row)
        return 0
    record = contest_record(SCHEMA, args, GOAL, batch=BATCH, look=LOOK, clip_ms=1000 * CLIP_S)
    record["networks"] = {network.name: network.as_row() for network in NETWORKS}
    compete(contenders(args.clips), GRID, GOAL, record, args.at_once)
    print(contest_table(record))
    return 0


def wire() -> list[dict[str, Any]]:
    """Return seconds and bytes of short runs: counted, and in real time over network namespaces at the same rate."""
    network = NETWORKS[-1]
    checked = [one for one in contenders(1536) if one.name in _CHECKED]
    found = []
    with Hosts(RANKS) as hosts:
        hosts.limit(int(network.bits_per_s))
        environment = {"MASTER_ADDR": hosts.addresses[0], **hosts.environment}
        # A message takes its latency beside what the kernel delays.
        with Ranks(RANKS) as counting, Ranks(RANKS, hosts.prefixes, environment) as real:
            for one in checked:
                spec = replace(one.with_optim(GRID[0], 0), look_clips=10**9)
                counted = counting.run(replace(spec, links=[replace(network, delay_s=0.0).link]))[0]
                measured = real.run(replace(spec, counted=False))
                found.append({
                    "contender": one.name, "counted_s": counted["seconds"][0], "real_s": measured[0]["seconds"][0],
                    "counted_mb": counted["wire_bytes"] / 1e6,
                    "received_mb": max(result["received_bytes"] for result in measured) / 1e6,
                })  # fmt: skip
    return found
