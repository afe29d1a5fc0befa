"""Asynchronous SGD with 1, 2 and 4 clients against one (Paine et al. 2013), beside ddp and kavg on as many ranks.

The toy of `bench.strategies.toy_task` is trained by the real parameter server and clients, in separate processes. A
step on a batch of 32 sleeps 40 ms if one rank computes it alone, which stands in for a GPU, so that clients overlap on
any machine; pushes, fetches and the server's steps take the time that they take here. The server applies each gradient
at once, as in the paper. "one slow": the last of four ranks is five times slower. "20 Mbit/s": messages are delayed,
except those of the client beside the server.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from bench.common.harness import options
from bench.strategies.contest import Contender, Goal, Network, clients_table, compete, contest_record
from bench.strategies.ranks import RunSpec

SCHEMA: Final = "fastvid-bench-clients/1"
GOAL: Final = Goal(1.5)
BATCH: Final = 32
STEP_S: Final = 0.04
SLOWER: Final = 5.0
HERE: Final = Network("none")
WIRE: Final = Network("20 Mbit/s", delay_s=0.01, bits_per_s=20e6)
# Asynchrony acts like momentum, so more clients that push gradients get less of it.
_ONE: Final = ({"momentum": 0.9}, (0.0125, 0.025))
_TWO: Final = ({"momentum": 0.7}, (0.05,))
_FOUR: Final = ({"momentum": 0.5}, (0.05, 0.1))
_SYNC: Final = ({"momentum": 0.9}, (0.025,))
_GRADIENTS: Final = {"push": "gradients", "lease_batches": 4}


add_arguments = options("seeds", json="clients.json", clips=(12800, "clips per run"))


def contenders(clips: int) -> list[Contender]:
    """Return the contenders; the others are compared with the first."""
    base = RunSpec("asgd", clips=clips, look_clips=16 * BATCH, batch=BATCH, clip_s=STEP_S / BATCH)
    slow = {"straggler": SLOWER}

    def one(
        name: str, ranks: int, sync: str, options: Mapping[str, Any], how: tuple[Mapping[str, Any], tuple[float, ...]],
        network: Network = HERE, **facts: Any,
    ) -> Contender:  # fmt: skip
        spec = replace(base, sync=sync, options=options, optim=how[0], **facts)
        return Contender(name, ranks, spec, how[1], [network])

    return [
        one("one client", 1, "asgd", _GRADIENTS, _ONE),
        one("gradients, 2 clients", 2, "asgd", _GRADIENTS, _TWO),
        one("gradients, 4 clients", 4, "asgd", _GRADIENTS, _FOUR),
        one("ddp, 4 ranks", 4, "ddp", {}, _SYNC),
        one("kavg K=16, 4 ranks", 4, "kavg", {"period": 16}, _SYNC),
        one("gradients, 4 clients, one slow", 4, "asgd", _GRADIENTS, (_FOUR[0], (0.05,)), **slow),
        one("ddp, 4 ranks, one slow", 4, "ddp", {}, _SYNC, **slow),
        one("kavg K=16, 4 ranks, one slow", 4, "kavg", {"period": 16}, _SYNC, **slow),
        one("gradients, 4 clients, 20 Mbit/s", 4, "asgd", _GRADIENTS, (_FOUR[0], (0.05,)), WIRE),
    ]


def run(args: argparse.Namespace) -> int:
    """Run the benchmark."""
    record = contest_record(SCHEMA, args, GOAL, batch=BATCH, step_ms=1000 * STEP_S, slower=SLOWER)
    compete(contenders(args.clips), GOAL, record)
    print(clients_table(record))
    return 0
