"""Tables of the strategy benchmarks in Markdown, for the console and for the documentation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench.strategies.contest import interval, ratio

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


def migration_table(record: Mapping[str, Any]) -> str:
    """Return the table of sweeps whose models or data move."""
    heads = ["dataset, MB", "a part, MB", "a model's state, MB", "", "data moved, MB", "states moved, MB", "s"]
    lines = [
        [
            number(row["dataset_mb"]), number(row["part_mb"]), number(row["state_mb"]), row["way"],
            middle(row["data_wire_mb"]), middle(row["state_wire_mb"]), spread(row["seconds"]),
        ]
        for row in record["rows"]
    ]  # fmt: skip
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
    heads = ["", f"s to {record['goal']['value']:g}", f"times sooner than {rows[0]['contender']}", "clips to it"]
    return markdown([*heads, "final loss", "staleness", "s in all"], lines)


def conditions(record: Mapping[str, Any]) -> str:
    """Return a sentence about how a contest was measured."""
    unit = f"{record['step_ms']:g} ms of sleep a batch" if "step_ms" in record else f"{record['clip_ms']:g} ms a clip"
    machine, done = record["machine"], min(len(row["final"]) for row in record["rows"])
    planned = "" if done == record["seeds"] else f" of {record['seeds']} planned"
    return (
        f"{done}{planned} seeds, mean and 95 % interval; {record['clips']:,} clips a run, looked at every"
        f" {record['look_clips']:,} clips; {unit} on a rank; load average {machine['load_average']:g} on"
        f" {machine['cores']} cores at the end."
    )
