"""What K-step averaging gains over gradients averaged in every step, as the network gets slower, and where it loses.

Two ranks learn a small task under the real trainer (`bench.local_steps`). A step is padded by a sleep, so that it takes
as long on a busy machine as on an idle one. The delay of a message is a sleep as well; bandwidth is limited by tc on a
cable between two network namespaces ("namespaces", needs root), or by a sleep ("wrapper").

    rate      steps a second for rounds of K steps, against 1 / (1 + t_comm / (K t_step))
    target    seconds, steps and bytes until the held-out loss is reached, on several networks; and the ratio
              t_comm / t_step beyond which each K wins over ddp: measured, and expected from the steps it needs
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import signal
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from bench.harness import RESULTS, machine_facts, write_json
from bench.local_steps import Job, Link, Ranks
from bench.sync_network import Cable

_log = logging.getLogger(__name__)

SCHEMA: Final = "fastvid-bench-sync/1"
RANKS: Final = 2
# Held-out loss that all contenders but the longest rounds reach with these settings, in nats; chance is 2.3.
TARGET: Final = 1.5
OPTIM: Final = {"base_lr": 0.05}


@dataclass(frozen=True)
class Network:
    """What lies between the ranks.

    Attributes:
        name: For the table.
        delay_s: Before each message.
        bits_per_s: 0 for no limit.
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
    ("ddp", Job("ddp")),
    ("kavg K=4", Job("kavg", {"period": 4})),
    ("kavg K=16", Job("kavg", {"period": 16})),
    ("kavg K=16 fp16", Job("kavg", {"period": 16, "compress": "fp16"})),
    ("kavg K=64", Job("kavg", {"period": 64})),
)
PERIODS: Final = (1, 2, 4, 8, 16, 32, 64)
DELAYS_S: Final = (0.0, 0.01, 0.04)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``python -m bench sync``."""
    parser.add_argument("--network", choices=("namespaces", "wrapper"), default="namespaces", help="(%(default)s)")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each kind (default %(default)s)")
    parser.add_argument("--step-ms", type=float, default=10.0, help="sleep in each step (default %(default)s)")
    parser.add_argument("--steps", type=int, default=384, help="most steps of a run (default %(default)s)")
    parser.add_argument("--json", type=Path, default=RESULTS / "sync.json", help="result file (%(default)s)")


def efficiency(t_comm: float, t_step: float, k: int) -> float:
    """Share of its time that a rank computes when it talks for `t_comm` after every `k` steps of `t_step`."""
    return 1 / (1 + t_comm / (k * t_step))


def crossover(more_steps: float, k: int) -> float | None:
    """The ratio t_comm / t_step from which rounds of `k` steps are faster than talking in every step.

    Args:
        more_steps: Steps that the rounds need, over those that talking in every step needs.
        k: Steps of a round.

    Returns:
        0 where the rounds always win, None where they never do.
    """
    if more_steps <= 1:
        return 0.0
    return (more_steps - 1) / (1 - more_steps / k) if more_steps < k else None


def run(args: argparse.Namespace) -> int:
    """Runs the benchmark."""
    record: dict[str, Any] = {
        "schema": SCHEMA, "machine": machine_facts(), "ranks": RANKS, "network": args.network,
        "step_sleep_ms": args.step_ms, "target_loss": TARGET, "optim": dict(OPTIM),
    }  # fmt: skip
    # So that the namespaces go when this is told to end.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    base = Job("ddp", optim=OPTIM, step_s=args.step_ms / 1000, steps=args.steps)
    with _wires(args.network) as (cable, ranks):
        ranks.run(replace(base, steps=8))  # the first job pays for imports
        record["rate"] = rates(ranks, base)
        print(rate_table(record["rate"]), flush=True)
        record["target"] = targets(ranks, cable, base, range(args.seeds))
        print(target_table(record["target"]), flush=True)
    record["crossover"] = crossovers(record["target"])
    print(crossover_table(record["crossover"]), flush=True)
    write_json(args.json, record)
    return 0


@contextlib.contextmanager
def _wires(kind: str) -> Iterator[tuple[Cable | None, Ranks]]:
    if kind == "wrapper":
        with Ranks(RANKS) as ranks:
            yield None, ranks
        return
    with Cable() as cable, Ranks(RANKS, cable.prefixes, cable.environment) as ranks:
        yield cable, ranks


def rates(ranks: Ranks, base: Job) -> list[dict[str, Any]]:
    """Steps a second by K and delay. t_step is that of the longest rounds without delay, which hardly talk."""
    job = replace(base, sync="kavg", steps=PERIODS[-1], target=None)
    found = []
    for delay in DELAYS_S:
        for k in PERIODS:
            # The faster of two: what else the machine does only slows.
            runs = [ranks.run(replace(job, options={"period": k}, link=Link(delay)))[0] for _ in range(2)]
            step_s = min(run["seconds"] / run["steps"] for run in runs)
            found.append({"k": k, "delay_ms": 1000 * delay, "step_ms": 1000 * step_s})
    t_step = next(row["step_ms"] for row in found if row["k"] == PERIODS[-1] and row["delay_ms"] == 0)
    talk = next(row["step_ms"] for row in found if row["k"] == 1 and row["delay_ms"] == 0) - t_step
    for row in found:
        row["efficiency"] = t_step / row["step_ms"]
        row["expected"] = efficiency(max(0.0, talk) + row["delay_ms"], t_step, row["k"])
    return found


def targets(ranks: Ranks, cable: Cable | None, base: Job, seeds: Sequence[int]) -> list[dict[str, Any]]:
    """Time to the target on each network."""
    found = []
    for network in NETWORKS:
        link = Link(network.delay_s, 0.0 if cable else network.bits_per_s / 8)
        if cable:
            cable.limit(network.bits_per_s)
        for name, job in CONTENDERS:
            runs = []
            for seed in seeds:
                plan = replace(base, sync=job.sync, options=job.options, target=TARGET, link=link, seed=seed)
                runs.append(ranks.run(plan)[0])
            found.append({"network": network.name, "contender": name, **_summary(runs, counted=cable is not None)})
            _log.info("%s over %s: %s s", name, network.name, found[-1]["seconds"])
    if cable:
        cable.limit(0)
    for network in NETWORKS:
        rows = [row for row in found if row["network"] == network.name]
        for row in rows:
            row["times_ddp"] = _ratio(rows[0]["seconds"], row["seconds"])
    return found


def _summary(runs: Sequence[dict[str, Any]], *, counted: bool) -> dict[str, Any]:
    """Medians over seeds; None where a seed did not reach the target."""
    reached = [run["reached"] for run in runs]
    all_reached = all(reached)
    return {
        "steps": statistics.median(steps for steps, _ in reached) if all_reached else None,
        "seconds": statistics.median(seconds for _, seconds in reached) if all_reached else None,
        "final_losses": [run["curve"][-1][2] for run in runs],
        "all_reduces": statistics.median(run["all_reduces"] for run in runs),
        "all_reduced_mb": statistics.median(run["all_reduced_bytes"] for run in runs) / 1e6,
        "wire_mb": statistics.median(run["received_bytes"] for run in runs) / 1e6 if counted else None,
        "step_ms": statistics.median(1000 * run["seconds"] / run["steps"] for run in runs),
    }


def crossovers(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each contender, how many more steps it needs than ddp, where that says it should win, and where it did.

    t_comm is what a step of ddp takes longer on a network than without one; t_step is a step of ddp without one.
    """
    ddp = {row["network"]: row for row in rows if row["contender"] == "ddp"}
    t_step = ddp[NETWORKS[0].name]["step_ms"]
    ratios = {name: (row["step_ms"] - t_step) / t_step for name, row in ddp.items()}
    found = []
    for name, job in CONTENDERS[1:]:
        mine = {row["network"]: row for row in rows if row["contender"] == name}
        both = [n for n in mine if mine[n]["steps"] and ddp[n]["steps"]]
        more = statistics.median(mine[n]["steps"] / ddp[n]["steps"] for n in both) if both else None
        won = {n: mine[n]["times_ddp"] is not None and mine[n]["times_ddp"] > 1 for n in mine}
        found.append(
            {
                "contender": name,
                "steps_over_ddp": more,
                "expected_ratio": None if more is None else crossover(more, int(job.options["period"])),
                "wins_at": {n: ratios[n] for n in mine if won[n]},
                "loses_at": {n: ratios[n] for n in mine if not won[n]},
            }
        )
    return found


