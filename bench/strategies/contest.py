"""Contests of strategies: every contender runs with the same seeds in turn, and is judged on the same looks.

All contenders choose from one grid of rates and schedules: each runs every cell on a seed that does not count, and
keeps the cell that reaches the goal after the fewest clips. A target is reached at the first look at which the mean
of the last `window` looks is on its right side. Intervals are those of Student's t at 95 % for the mean over the seeds;
those of ratios are of paired seeds, on a logarithmic scale.

Tables are in Markdown, for the console and for the documentation.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Final

from bench.common.harness import Record, machine_facts
from bench.strategies.ranks import Ranks, RunSpec
from bench.strategies.slow_network import SlowLink

_log = logging.getLogger(__name__)

TUNING_SEED: Final = 1000
# Cosine: warm-up over a twentieth of the run, then decay to zero at its end.
SCHEDULES: Final[tuple[dict[str, Any], ...]] = ({}, {"decay": "cosine", "warmup_epochs": 0.05})
# 97.5 % quantiles of Student's t by degrees of freedom.
_T: Final = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}


@dataclass(frozen=True)
class Network:
    """The network between the ranks."""

    name: str
    delay_s: float = 0.0  # delay before each message, in seconds
    bits_per_s: float = 0.0

    @property
    def link(self) -> SlowLink:
        """Its cost of messages."""
        return SlowLink(self.delay_s, self.bits_per_s / 8)

    def as_row(self) -> dict[str, float]:
        """Return it as a row of JSON."""
        return {"delay_ms": 1000 * self.delay_s, "mbit_per_s": self.bits_per_s / 1e6}


@dataclass(frozen=True)
class Contender:
    """One way to train."""

    name: str
    ranks: int
    spec: RunSpec
    networks: Sequence[Network]

    def with_optim(self, cell: Mapping[str, Any], seed: int) -> RunSpec:
        """Return its run with a cell of the grid and a seed."""
        return replace(self.spec, optim={**self.spec.optim, **cell}, seed=seed)

    def cheapest(self) -> Contender:
        """Return a contender with the same steps at the least cost, for tuning: ddp takes those of one rank."""
        ranks = 1 if self.spec.sync == "ddp" else self.ranks
        if ranks > 1 and not self.spec.counted:
            return self
        spec = replace(self.spec, clip_s=0.0, straggler=1.0, counted=True)
        return replace(self, name="", ranks=ranks, spec=spec, networks=(Network("none"),))


@dataclass(frozen=True)
class Goal:
    """What a contender is to reach."""

    value: float  # held-out loss in nats, or accuracy from 0 to 1
    accuracy: bool = False
    window: int = 3

    def reached(self, curve: Sequence[Sequence[Any]]) -> int | None:
        """Return the index of the first look at which a curve has reached the goal."""
        values = [row[3 if self.accuracy else 2] for row in curve]
        for end in range(self.window, len(values) + 1):
            mean = statistics.mean(values[end - self.window : end])
            if mean >= self.value if self.accuracy else mean <= self.value:
                return end - 1
        return None

    def final(self, curve: Sequence[Sequence[Any]]) -> float:
        """Return the mean loss or accuracy of the last looks."""
        return statistics.mean(row[3 if self.accuracy else 2] for row in curve[-self.window :])


Run = Callable[[Contender, RunSpec], dict[str, Any]]


def contest_record(schema: str, args: argparse.Namespace, goal: Goal, *, look: int, **facts: Any) -> Record:
    """Return the record of a contest before its first run; contenders are looked at every `look` clips."""
    looks = {"look_clips": look, "tuning_seed": TUNING_SEED, "tuning": {}, "rows": []}
    return Record(schema, args, "seeds", "clips", goal=vars(goal), **looks, **facts)


def grid(*rates: float, **fixed: Any) -> list[dict[str, Any]]:
    """Return each rate with each schedule."""
    return [{"base_lr": rate, **fixed, **schedule} for rate in rates for schedule in SCHEDULES]


def compete(
    contenders: Sequence[Contender],
    cells: Sequence[Mapping[str, Any]],
    goal: Goal,
    record: Record,
    at_once: int = 1,
) -> None:
    """Tune all contenders, then run them seed by seed; the record gets the rows after each seed.

    `at_once`: runs at the same time, if all time is counted.
    """
    alike = {repr(one.cheapest()): one.cheapest() for one in contenders}
    with Places() as places, ThreadPoolExecutor(at_once) as pool:
        tried = dict(zip(alike, pool.map(lambda one: tuned(places.run, one, cells, goal), alike.values()), strict=True))
        record["tuning"] = {one.name: tried[repr(one.cheapest())] for one in contenders}
        chosen = {name: best(found, goal) for name, found in record["tuning"].items()}
        _log.info("chosen: %s", chosen)
        runs: dict[str, list[dict[str, Any]]] = {one.name: [] for one in contenders}
        jobs = [(one, one.with_optim(chosen[one.name], seed)) for seed in range(record["seeds"]) for one in contenders]
        for (one, spec), found in zip(jobs, pool.map(lambda job: places.run(*job), jobs), strict=True):
            runs[one.name].append(found)
            _log.info("%s, seed %d: %.4f at the end", one.name, spec.seed, goal.final(found["curve"]))
            if one is contenders[-1]:
                record["rows"] = [
                    row for one in contenders for row in rows(one, chosen[one.name], runs[one.name], goal)
                ]
                record["machine"] = machine_facts()
                record.save()


def tuned(run: Run, one: Contender, cells: Sequence[Mapping[str, Any]], goal: Goal) -> list[dict[str, Any]]:
    """Return, for each cell of the grid, the clips to the goal and what the run ended at."""
    found = []
    for cell in cells:
        curve = run(one, one.with_optim(cell, TUNING_SEED))["curve"]
        end, final = goal.reached(curve), goal.final(curve)
        clips = None if end is None else curve[end][0]
        found.append({**cell, "clips": clips, "final": round(final, 5) if math.isfinite(final) else None})
    return found


def best(tried: Sequence[Mapping[str, Any]], goal: Goal) -> dict[str, Any]:
    """Return the cell that reaches the goal after the fewest clips; if several do, or none, the one that ends best."""
    sign = -1 if goal.accuracy else 1

    def order(row: Mapping[str, Any]) -> tuple[float, float]:
        return row["clips"] or math.inf, math.inf if row["final"] is None else sign * row["final"]

    return {key: value for key, value in min(tried, key=order).items() if key not in ("clips", "final")}


def rows(
    one: Contender, chosen: Mapping[str, Any], runs: Sequence[Mapping[str, Any]], goal: Goal
) -> list[dict[str, Any]]:
    """Return one row per network."""
    found = []
    for number, network in enumerate(one.networks):
        ends = [goal.reached(run["curve"]) for run in runs]
        reached = [(run, end) for run, end in zip(runs, ends, strict=True) if end is not None]
        seconds = [None if end is None else run["curve"][end][1][number] for run, end in zip(runs, ends, strict=True)]
        found.append({
            "contender": one.name, "network": network.name, "ranks": one.ranks, "sync": one.spec.sync,
            "batch": one.spec.batch,
            "options": dict(one.spec.options), "optim": {**one.spec.optim, **chosen},
            "reached": len(reached),
            "seconds": seconds,
            "clips": [None if end is None else run["curve"][end][0] for run, end in zip(runs, ends, strict=True)],
            "steps_to_goal": _part(runs, ends, "steps"),
            "messages_to_goal": _part(runs, ends, "messages"),
            "wire_mb_to_goal": _part(runs, ends, "wire_bytes", 1e6),
            "final": [round(goal.final(run["curve"]), 5) for run in runs],
            "all_seconds": [round(run["seconds"][number], 4) for run in runs],
            "steps": [run["steps"] for run in runs],
            "messages": [run["messages"] for run in runs],
            "message_mb": [run["message_bytes"] / 1e6 for run in runs],
            "wire_mb": [run["wire_bytes"] / 1e6 for run in runs],
            "largest_batch": max(run["largest_batch"] for run in runs),
            "cpu_s": [round(run["cpu_s"], 2) for run in runs],
            "staleness": [round(_mean(run["staleness"]), 3) for run in runs],
            "parameters": runs[0]["parameters"],
        })  # fmt: skip
    return found


def _part(
    runs: Sequence[Mapping[str, Any]], ends: Sequence[int | None], name: str, unit: float = 1
) -> list[float | None]:
    """Return what each run had counted at the look at which it reached the goal."""
    return [
        None if end is None or not run["counts"] else round(run["counts"][end][name] / unit, 4)
        for run, end in zip(runs, ends, strict=True)
    ]


def _mean(staleness: Mapping[str, int]) -> float:
    pushes = sum(staleness.values())
    return sum(int(value) * times for value, times in staleness.items()) / pushes if pushes else 0.0


def interval(values: Sequence[float | None]) -> tuple[float, float, float] | None:
    """Return mean and 95 % interval; None if a value is missing."""
    known = [value for value in values if value is not None]
    if len(known) < len(values) or not known:
        return None
    mean = statistics.mean(known)
    if len(known) == 1:
        return mean, mean, mean
    half = _T.get(len(known) - 1, 2.0) * statistics.stdev(known) / math.sqrt(len(known))
    return mean, mean - half, mean + half


def ratio(ours: Sequence[float | None], theirs: Sequence[float | None]) -> tuple[float, float, float] | None:
    """Return the geometric mean and 95 % interval of ``theirs / ours`` over paired seeds; None if one is missing."""
    pairs = [None if a is None or b is None else math.log(b / a) for a, b in zip(ours, theirs, strict=True)]
    found = interval(pairs)
    return None if found is None else (math.exp(found[0]), math.exp(found[1]), math.exp(found[2]))


class Places:
    """Process groups, opened when one of that size is needed and none is free."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._free: dict[int, list[Ranks]] = defaultdict(list)

    def run(self, one: Contender, spec: RunSpec) -> dict[str, Any]:
        """Run a specification; return the result of rank 0, with the bytes of the rank that sent most."""
        free = self._free[one.ranks]
        try:
            group = free.pop()
        except IndexError:
            group = self._stack.enter_context(Ranks(one.ranks))
        found = group.run(replace(spec, links=[network.link for network in one.networks]))
        free.append(group)
        most = max(found, key=lambda result: float(result["wire_bytes"]))
        return {**found[0], **{name: most[name] for name in ("messages", "message_bytes", "wire_bytes")}}

    def __enter__(self) -> Places:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


