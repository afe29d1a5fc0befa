"""Text tables of ``python -m bench sync``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def rate_table(rows: Sequence[dict[str, Any]]) -> str:
    """Format the efficiency by K and delay: measured, with the expected value in brackets."""
    periods = sorted({row["k"] for row in rows})
    lines = ["rate        " + "".join(f"{f'K={k}':>16}" for k in periods)]
    for delay in sorted({row["delay_ms"] for row in rows}):
        own = [row for row in rows if row["delay_ms"] == delay]
        cells = [f"{row['efficiency']:.2f} ({row['expected']:.2f})" for row in own]
        lines.append(f"{delay:5.0f} ms    " + "".join(f"{cell:>16}" for cell in cells))
    return "\n".join(lines)


def target_table(rows: Sequence[dict[str, Any]]) -> str:
    """Format the time to the target loss by network and contender."""
    lines = [f"{'network':12} {'contender':16} {'seconds':>8} {'steps':>6} {'x ddp':>6} {'sent MB':>8} {'wire MB':>8}"]
    for row in rows:
        values = [
            _cell(row["seconds"], 8, ".2f"), _cell(row["steps"], 6, ".0f"), _cell(row["times_ddp"], 6, ".2f"),
            _cell(row["message_mb"], 8, ".1f"), _cell(row["wire_mb"], 8, ".1f"),
        ]  # fmt: skip
        lines.append(f"{row['network']:12} {row['contender']:16} {' '.join(values)}")
    return "\n".join(lines)


def crossover_table(rows: Sequence[dict[str, Any]]) -> str:
    """Format the t_comm / t_step above which each contender should win, and where it did win."""
    lines = [f"{'contender':16} {'steps/ddp':>9} {'wins above':>10}   won, lost at t_comm / t_step"]
    for row in rows:
        won, lost = (" ".join(f"{ratio:.2f}" for ratio in sorted(row[key].values())) for key in ("wins_at", "loses_at"))
        more, above = _cell(row["steps_over_ddp"], 9, ".2f"), _cell(row["expected_ratio"], 10, ".2f")
        lines.append(f"{row['contender']:16} {more} {above}   {won or '-'}, {lost or '-'}")
    return "\n".join(lines)


def straggler_table(rows: Sequence[dict[str, Any]]) -> str:
    """Format the effect of one slow rank on each contender."""
    lines = [f"{'slowest rank':12} {'contender':22} {'clips/s':>8} {'share':>6} {'seconds':>8} {'stale':>6}"]
    for row in rows:
        values = [
            _cell(row["clips_per_s"], 8, ".0f"), _cell(row["of_sum_of_rates"], 6, ".2f"),
            _cell(row["seconds"], 8, ".2f"), _cell(row["staleness_mean"], 6, ".1f"),
        ]  # fmt: skip
        lines.append(f"{row['straggler']:10.0f} x {row['contender']:22} {' '.join(values)}")
    return "\n".join(lines)


def sweep_table(rows: Sequence[dict[str, Any]]) -> str:
    """Format the seconds of a whole sweep."""
    lines = [f"{'network':14} {'contender':24} {'seconds':>8} {'x ddp':>6} {'wire MB':>8}"]
    for row in rows:
        values = [_cell(row["seconds"], 8, ".2f"), _cell(row["times_ddp"], 6, ".2f"), _cell(row["wire_mb"], 8, ".1f")]
        lines.append(f"{row['network']:14} {row['contender']:24} {' '.join(values)}")
    return "\n".join(lines)


def _cell(value: float | None, width: int, shape: str) -> str:
    return f"{'-' if value is None else format(value, shape):>{width}}"
