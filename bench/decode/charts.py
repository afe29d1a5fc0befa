"""What results of `bench.decode.decode` and `bench.decode.practice` show, see `bench.report`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench.common.charts import Bars, Chart


def charts(record: Mapping[str, Any]) -> list[Chart]:
    """What a result shows."""
    found: list[Chart] = []
    for row in record["rows"]:
        names = {}
        for one in row["contenders"]:
            own = one["name"] == "fastvid"
            product = f", {one['settings']['product']} from {one['settings']['source']}" if own else ""
            names[one["name"] + product] = one
        rivals = [name for name, one in names.items() if "fastvid_is_faster_by" in one]
        packets = row["packets_a_clip"]
        found.append(
            Bars(
                f"Decoding {row['dataset']}, {row['sampling']}",
                "clips/s",
                {name: one["rate"] for name, one in names.items()},
                {name: (one["rate_min"], one["rate_max"]) for name, one in names.items()},
                rivals,
                f"{row['clips']} clips, {row['megabytes']} MB; the plan feeds {packets['planned']:.1f} of"
                f" {packets['from_keys']:.1f} packets a clip. Planes are what a device takes; the others deliver RGB"
                f" crops. Best settings found: {'; '.join(names[name]['label'] for name in rivals)}.",
            )
        )
    return found + practice([*record.get("today", ()), *record.get("sliced", ())])


def practice(rows: Sequence[Mapping[str, Any]]) -> list[Chart]:
    """What rows of `bench.decode.practice` show."""
    found: list[Chart] = []
    for row in rows:
        best = best_rival(row)
        if best is None:
            continue
        names = {_short(one): one for one in row["contenders"]}
        times = "; ".join(f"{ours} {ratios['wall']:.1f}x" for ours, ratios in best["fastvid_is_faster_by"].items())
        found.append(
            Bars(
                title(row)[:1].upper() + title(row)[1:],
                "clips/s",
                {name: one["rate"] for name, one in names.items()},
                {name: (one["rate_min"], one["rate_max"]) for name, one in names.items()},
                [name for name, one in names.items() if "fastvid_is_faster_by" in one],
                f"{row['clips']} clips. Against {_short(best)}, the best of those that are not fastvid: {times}.",
            )
        )
    return found


def best_rival(row: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The fastest of a row that is not fastvid's."""
    rivals = [one for one in row["contenders"] if "fastvid_is_faster_by" in one]
    return max(rivals, key=lambda one: float(one["rate"]), default=None)


def title(row: Mapping[str, Any]) -> str:
    """A row's name."""
    return ", ".join([row["question"], *([row["encoding"]] if "encoding" in row else []), row["sampling"]])


def _short(one: Mapping[str, Any]) -> str:
    """A contender's name, with what tells it apart in its row."""
    settings = one["settings"]
    if one["name"] == "fastvid":
        return f"fastvid, {settings['product']} of {settings['encoding']}"
    return f"{one['name']} on {settings['encoding']}" if "encoding" in settings else str(one["name"])