Row = Mapping[str, Any]


def contest_table(record: Mapping[str, Any]) -> str:
    """Return the table of a contest on several networks."""
    networks = list(dict.fromkeys(row["network"] for row in record["rows"]))
    names = list(dict.fromkeys(row["contender"] for row in record["rows"]))
    cell = {(row["contender"], row["network"]): row for row in record["rows"]}
    accuracy, value = record["goal"]["accuracy"], record["goal"]["value"]
    scale, aim = (100, f"{100 * value:g} %") if accuracy else (1, f"{value:g}")
    heads = ["", *(f"s to {aim}, {network}" for network in networks), "clips to it"]
    heads += ["final accuracy, %" if accuracy else "final loss", "steps", "messages", "MB sent by a rank"]
    lines = []
    for name in names:
        first = cell[name, networks[0]]
        reached = first["reached"]
        lines.append([
            name,
            *(spread(cell[name, network]["seconds"], reached=reached) for network in networks),
            spread(first["clips"], reached=reached),
            spread([scale * end for end in first["final"]]),
            *(middle(first[key]) for key in ("steps", "messages", "wire_mb")),
        ])  # fmt: skip
    return markdown(heads, lines)


def markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def spread(values: Sequence[float | None], *, reached: int | None = None) -> str:
    """Format a mean with its 95 % interval; if a value is missing, how many there are."""
    found = interval(values)
    if found is None:
        return f"{reached or 0} of {len(values)} runs"
    mean, low, high = found
    return number(mean) if low == high else f"{number(mean)} ({number(low)} to {number(high)})"


