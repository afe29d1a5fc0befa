"""What results of `bench.load.load` and `bench.load.cold` show: see `bench.report`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from bench.common.charts import Bars, Chart, Table

_PARTS: Final = {
    "reach": ("100 million samples: ranges of 512 clips", "ranges_ms", "ranges_cpu_ms", "ranges_megabytes"),
    "reach from disk": ("the same, from the disk", "ranges_ms", "ranges_cpu_ms", "ranges_megabytes"),
    "open": ("10,000 shards: to the first batch", "first_batch_ms", "cpu_ms", "megabytes"),
    "first": ("footage: to the first batch", "first_batch_ms", "cpu_ms", "megabytes"),
}


def load(record: Mapping[str, Any]) -> list[Chart]:
    """What a result shows."""
    found: list[Chart] = []
    facts: list[list[str]] = []
    for row in record["rows"]:
        dataset = row["dataset"]
        for state in ("page-cached", "cold"):
            entries = {entry["pipeline"]: entry for entry in row[state]}
            rivals = [name for name, entry in entries.items() if "fastvid_is_faster_by" in entry and name != _OWN]
            found.append(
                Bars(
                    f"Loading {dataset}, {state}",
                    "clips/s",
                    {name: entry["clips_a_second"] for name, entry in entries.items()},
                    {name: (one["clips_a_second_min"], one["clips_a_second_max"]) for name, one in entries.items()},
                    rivals,
                    f"Batches of {row['batch']} clips, normalised float32 on the host. The decoder alone gives RGB"
                    " levels that nobody keeps.",
                )
            )
            if rivals:
                best = max(rivals, key=lambda name: entries[name]["clips_a_second"])
                facts.append([f"{dataset}, {state}: over {best}", _ratio(entries[best]["fastvid_is_faster_by"], "x")])
            reached = next((entry["fastvid_reaches"] for entry in entries.values() if "fastvid_reaches" in entry), None)
            if reached:
                facts.append([f"{dataset}, {state}: of the decoder alone", _ratio(reached)])
        http = row["http"]
        facts.append(
            [f"{dataset}: over {http['latency_ms']:.0f} ms of latency, of local", _ratio(http["http_over_local"])]
        )
        facts.append(
            [f"{dataset}: the server's CPU, on the same cores", f"{http['server_cpu_ms_a_clip']:.1f} ms a clip"]
        )
        for kind, name in (("a_clip", "a planned clip"), ("a_whole_file", "a whole file")):
            one = http[kind]
            facts.append([f"{dataset}: {name} by HTTP", f"{one['requests']:.1f} requests, {one['bytes'] / 1e3:.1f} kB"])
        for kind, beside in row["beside"].items():
            spread = f"{100 * beside['rise_min']:+.1f} to {100 * beside['rise_max']:+.1f}"
            what = "decoding that has no part in it" if kind == "elsewhere" else f"the loader, workers={kind}"
            facts.append([f"{dataset}: step beside {what}", f"{100 * beside['rise']:+.1f} % ({spread})"])
    return [*found, Table("Loading, in ratios", ("what", "measured"), facts)]


_OWN: Final = "fastvid, processes"


def _ratio(found: Mapping[str, float], unit: str = "") -> str:
    cpu = f", {found['cpu']:.2f}{unit} by CPU time" if found.get("cpu") else ""
    return f"{found['wall']:.2f}{unit} ({found['wall_min']:.2f} to {found['wall_max']:.2f}){cpu}"


def cold(record: Mapping[str, Any]) -> list[Chart]:
    """What a result shows."""
    rows = []
    for part, (name, *columns) in _PARTS.items():
        if part in record:
            values = [record[part][column] for column in columns]
            rows.append([name, *(f"{one['median']:.1f} ({one['min']:.1f} to {one['max']:.1f})" for one in values)])
    note = "Each in a process that has opened nothing before; for the last row it has imported torch."
    return [Table("From nothing to the first batch", ("what", "ms", "CPU ms", "MB"), rows, note)]
