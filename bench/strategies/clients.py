"""Asynchronous SGD with 2 and 4 clients against one rank (Paine et al. 2013), beside ddp and kavg on as many ranks.

The toy of `bench.strategies.toy_task` is trained by the real parameter server and clients, in separate processes. A
step on a batch of 32 sleeps 80 ms if one rank computes it alone, which stands in for a GPU, so that clients overlap on
any machine; pushes, fetches and the server's steps take the time that they take here. The server applies each gradient
at once, as in the paper. The time of the others is counted, which favours them: their messages cost nothing but what
the network does. "one slow": the last of four ranks is five times slower. On the slow network messages take about as
long as the step of one of four ranks, except those of the client beside the server.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any, Final

from bench.common.harness import options
from bench.strategies.contest import Contender, Goal, Network, clients_table, compete, contest_record, grid
from bench.strategies.ranks import RunSpec

SCHEMA: Final = "fastvid-bench-clients/2"
GOAL: Final = Goal(1.5)
BATCH: Final = 32
STEP_S: Final = 0.08
SLOWER: Final = 5.0
HERE: Final = Network("none")
WIRE: Final = Network("100 Mbit/s", delay_s=0.005, bits_per_s=100e6)
# Asynchrony acts like momentum, so all may have less of it; the rates differ by 1 - momentum.
GRID: Final = [*grid(0.01, 0.02, 0.04, momentum=0.9), *grid(0.05, 0.1, 0.2, momentum=0.5)]
_ASGD: Final = ("asgd", {"push": "gradients", "lease_batches": 4})
_DDP: Final = ("ddp", {})
_KAVG: Final = ("kavg", {"period": 16})
WAYS: Final[tuple[tuple[str, int, tuple[str, dict[str, Any]], float, tuple[Network, ...]], ...]] = (
    ("one rank", 1, _DDP, 1.0, (HERE,)),
    ("asgd, 2 clients", 2, _ASGD, 1.0, (HERE,)),
    ("asgd, 4 clients", 4, _ASGD, 1.0, (HERE,)),
    ("asgd, 4 clients, slow network", 4, _ASGD, 1.0, (WIRE,)),
    ("asgd, 4 clients, one slow", 4, _ASGD, SLOWER, (HERE,)),
    ("ddp, 4 ranks", 4, _DDP, 1.0, (HERE, WIRE)),
    ("ddp, 4 ranks, one slow", 4, _DDP, SLOWER, (HERE,)),
    ("kavg K=16, 4 ranks", 4, _KAVG, 1.0, (HERE, WIRE)),
    ("kavg K=16, 4 ranks, one slow", 4, _KAVG, SLOWER, (HERE,)),
)


add_arguments = options("seeds", json="clients.json", clips=(9600, "clips per run"))


def contenders(clips: int) -> list[Contender]:
    """Return the contenders; the others are compared with the first."""
    base = RunSpec("", clips=clips, look_clips=16 * BATCH, batch=BATCH, clip_s=STEP_S / BATCH)
    return [
        Contender(
            name, ranks, replace(base, sync=sync, options=own, straggler=slower, counted=sync != "asgd"), networks
        )
        for name, ranks, (sync, own), slower, networks in WAYS
    ]


def run(args: argparse.Namespace) -> int:
    """Run the benchmark."""
    record = contest_record(SCHEMA, args, GOAL, batch=BATCH, step_ms=1000 * STEP_S, slower=SLOWER)
    compete(contenders(args.clips), GRID, GOAL, record)
    print(clients_table(record))
    return 0