def times(ours: Row, theirs: Row, key: str = "seconds") -> str:
    """Format how many times larger a value of `theirs` is than that of `ours`, with its 95 % interval."""
    found = ratio(ours[key], theirs[key])
    return "-" if found is None else f"{found[0]:.2f} ({found[1]:.2f} to {found[2]:.2f})"


def _times_where_both(ours: Row, theirs: Row) -> str:
    both = [pair for pair in zip(ours["seconds"], theirs["seconds"], strict=True) if None not in pair]
    if len(both) < 2:
        return "-"
    left, right = zip(*both, strict=True)
    found, seeds = times({"seconds": left}, {"seconds": right}), len(ours["seconds"])
    return found if len(both) == seeds else f"{found} in {len(both)} of {seeds}"


def middle(values: Sequence[float]) -> str:
    """Format the mean of values."""
    return number(sum(values) / len(values))


def number(value: float) -> str:
    """Format a number with three or four digits."""
    size = abs(value)
    if not size:
        return "0"
    return (
        f"{value:,.0f}"
        if size >= 100
        else f"{value:.1f}"
        if size >= 10
        else f"{value:.2f}"
        if size >= 2
        else f"{value:.3f}"
    )


def over_networks(record: Mapping[str, Any]) -> str:
    """Return how many times sooner than ddp, on the same network, each contender reaches the goal.

    If a contender or ddp missed it with some seeds, the ratio is that of the others, and says of how many.
    """
    networks = list(dict.fromkeys(row["network"] for row in record["rows"]))
    names = list(dict.fromkeys(row["contender"] for row in record["rows"]))
    cell = {(row["contender"], row["network"]): row for row in record["rows"]}
    lines = [
        [name, *(_times_where_both(cell[name, network], cell["ddp", network]) for network in networks)]
        for name in names
        if name != "ddp"
    ]
    return markdown(["times sooner than ddp", *networks], lines)


def clients_table(record: Mapping[str, Any]) -> str:
    """Return the table of asynchronous clients against one."""
    rows = record["rows"]
    lines = [
        [
            row["contender"], spread(row["seconds"], reached=row["reached"]), times(row, rows[0]),
            spread(row["clips"], reached=row["reached"]), spread(row["final"]),
            middle(row["staleness"]) if row["sync"] == "asgd" else "-", middle(row["all_seconds"]),
        ]
        for row in rows
    ]  # fmt: skip
    heads = [
        "",
        "network",
        f"s to {record['goal']['value']:g}",
        f"times sooner than {rows[0]['contender']}",
        "clips to it",
    ]
    return markdown([*heads, "final loss", "staleness", "s in all"], lines)
