"""Tables of the strategy benchmarks in Markdown, for the console and for the documentation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bench.strategies.contest import interval, ratio

Row = Mapping[str, Any]


def contest_table(record: Mapping[str, Any]) -> str:
    """Return the table of a contest; its first row is the one that the others are compared with."""
    rows = record["rows"]
    networks = list(dict.fromkeys(row["network"] for row in rows))
    names = list(dict.fromkeys(row["contender"] for row in rows))
    cell = {(row["contender"], row["network"]): row for row in rows}
    accuracy = record["goal"]["accuracy"]
    value = record["goal"]["value"]
    aim = f"{100 * value:g} %" if accuracy else f"{value:g}"
    several = len({sum(name == row["contender"] for row in rows) for name in names}) == 1 and len(networks) > 1
    shown = networks if several else [""]
    heads = ["", *(f"s to {aim}, {network}" if network else f"s to {aim}" for network in shown), "clips to it"]
    heads += ["final accuracy, %" if accuracy else "final loss"]
    heads += ["steps", "messages", "MB sent by a rank"]
    lines = []
    for name in names:
        own = [cell[name, network] for network in shown] if several else [row for row in rows if row["contender"] == name]
        first = own[0]
        lines.append([
            name, *(spread(row["seconds"], reached=row["reached"]) for row in own), spread(first["clips"], reached=first["reached"]),
            spread([100 * v for v in first["final"]] if accuracy else first["final"]),
            middle(first["steps"] if first["sync"] != "asgd" else [record["clips"] / record["batch"]]), middle(first["messages"]), middle(first["wire_mb"]),
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


def middle(values: Sequence[float]) -> str:
    """Format the mean of values."""
    return number(sum(values) / len(values))


def number(value: float) -> str:
    """Format a number with three or four digits."""
    size = abs(value)
    if not size:
        return "0"
    return f"{value:,.0f}" if size >= 100 else f"{value:.1f}" if size >= 10 else f"{value:.2f}" if size >= 2 else f"{value:.3f}"


Table = Callable[[Mapping[str, Any]], str]
