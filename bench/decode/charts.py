"""Charts of the results of `bench.decode.decode` and `bench.decode.practice`, for `bench.report`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench.common.charts import Bars, Chart
from bench.decode.goals import best_rival


def charts(record: Mapping[str, Any]) -> list[Chart]:
    """Return the charts of a result."""
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
                f"{row['clips']} clips, {row['megabytes']} MB; the plan decodes {packets['planned']:.1f} of"
                f" {packets['from_keys']:.1f} packets per clip. Planes are YUV for a GPU to convert; the others deliver"
                f" RGB crops. Best settings found: {'; '.join(names[name]['label'] for name in rivals)}.",
            )
        )
    return found + practice([*record.get("today", ()), *record.get("sliced", ())])


def practice(rows: Sequence[Mapping[str, Any]]) -> list[Chart]:
    """Return the charts of the rows of `bench.decode.practice`."""
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
                f"{row['clips']} clips. fastvid against {_short(best)}, the fastest rival: {times}.",
            )
        )
    return found


def title(row: Mapping[str, Any]) -> str:
    """Return the title of a row."""
    return ", ".join([row["question"], *([row["encoding"]] if "encoding" in row else []), row["sampling"]])


def _short(one: Mapping[str, Any]) -> str:
    """Return a name of the contender that is unique in its row."""
    settings = one["settings"]
    if one["name"] == "fastvid":
        return f"fastvid, {settings['product']} of {settings['encoding']}"
    return f"{one['name']} on {settings['encoding']}" if "encoding" in settings else str(one["name"])
