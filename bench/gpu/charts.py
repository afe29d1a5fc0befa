"""Charts of the results of `bench.gpu.gpu`, for `bench.report`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.common.charts import Bars, Chart, Table

_WORDS = {True: "met", False: "MISSED", None: "not judged"}


def charts(record: Mapping[str, Any]) -> list[Chart]:
    """Return the goals and proofs of a result, and charts of what was swept; a rehearsal has no charts."""
    title = "Rehearsal of the GPU benchmark on a CPU" if record["fake"] else "GPU benchmark"
    rows = [
        (row["section"], row["says"], row["expected"], _number(row["found"]), _WORDS[row["met"]])
        for row in sorted(record["verdicts"], key=lambda row: not row["goal"])
    ]
    broken = [(name, how) for name, how in record["ended"].items() if how is not None]
    found: list[Chart] = [Table(f"{title}: goals and proofs", ("section", "what", "expected", "found", ""), rows)]
    if broken:
        found.append(Table(f"{title}: sections that broke", ("section", "how"), broken))
    if record["fake"]:
        return found
    sections = record["sections"]
    sweep = [row for row in sections.get("lanes", {}).get("sweep", ()) if "frames_per_s" in row]
    for dataset in dict.fromkeys(row["dataset"] for row in sweep):
        values = {
            ", ".join([f"{row['lanes']} x {row['decoder']}", *map(str, row["options"].values())]): row["frames_per_s"]
            for row in sweep
            if row["dataset"] == dataset
        }
        found.append(Bars(f"Delivered by GPU decoders: {dataset}", "frames/s", values))
    if times := sections.get("step", {}).get("cached_ms"):
        found.append(Bars("A training step on a cached batch", "ms", times))
    loaders = [row for row in sections.get("step", {}).get("loaders", ()) if "of_cached" in row]
    if loaders:
        values = {row["decoder"]: row["of_cached"] for row in loaders}
        found.append(Bars("Steps fed by the loader, relative to a cached batch", "cached = 1", values))
    return found


def _number(found: float | None) -> str:
    return "not measured" if found is None else f"{found:.6g}"