def rate_table(rows: Sequence[dict[str, Any]]) -> str:
    """Efficiency by K and delay: measured, and in brackets as expected."""
    lines = ["rate        " + "".join(f"{f'K={k}':>16}" for k in PERIODS)]
    for delay in DELAYS_S:
        own = [row for row in rows if row["delay_ms"] == 1000 * delay]
        cells = [f"{row['efficiency']:.2f} ({row['expected']:.2f})" for row in own]
        lines.append(f"{1000 * delay:5.0f} ms    " + "".join(f"{cell:>16}" for cell in cells))
    return "\n".join(lines)


def target_table(rows: Sequence[dict[str, Any]]) -> str:
    """Time to the target by network and contender."""
    lines = [f"{'network':12} {'contender':16} {'seconds':>8} {'steps':>6} {'x ddp':>6} {'sent MB':>8} {'wire MB':>8}"]
    for row in rows:
        values = [
            _cell(row["seconds"], 8, ".2f"), _cell(row["steps"], 6, ".0f"), _cell(row["times_ddp"], 6, ".2f"),
            _cell(row["all_reduced_mb"], 8, ".1f"), _cell(row["wire_mb"], 8, ".1f"),
        ]  # fmt: skip
        lines.append(f"{row['network']:12} {row['contender']:16} {' '.join(values)}")
    return "\n".join(lines)


def crossover_table(rows: Sequence[dict[str, Any]]) -> str:
    """From which t_comm / t_step on a contender should win, and where it did."""
    lines = [f"{'contender':16} {'steps/ddp':>9} {'wins above':>10}   won, lost at t_comm / t_step"]
    for row in rows:
        won, lost = (" ".join(f"{ratio:.2f}" for ratio in sorted(row[key].values())) for key in ("wins_at", "loses_at"))
        more, above = _cell(row["steps_over_ddp"], 9, ".2f"), _cell(row["expected_ratio"], 10, ".2f")
        lines.append(f"{row['contender']:16} {more} {above}   {won or '-'}, {lost or '-'}")
    return "\n".join(lines)


def _cell(value: float | None, width: int, shape: str) -> str:
    return f"{'-' if value is None else format(value, shape):>{width}}"


def _ratio(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a / b
