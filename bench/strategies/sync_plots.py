"""Plots of ``python -m bench sync``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

_SIZE: Final = (12.5, 7.5)  # inches
_DPI: Final = 90


def draw(record: Mapping[str, Any], folder: Path) -> Path:
    """Draws a result into ``sync.png``.

    Args:
        record: As the benchmark writes it.
        folder: Made if it is not there.

    Returns:
        The file.
    """
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    figure = Figure(figsize=_SIZE, layout="constrained")
    (rate, target), (straggler, sweep) = figure.subplots(2, 2)
    _rate(rate, record["rate"])
    _target(target, record["target"])
    _straggler(straggler, record["straggler"])
    _sweep(sweep, record["sweep"])
    path = folder / "sync.png"
    figure.savefig(path, dpi=_DPI)
    return path


def _rate(axes: Any, rows: list[dict[str, Any]]) -> None:
    for number, delay in enumerate(sorted({row["delay_ms"] for row in rows})):
        own = [row for row in rows if row["delay_ms"] == delay]
        periods = [row["k"] for row in own]
        axes.plot(periods, [row["efficiency"] for row in own], "o", color=f"C{number}", label=f"{delay:.0f} ms")
        axes.plot(periods, [row["expected"] for row in own], "-", color=f"C{number}", linewidth=1)
    axes.set(
        xscale="log", xlabel="K, local steps of a round", ylabel="share of time that computes", ylim=(0, 1.4),
        title="kavg: measured, and 1 / (1 + t_comm / (K t_step))",
    )  # fmt: skip
    axes.set_xticks(periods, [str(period) for period in periods])
    axes.minorticks_off()
    axes.legend(title="delay of a message")


def _bars(axes: Any, rows: list[dict[str, Any]], groups: list[str], group_of: str, value: str) -> None:
    names = list(dict.fromkeys(row["contender"] for row in rows))
    width = 0.85 / len(names)
    for number, name in enumerate(names):
        places, heights = [], []
        for place, group in enumerate(groups):
            found = [row for row in rows if row["contender"] == name and str(row[group_of]) == group]
            height = found[0][value] if found else None
            left = place + (number - (len(names) - 1) / 2) * width
            if height is None:
                axes.text(
                    left, 0.01, "x", ha="center", va="bottom", color=f"C{number}", transform=axes.get_xaxis_transform()
                )
            else:
                places.append(left)
                heights.append(height)
        # A bar of no height, so that one that is nowhere has its place in the legend too.
        axes.bar([*places, 0], [*heights, 0], width, label=name, color=f"C{number}")
    axes.set_xticks(range(len(groups)), groups)
    # Beside the bars, which may reach any height.
    axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0), borderaxespad=0.2)


def _target(axes: Any, rows: list[dict[str, Any]]) -> None:
    networks = list(dict.fromkeys(row["network"] for row in rows))
    _bars(axes, rows, networks, "network", "seconds")
    axes.set(yscale="log", ylabel="seconds to the loss", title="two ranks, several networks (x: not reached)")


def _straggler(axes: Any, rows: list[dict[str, Any]]) -> None:
    factors = list(dict.fromkeys(str(row["straggler"]) for row in rows))
    _bars(axes, rows, factors, "straggler", "of_sum_of_rates")
    axes.axhline(1, color="grey", linewidth=1)
    axes.set(
        xlabel="times as long as one of four ranks computes", ylabel="clips/s, of the sum of the ranks' rates",
        title="a straggler",
    )  # fmt: skip


def _sweep(axes: Any, rows: list[dict[str, Any]]) -> None:
    networks = list(dict.fromkeys(row["network"] for row in rows))
    _bars(axes, rows, networks, "network", "seconds")
    axes.set(ylabel="seconds", title="a sweep of four models")
