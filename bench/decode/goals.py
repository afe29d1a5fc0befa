"""What fastvid has to reach against the best rival of a row, and whether it does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

OURS: Final = "rgb from memory"
WANTED: Final = {
    ("compact", "tsn8"): 2.8,
    ("compact", "dense16x4"): 2.2,
    ("intra", "tsn8"): 1.6,
    ("intra", "dense16x4"): 1.4,
}
"""How many times faster than the best rival, decoders kept open among them, for clips of 256-pixel videos."""
AHEAD: Final = 1.0
"""For everything else: ahead of every rival."""
NOT_RIVALS: Final = {"spdl-yuv": "delivers YUV", "torchcodec blocks, our plan": "decodes what fastvid plans"}
"""Contenders with another output, or with a part of fastvid; shown, but never the best rival."""


def best_rival(row: Mapping[str, Any], by: str = "wall") -> Mapping[str, Any] | None:
    """Return the fastest rival of a row, or None.

    `row`: A row of the results of `bench.decode.decode`.
    """
    rivals = [one for one in row["contenders"] if "fastvid_is_faster_by" in one and one["name"] not in NOT_RIVALS]
    speed = (lambda one: -float(one["cpu_ms"])) if by == "cpu" else (lambda one: float(one["rate"]))
    return max(rivals, key=speed, default=None)


def verdict(row: Mapping[str, Any], by: str) -> dict[str, Any] | None:
    """Return the goal of a row, what was found, and whether it was met; None without a rival."""
    best = best_rival(row, by)
    if best is None:
        return None
    times = best["fastvid_is_faster_by"][OURS]
    usual = row.get("kind") is None and row.get("together", 1) == 1
    wanted = WANTED.get((row["profile"]["name"], row["sampling"]), AHEAD) if usual else AHEAD
    return {
        "wanted": wanted,
        "found": times[by],
        "range": [times[f"{by}_min"], times[f"{by}_max"]],
        "by": by,
        "rival": best["label"],
        "met": times[by] >= wanted if wanted != AHEAD else times[by] > wanted,
    }


def sentence(verdict: Mapping[str, Any]) -> str:
    """Return a verdict as a line of text."""
    low, high = verdict["range"]
    return (
        f"goal {'met' if verdict['met'] else 'MISSED'}: {verdict['found']:.3f}x ({low:.2f} to {high:.2f}) by"
        f" {verdict['by']} time, wanted {verdict['wanted']:.1f}x, against {verdict['rival']}"
    )


def lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line for each row that has a verdict."""
    return [f"{row['dataset']} {row['sampling']}: {sentence(row['goal'])}" for row in rows if row.get("goal")]
