"""Asynchronous SGD with four clients against one rank (Paine et al. 2013).

The toy of `bench.strategies.toy_task` is trained by the real parameter server and clients, in separate processes. A
step on a batch of 32 sleeps 200 ms if one rank computes it alone, which stands in for a GPU, so that clients overlap on
any machine; pushes, fetches and the server's steps take the time that they take here, which depends on the machine's
load, and clips to the goal hardly do. The server applies each gradient at once, as in the paper. The time of one rank
is counted; ddp takes the same steps. "one slow": the last of four clients is five times slower.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Final

from bench.common.harness import options
from bench.strategies.contest import Contender, Goal, Network, clients_table, compete, contest_record, grid
from bench.strategies.ranks import RunSpec

SCHEMA: Final = "fastvid-bench-clients/2"
GOAL: Final = Goal(1.5)
BATCH: Final = 32
LOOK: Final = 512
STEP_S: Final = 0.2
SLOWER: Final = 5.0
# Asynchrony acts like momentum, so all may have less of it; the rates differ by 1 - momentum.
GRID: Final = [*grid(0.02, 0.04, 0.08, momentum=0.9), *grid(0.1, 0.2, 0.4, momentum=0.5)]
_GRADIENTS: Final = {"push": "gradients", "lease_batches": 4}


add_arguments = options("seeds", json="clients.json", clips=(9600, "clips per run"))


def contenders(clips: int) -> list[Contender]:
    """Return the contenders; the others are compared with the first."""
    one = RunSpec("ddp", clips=clips, look_clips=LOOK, batch=BATCH, clip_s=STEP_S / BATCH, counted=True)
    four = replace(one, sync="asgd", options=_GRADIENTS, counted=False)
    return [
        Contender("one rank", 1, one, [Network("none")]),
        Contender("asgd, 4 clients", 4, four, [Network("none")]),
        Contender("asgd, 4 clients, one slow", 4, replace(four, straggler=SLOWER), [Network("none")]),
    ]


def run(args: argparse.Namespace) -> int:
    """Run the benchmark."""
    record = contest_record(SCHEMA, args, GOAL, batch=BATCH, look=LOOK, step_ms=1000 * STEP_S, slower=SLOWER)
    compete(contenders(args.clips), GRID, GOAL, record)
    print(clients_table(record))
    return 0
