"""Compare strategies on slow networks and with ranks of different speed.

Two ranks learn a small task with the real trainer (`bench.strategies.local_steps`). Each step includes a sleep, so that
its duration hardly depends on the load of the machine. Message delay is a sleep, too; bandwidth is limited by tc
between two network namespaces ("namespaces", needs root), or by a sleep ("wrapper").

    rate        steps/s for rounds of K steps, against 1 / (1 + t_comm / (K t_step))
    target      seconds, updates and bytes until the target held-out loss, on several networks; and the ratio
                t_comm / t_step above which each K beats ddp: measured, and expected from the number of steps it needs
    straggler   four ranks, one of them slower: clips/s as a share of the sum of the ranks' rates, and seconds to the
                target loss
    sweep       four models with different learning rates, trained one after the other or by relay; on several networks,
                and with one of the two ranks slower

A rank of ddp and kavg computes its share of a batch; a client of asgd and a stage of relay compute a whole batch, which
takes proportionally longer. Messages to a parameter server or hub are delayed in both directions, except those of
rank 0, where it runs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import signal
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from bench.common.harness import RESULTS, machine_facts, merge_remeasured, write_json
from bench.common.hosts import Hosts
from bench.strategies.local_steps import Ranks, RunSpec
from bench.strategies.relay_steps import RATES
from bench.strategies.slow_network import SlowLink
from bench.strategies.sync_tables import crossover_table, rate_table, straggler_table, sweep_table, target_table
from fastvid.errors import UsageError

_log = logging.getLogger(__name__)

SCHEMA: Final = "fastvid-bench-sync/2"
RANKS: Final = 2
# Held-out loss in nats; chance is 2.3. All contenders except the longest rounds reach it with these settings.
TARGET: Final = 1.5
OPTIM: Final = {"base_lr": 0.05}


@dataclass(frozen=True)
class Network:
    """The network between the ranks.

    Attributes:
        name: Name in the tables.
        delay_s: Delay before each message, in seconds.
        bits_per_s: Bandwidth; 0 is unlimited.
    """

    name: str
    delay_s: float = 0.0
    bits_per_s: int = 0


NETWORKS: Final = (
    Network("none"),
    Network("5 ms", delay_s=0.005),
    Network("50 ms", delay_s=0.05),
    Network("100 Mbit/s", bits_per_s=100_000_000),
    Network("20 Mbit/s", bits_per_s=20_000_000),
)
CONTENDERS: Final = (
    ("ddp", RunSpec("ddp")),
    ("kavg K=4", RunSpec("kavg", {"period": 4})),
    ("kavg K=16", RunSpec("kavg", {"period": 16})),
    ("kavg K=16 fp16", RunSpec("kavg", {"period": 16, "compress": "fp16"})),
    ("kavg K=64", RunSpec("kavg", {"period": 64})),
    ("asgd gradients", RunSpec("asgd", {"push": "gradients"})),
    ("asgd overlap", RunSpec("asgd", {"push": "gradients", "overlap": True})),
    ("asgd K=8", RunSpec("asgd", {"period": 8})),
)
STRAGGLERS: Final = (1.0, 5.0)
STRAGGLING_RANKS: Final = 4
# With four clients gradients are three updates old; up to this staleness the plain learning rate is better.
STRAGGLING: Final = (
    ("ddp", RunSpec("ddp")),
    ("kavg K=16", RunSpec("kavg", {"period": 16})),
    ("asgd gradients", RunSpec("asgd", {"push": "gradients"})),
    ("asgd bound=4", RunSpec("asgd", {"push": "gradients", "bound": 4})),
    ("asgd staleness-aware", RunSpec("asgd", {"push": "gradients", "staleness_aware": True})),
    ("asgd K=8", RunSpec("asgd", {"period": 8})),
)
SWEEP_NETWORKS: Final = ("none", "50 ms", "20 Mbit/s")
SWEEP: Final = (("ddp, one by one", RunSpec("ddp")), ("kavg K=16, one by one", RunSpec("kavg", {"period": 16})))
SWEEP_STEPS: Final = 96
PARTS: Final = ("rate", "target", "sweep", "straggler")
PERIODS: Final = (1, 2, 4, 8, 16, 32, 64)
DELAYS_S: Final = (0.0, 0.01, 0.04)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``python -m bench sync``."""
    parser.add_argument("--network", choices=("namespaces", "wrapper"), default="namespaces", help="(%(default)s)")
    parser.add_argument("--seeds", type=int, default=1, help="runs per contender (default %(default)s)")
    parser.add_argument("--step-ms", type=float, default=10.0, help="sleep in each step (default %(default)s)")
    parser.add_argument("--steps", type=int, default=384, help="maximum steps per run (default %(default)s)")
    parser.add_argument("--only", choices=PARTS, help="measure one part; keep the others from --json")
    parser.add_argument("--json", type=Path, default=RESULTS / "sync.json", help="result file (%(default)s)")


