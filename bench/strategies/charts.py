"""Charts of the results of the strategy benchmarks, for `bench.report`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench.common.charts import Bars, Chart, Lines, Table

Rows = Sequence[Mapping[str, Any]]


def sync(record: Mapping[str, Any]) -> list[Chart]:
    """Return the charts of a result of `bench.strategies.sync`."""
    loss = record["target_loss"]
    found: list[Chart] = [_rates(record["rate"])]
    for networks, title, key in (
        (record["target"], f"Seconds to a loss of {loss:g}: {record['ranks']} ranks, several networks", "seconds"),
        (record["sweep"], "Seconds of a sweep of four models on the same networks", "seconds"),
        (record["sweep"], "Megabytes received over the network in the sweep", "wire_mb"),
    ):
        found.append(_grid(networks, title, key))
    rows = [
        (
            row["contender"],
            _plain(row["steps_over_ddp"]),
            _plain(row["expected_ratio"]),
            ", ".join(f"{name} ({ratio:.2f})" for name, ratio in row["wins_at"].items()) or "nowhere",
        )
        for row in record["crossover"]
    ]
    heads = ("strategy", "steps relative to ddp", "expected to win from", "wins at (t_comm / t_step)")
    found.append(Table("Networks on which rounds of local steps win", heads, rows))
    slowest = max(row["straggler"] for row in record["straggler"])
    slow = [row for row in record["straggler"] if row["straggler"] == slowest]
    missed = [row["contender"] for row in slow if row["seconds"] is None]
    found.append(
        Bars(
            f"One of four ranks is {slowest:g} times slower: seconds to a loss of {loss:g}",
            "s",
            {row["contender"]: row["seconds"] for row in slow if row["seconds"] is not None},
            note=f"Not reached by {', '.join(missed)}." if missed else "",
        )
    )
    found.append(
        Bars(
            f"One of four ranks is {slowest:g} times slower: clips/s as a share of the sum of the ranks' rates",
            "%",
            {row["contender"]: 100 * row["of_sum_of_rates"] for row in slow},
        )
    )
    return found


def _rates(rows: Rows) -> Lines:
    series: dict[str, list[tuple[float, float]]] = {}
    expected = []
    for delay in sorted({row["delay_ms"] for row in rows}):
        own = [row for row in rows if row["delay_ms"] == delay]
        name = f"{delay:.0f} ms per message, 1 / (1 + t_comm / (K t_step))"
        series[f"{delay:.0f} ms per message"] = [(row["k"], 100 * row["efficiency"]) for row in own]
        series[name] = [(row["k"], 100 * row["expected"]) for row in own]
        expected.append(name)
    return Lines("kavg: share of time spent computing", "K, local steps per round", "%", series, expected, log_x=True)


def _grid(rows: Rows, title: str, key: str) -> Table:
    """Return a table of contenders by network."""
    networks = list(dict.fromkeys(row["network"] for row in rows))
    names = list(dict.fromkeys(row["contender"] for row in rows))
    value = {(row["contender"], row["network"]): row[key] for row in rows}
    cells = [(name, *(_plain(value.get((name, network)), "not reached") for network in networks)) for name in names]
    return Table(title, ("", *networks), cells)


def moments(record: Mapping[str, Any]) -> list[Chart]:
    """Return the chart of a result of `bench.strategies.moments`."""
    rows = record["rows"]
    values = {row["contender"]: row["train_loss"] for row in rows}
    spread = {row["contender"]: (min(row["train_losses"]), max(row["train_losses"])) for row in rows}
    note = "Loss on the training samples after the same number of samples, mean over seeds."
    return [Bars("Adam's moments under K-step averaging: training loss", "", values, spread, note=note)]


def server(record: Mapping[str, Any]) -> list[Chart]:
    """Return the chart of a result of `bench.strategies.server`."""
    values = {
        f"{name}: {part}": row[key]
        for name, row in record["rows"].items()
        for part, key in (("push", "push_ms"), ("under the lock", "push_locked_ms"), ("fetch", "fetch_ms"))
    }
    return [Bars("What a push and a fetch cost the parameter server", "CPU ms", values)]


def motion(record: Mapping[str, Any]) -> list[Chart]:
    """Return the charts of a result of `bench.strategies.motion_sync`."""
    runs = record.get("runs") or [record]
    sync = record["sync"]
    series: dict[str, list[tuple[float, float]]] = {}
    rows = []
    for run in runs:
        seed = f"{sync}, seed {run['seed']}" if "seed" in run else sync
        for number, model in enumerate(sorted(run["models"], key=lambda model: int(model.get("model", 0)))):
            name = f"{seed}, model {model['model']}" if len(run["models"]) > 1 else seed
            samples = model.get("samples", run.get("samples", 0))
            if "scores" in model:
                scores = model["scores"]
                series[name] = [(samples * (at + 1) / len(scores), score) for at, score in enumerate(scores)]
            elif number == 0:
                series[name] = [(at, score) for at, score in run["curve"]]
            kills = ", ".join(kill["killed"] for kill in run.get("kills", ())) or "nobody"
            once = {True: "yes", False: "NO", None: "-"}[run.get("each_sample_once")]
            rows.append((name, str(record["ranks"]), f"{samples:,}", f"{model['top1_percent']:.2f}", kills, once))
    heads = ("strategy", "ranks", "samples", "top-1 on held-out videos, %", "killed", "each sample once")
    return [
        Lines("Motion dataset: accuracy by strategy", "samples", "top-1 on held-out videos, %", series),
        Table("Motion dataset: final accuracy by strategy", heads, rows),
    ]


def _plain(value: float | None, absent: str = "-") -> str:
    return absent if value is None else f"{value:.3g}" if value < 100 else f"{value:,.0f}"
