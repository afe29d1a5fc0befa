"""What fastvid's loader has to reach against the best rival and against its own decoder, and whether it does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

WANTED: Final = {"compact": {"rival": 3.2, "decoder": 0.95}, "intra": {"rival": 2.3, "decoder": 0.85}}
"""By profile: times the best rival's speed, in random order with uint8 batches; share of the decoder alone."""
SHORT_EPOCHS: Final = 0.9
"""Speed of epochs of 30 clips, as a share of that of long ones."""


def goals(row: Mapping[str, Any], by: str) -> list[dict[str, Any]]:
    """Return the goals of a row of `bench.load.load`: what was found, and whether they were met.

    `row`: the row.
    """
    wanted = WANTED.get(row["profile"], {"rival": 1.0, "decoder": 0.0})
    entries = {one["pipeline"]: one for one in row["page-cached"]}
    rivals = [one for name, one in entries.items() if "fastvid_is_faster_by" in one and not name.startswith("fastvid")]
    found = []
    if rivals:
        best = min(rivals, key=lambda one: one["cpu_ms_a_clip"] if by == "cpu" else -one["clips_a_second"])
        found.append(_goal(f"times {best['pipeline']}", wanted["rival"], best["fastvid_is_faster_by"], by))
    for entry in entries.values():
        if "fastvid_reaches" in entry:
            found.append(_goal("of the decoder alone", wanted["decoder"], entry["fastvid_reaches"], by))
        if "long_over_short" in entry:
            inverse = {name: 1 / value for name, value in entry["long_over_short"].items() if value}
            for one in ("wall", "cpu"):
                if f"{one}_min" in inverse:
                    inverse[f"{one}_min"], inverse[f"{one}_max"] = inverse[f"{one}_max"], inverse[f"{one}_min"]
            found.append(_goal("epochs of 30 clips, of long ones", SHORT_EPOCHS, inverse, by))
    return found


def _goal(what: str, wanted: float, ratio: Mapping[str, float], by: str) -> dict[str, Any]:
    one = ratio[by]
    spread = [ratio[f"{by}_min"], ratio[f"{by}_max"]]
    return {"what": what, "wanted": wanted, "found": one, "range": spread, "by": by, "met": one >= wanted}


def sentence(goal: Mapping[str, Any]) -> str:
    """Return a goal as a line of text."""
    low, high = goal["range"]
    found = f"{goal['found']:.2f} ({low:.2f} to {high:.2f}) {goal['what']} by {goal['by']} time"
    return f"{found}: goal {goal['wanted']} {'met' if goal['met'] else 'MISSED'}"