def efficiency(t_comm: float, t_step: float, k: int) -> float:
    """Return the share of time spent computing with `t_comm` of communication after every `k` steps of `t_step`."""
    return 1 / (1 + t_comm / (k * t_step))


def crossover(more_steps: float, k: int) -> float | None:
    """Return the ratio t_comm / t_step above which rounds of `k` steps beat communication in every step.

    Args:
        more_steps: Steps needed with rounds, relative to those needed with communication in every step.
        k: Steps per round.

    Returns:
        0 if rounds always win, None if they never do.
    """
    if more_steps <= 1:
        return 0.0
    return (more_steps - 1) / (1 - more_steps / k) if more_steps < k else None


def run(args: argparse.Namespace) -> int:
    """Run the benchmark."""
    record: dict[str, Any] = {
        "schema": SCHEMA, "machine": machine_facts(), "ranks": RANKS, "network": args.network,
        "step_sleep_ms": args.step_ms, "target_loss": TARGET, "optim": dict(OPTIM),
    }  # fmt: skip
    parts = PARTS if args.only is None else (args.only,)
    if args.only is not None:
        record = merge_remeasured(json.loads(args.json.read_text()), record, args.only)
    # Remove the namespaces on SIGTERM.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    base = RunSpec("ddp", optim=OPTIM, step_s=args.step_ms / 1000, steps=args.steps)
    if parts != ("straggler",):
        with _wires(args.network) as (hosts, ranks):
            ranks.run(replace(base, steps=8))  # warm-up: the first run pays for imports
            if "rate" in parts:
                record["rate"] = rates(ranks, base)
                print(rate_table(record["rate"]), flush=True)
            if "target" in parts:
                record["target"] = targets(ranks, hosts, base, range(args.seeds))
                print(target_table(record["target"]), flush=True)
            if "sweep" in parts:
                record["sweep"] = sweeps(ranks, hosts, replace(base, steps=SWEEP_STEPS))
                print(sweep_table(record["sweep"]), flush=True)
        record["crossover"] = crossovers(record["target"])
        print(crossover_table(record["crossover"]), flush=True)
    if "straggler" in parts:
        with Ranks(STRAGGLING_RANKS) as ranks:
            ranks.run(replace(base, steps=8))
            record["straggler"] = stragglers(ranks, base, range(args.seeds))
        print(straggler_table(record["straggler"]), flush=True)
    write_json(args.json, record)
    return 0


@contextlib.contextmanager
def _wires(kind: str) -> Iterator[tuple[Hosts | None, Ranks]]:
    if kind == "wrapper":
        with Ranks(RANKS) as ranks:
            yield None, ranks
        return
    with contextlib.ExitStack() as stack:
        try:
            hosts = stack.enter_context(Hosts(RANKS))
        except UsageError as error:
            error.hint = f"{error.hint}; or use --network wrapper, which needs none of them"
            raise
        environment = {"MASTER_ADDR": hosts.addresses[0], **hosts.environment}
        yield hosts, stack.enter_context(Ranks(RANKS, hosts.prefixes, environment))


