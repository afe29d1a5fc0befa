"""Measure what a push and a fetch cost the parameter server of ``sync=asgd``, and how long they keep other clients out.

One client pushes to a server in the same process over a real connection. CPU time is that of the server's thread, from
the end of receiving to the end of the reply, plus the checksum of what it receives. "locked" is the CPU time for which
it holds the lock that all clients share.

    gradients           each push is a step of the server's optimizer
    deltas, pending     each push waits for a quorum, and is added to what this client has pushed before
    deltas, merged      each push is merged at once, with Nesterov momentum
"""

from __future__ import annotations

import argparse
import functools
import statistics
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, Final

from bench.common.harness import RESULTS, machine_facts, write_json

SCHEMA: Final = "fastvid-bench-server/1"
PARAMETERS: Final = 24_327_632
"""Weights of TSM-ResNet-50 with 400 classes."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``python -m bench server``."""
    parser.add_argument("--size", type=int, default=PARAMETERS, help="weights, float32 (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=9, help="pushes and fetches per row (default %(default)s)")
    parser.add_argument("--json", type=Path, default=RESULTS / "server.json", help="result file (%(default)s)")


class TimedLock:
    """A condition that sums the CPU time for which each thread holds it."""

    def __init__(self, inner: threading.Condition) -> None:
        self._inner, self._own = inner, threading.local()
        self.held_s = 0.0

    def __enter__(self) -> None:
        self._inner.__enter__()
        depth = getattr(self._own, "depth", 0)
        self._own.depth = depth + 1
        if not depth:
            self._own.since = time.thread_time()

    def __exit__(self, *error: Any) -> None:
        self._own.depth -= 1
        if not self._own.depth:
            self.held_s += time.thread_time() - self._own.since
        self._inner.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def run(args: argparse.Namespace) -> int:
    """Run the benchmark."""
    import torch
    from torch.optim import SGD, AdamW

    torch.set_num_threads(1)
    record: dict[str, Any] = {"schema": SCHEMA, "machine": machine_facts(), "size": args.size, "rounds": args.rounds}
    rules = {
        "gradients, SGD": functools.partial(SGD, lr=0.0),
        "gradients, SGD with momentum": functools.partial(SGD, lr=0.0, momentum=0.9),
        "gradients, AdamW": functools.partial(AdamW, lr=0.0),
    }
    rows = {name: measure(args.size, args.rounds, rule) for name, rule in rules.items()}
    rows["deltas, pending"] = measure(args.size, args.rounds, quorum=2)
    rows["deltas, merged at once"] = measure(args.size, args.rounds)
    record["rows"] = rows
    head = f"CPU ms for {args.size:,} weights"
    print(f"{head:36} {'push':>7} {'locked':>7} {'fetch':>7} {'locked':>7}")
    for name, row in rows.items():
        cells = (row["push_ms"], row["push_locked_ms"], row["fetch_ms"], row["fetch_locked_ms"])
        print(f"{name:36} {' '.join(f'{cell:7.1f}' for cell in cells)}")
    write_json(args.json, record)
    return 0


def measure(size: int, rounds: int, rule: Any = None, quorum: int = 1) -> dict[str, float]:
    """Return medians in ms of CPU time."""
    import torch
    from fastvid.train.strategies.asgd.merger import Merger, OuterStep, Quorum

    from fastvid.train.strategies.asgd.client import MessageHeader, ParameterClient
    from fastvid.train.strategies.asgd.server import Server
    from fastvid.train.strategies.asgd.weights import WeightShard
    from fastvid.train.strategies.link import crc32

    outer = OuterStep()
    shard = WeightShard(0, size, rule or outer.rule)
    server: Any = Server(shard, merger=None if rule else Merger(shard, Quorum(quorum), outer.rate))
    server.publish_ports([server.address.port])
    lock = server._changed = TimedLock(server._changed)
    handle, spent = server._handle, defaultdict[str, list[tuple[float, float]]](list)

    def timed(link: Any, number: int, asked: MessageHeader, buffer: torch.Tensor) -> torch.Tensor:
        began, held = time.thread_time(), lock.held_s
        if asked.clips:
            crc32(buffer)  # as the link did when it received the push
        found: torch.Tensor = handle(link, number, asked, buffer)
        spent[asked.kind.name].append((1000 * (time.thread_time() - began), 1000 * (lock.held_s - held)))
        return found

    server._handle = timed
    clients = [ParameterClient(server.address, size) for _ in range(2)]
    weights, sent = torch.zeros(size), torch.randn(size, generator=torch.Generator().manual_seed(0)).mul_(1e-3)
    for client in clients:
        client.join(weights)
    spent.clear()
    for _ in range(rounds):
        if rule is None:
            clients[0].push_delta(sent, 1)
        else:
            clients[0].push(sent, 0.1)
        clients[0].fetch(weights)
    for client in clients:
        client.leave()
    server.close()
    found = {}
    for name, kind in (("push", "DELTA" if rule is None else "GRADIENT"), ("fetch", "FETCH")):
        cpu, locked = zip(*spent[kind], strict=True)
        found |= {f"{name}_ms": statistics.median(cpu), f"{name}_locked_ms": statistics.median(locked)}
    return found