def rates(ranks: Ranks, base: RunSpec) -> list[dict[str, Any]]:
    """Measure steps/s by K and delay. t_step is measured with the longest rounds, which hardly communicate."""
    spec = replace(base, sync="kavg", steps=PERIODS[-1], target=None)
    found = []
    for delay in DELAYS_S:
        for k in PERIODS:
            # The faster of two runs: other load can only slow a run down.
            runs = [ranks.run(replace(spec, options={"period": k}, link=SlowLink(delay)))[0] for _ in range(2)]
            step_s = min(run["seconds"] / run["steps"] for run in runs)
            found.append({"k": k, "delay_ms": 1000 * delay, "step_ms": 1000 * step_s})
    t_step = next(row["step_ms"] for row in found if row["k"] == PERIODS[-1] and row["delay_ms"] == 0)
    talk = next(row["step_ms"] for row in found if row["k"] == 1 and row["delay_ms"] == 0) - t_step
    for row in found:
        row["efficiency"] = t_step / row["step_ms"]
        row["expected"] = efficiency(max(0.0, talk) + row["delay_ms"], t_step, row["k"])
    return found


def targets(ranks: Ranks, hosts: Hosts | None, base: RunSpec, seeds: Sequence[int]) -> list[dict[str, Any]]:
    """Measure the time to the target loss on each network."""
    found = []
    for network in NETWORKS:
        link = SlowLink(network.delay_s, 0.0 if hosts else network.bits_per_s / 8)
        if hosts:
            hosts.limit(network.bits_per_s)
        for name, spec in CONTENDERS:
            runs = []
            for seed in seeds:
                plan = replace(base, sync=spec.sync, options=spec.options, target=TARGET, link=link, seed=seed)
                runs.append(ranks.run(plan)[0])
            found.append({"network": network.name, "contender": name, **_summary(runs, counted=hosts is not None)})
            _log.info("%s over %s: %s s", name, network.name, found[-1]["seconds"])
    if hosts:
        hosts.limit(0)
    for network in NETWORKS:
        rows = [row for row in found if row["network"] == network.name]
        for row in rows:
            row["times_ddp"] = _ratio(rows[0]["seconds"], row["seconds"])
    return found


def _summary(runs: Sequence[dict[str, Any]], *, counted: bool) -> dict[str, Any]:
    """Return medians over seeds; None if a seed did not reach the target."""
    reached = [run["reached"] for run in runs]
    all_reached = all(reached)
    return {
        "steps": statistics.median(steps for steps, _ in reached) if all_reached else None,
        "seconds": statistics.median(seconds for _, seconds in reached) if all_reached else None,
        "curve": runs[0]["curve"],
        "final_losses": [run["curve"][-1][2] for run in runs],
        "messages": statistics.median(run["messages"] for run in runs),
        "message_mb": statistics.median(run["message_bytes"] for run in runs) / 1e6,
        "wire_mb": statistics.median(run["received_bytes"] for run in runs) / 1e6 if counted else None,
        "step_ms": statistics.median(1000 * run["seconds"] / run["updates"] for run in runs),
        "staleness_mean": statistics.median(_mean(run["staleness"]) for run in runs),
    }


def _mean(staleness: dict[str, int]) -> float:
    pushes = sum(staleness.values())
    return sum(int(value) * times for value, times in staleness.items()) / pushes if pushes else 0.0


def stragglers(ranks: Ranks, base: RunSpec, seeds: Sequence[int]) -> list[dict[str, Any]]:
    """Measure clips/s and the time to the target loss with one slower rank."""
    found = []
    # Rate of a rank alone: its share of a batch per step.
    share, own = base.batch / STRAGGLING_RANKS, base.step_s
    for slower in STRAGGLERS:
        possible = share / own * (STRAGGLING_RANKS - 1 + 1 / slower)
        for name, spec in STRAGGLING:
            runs = []
            for seed in seeds:
                plan = replace(base, sync=spec.sync, options=spec.options, target=TARGET, straggler=slower, seed=seed)
                runs.append(ranks.run(plan)[0])
            row = {"straggler": slower, "contender": name, **_summary(runs, counted=False)}
            row["clips_per_s"] = 1000 * base.batch / row["step_ms"]
            row["of_sum_of_rates"] = row["clips_per_s"] / possible
            found.append(row)
            _log.info("%s, one rank %g times slower: %s s", name, slower, row["seconds"])
    return found


def sweeps(ranks: Ranks, hosts: Hosts | None, base: RunSpec) -> list[dict[str, Any]]:
    """Measure the time of a sweep over learning rates."""
    found: list[dict[str, Any]] = []
    places = [(network, 1.0, network.name) for network in NETWORKS if network.name in SWEEP_NETWORKS]
    places += [(NETWORKS[0], factor, f"straggler {factor:g} x") for factor in STRAGGLERS if factor > 1]
    for network, straggler, label in places:
        link = SlowLink(network.delay_s, 0.0 if hosts else network.bits_per_s / 8)
        if hosts:
            hosts.limit(network.bits_per_s)
        rows = []
        here = replace(base, link=link, straggler=straggler)
        for name, spec in SWEEP:
            rate = OPTIM["base_lr"]
            plans = [
                replace(here, sync=spec.sync, options=spec.options, optim={"base_lr": rate * factor})
                for factor in RATES
            ]
            runs = [ranks.run(plan)[0] for plan in plans]
            rows.append(_sweep(name, label, runs, [run["curve"][-1][2] for run in runs]))
        (run, *_) = ranks.run(replace(here, sync="relay"))
        rows.append(_sweep("relay", label, [run], run["losses"]))
        for row in rows:
            row["times_ddp"] = rows[0]["seconds"] / row["seconds"]
            if hosts is None:
                row["wire_mb"] = None
            _log.info("sweep by %s over %s: %.1f s", row["contender"], label, row["seconds"])
        found += rows
    if hosts:
        hosts.limit(0)
    return found


def _sweep(name: str, network: str, runs: Sequence[dict[str, Any]], losses: Sequence[float]) -> dict[str, Any]:
    return {
        "network": network,
        "contender": name,
        "seconds": sum(run["seconds"] for run in runs),
        "wire_mb": sum(run["received_bytes"] for run in runs) / 1e6,
        "final_losses": list(losses),
    }


def crossovers(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return for each kavg contender its steps relative to ddp, where it should win because of them, and where it did.

    t_step is ddp's step time without network delay; t_comm is the extra time of a step of ddp on a network.
    """
    ddp = {row["network"]: row for row in rows if row["contender"] == "ddp"}
    t_step = ddp[NETWORKS[0].name]["step_ms"]
    ratios = {name: (row["step_ms"] - t_step) / t_step for name, row in ddp.items()}
    found = []
    for name, spec in CONTENDERS[1:]:
        if spec.sync != "kavg":
            continue
        mine = {row["network"]: row for row in rows if row["contender"] == name}
        both = [n for n in mine if mine[n]["steps"] and ddp[n]["steps"]]
        more = statistics.median(mine[n]["steps"] / ddp[n]["steps"] for n in both) if both else None
        won = {n: mine[n]["times_ddp"] is not None and mine[n]["times_ddp"] > 1 for n in mine}
        found.append(
            {
                "contender": name,
                "steps_over_ddp": more,
                "expected_ratio": None if more is None else crossover(more, int(spec.options["period"])),
                "wins_at": {n: ratios[n] for n in mine if won[n]},
                "loses_at": {n: ratios[n] for n in mine if not won[n]},
            }
        )
    return found


def _ratio(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a / b
