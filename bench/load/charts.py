"""Charts of the results of `bench.load.load`, `cold`, `loops` and `annotations`, for `bench.report`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from bench.common.charts import Bars, Chart, Table
from bench.load.goals import sentence

_PARTS: Final = {
    "reach": ("100 million samples: byte ranges of 512 clips", "ranges_ms", "ranges_cpu_ms", "ranges_megabytes"),
    "reach from disk": ("the same, with a cold page cache", "ranges_ms", "ranges_cpu_ms", "ranges_megabytes"),
    "open": ("10,000 shards: until the first batch", "first_batch_ms", "cpu_ms", "megabytes"),
    "first": ("footage: until the first batch", "first_batch_ms", "cpu_ms", "megabytes"),
}


def load(record: Mapping[str, Any]) -> list[Chart]:
    """Return the charts of a result of `bench.load.load`."""
    found: list[Chart] = []
    facts: list[list[str]] = []
    for row in record["rows"]:
        dataset = row["dataset"]
        for state in [one for one in ("page-cached", "cold") if one in row]:
            entries = {entry["pipeline"]: entry for entry in row[state]}
            rivals = [name for name, one in entries.items() if "fastvid_is_faster_by" in one and name != _OWN]
            values = "uint8 levels" if record.get("uint8") else "normalised float32"
            found.append(
                Bars(
                    f"Loading {dataset}, {state}",
                    "clips/s",
                    {name: entry["clips_a_second"] for name, entry in entries.items()},
                    {name: (one["clips_a_second_min"], one["clips_a_second_max"]) for name, one in entries.items()},
                    rivals,
                    f"Batches of {row['batch']} clips, {values} on the host. The decoder alone makes RGB"
                    " levels that are discarded.",
                )
            )
            if rivals:
                best = max(rivals, key=lambda name: entries[name]["clips_a_second"])
                ratio = _ratio(entries[best]["fastvid_is_faster_by"], "x")
                facts.append([f"{dataset}, {state}: speed relative to {best}", ratio])
            reached = next((entry["fastvid_reaches"] for entry in entries.values() if "fastvid_reaches" in entry), None)
            if reached:
                facts.append([f"{dataset}, {state}: speed relative to the decoder alone", _ratio(reached)])
        facts += [[f"{dataset}: goal", sentence(goal)] for goal in row.get("goals", ())]
        if "http" not in row:
            continue
        http = row["http"]
        facts.append(
            [f"{dataset}: HTTP with {http['latency_ms']:.0f} ms latency / local", _ratio(http["http_over_local"])]
        )
        facts.append(
            [f"{dataset}: the server's CPU time, on the same cores", f"{http['server_cpu_ms_a_clip']:.1f} ms per clip"]
        )
        for kind, name in (("a_clip", "a planned clip"), ("a_whole_file", "a whole file")):
            one = http[kind]
            facts.append(
                [f"{dataset}: {name} over HTTP", f"{one['requests']:.1f} requests, {one['bytes'] / 1e3:.1f} kB"]
            )
        for kind, beside in row.get("beside", {}).items():
            spread = f"{100 * beside['rise_min']:+.1f} to {100 * beside['rise_max']:+.1f}"
            what = "an unrelated decoding process" if kind == "elsewhere" else f"the loader, workers={kind}"
            facts.append([f"{dataset}: step time beside {what}", f"{100 * beside['rise']:+.1f} % ({spread})"])
    return [*found, Table("Loading: ratios and costs", ("what", "measured"), facts)]


_OWN: Final = "fastvid, processes"


def _ratio(found: Mapping[str, float], unit: str = "") -> str:
    cpu = f", {found['cpu']:.2f}{unit} by CPU time" if found.get("cpu") else ""
    return f"{found['wall']:.2f}{unit} ({found['wall_min']:.2f} to {found['wall_max']:.2f}){cpu}"


def cold(record: Mapping[str, Any]) -> list[Chart]:
    """Return the table of a result of `bench.load.cold`."""
    rows = []
    for part, (name, *columns) in _PARTS.items():
        if part in record:
            values = [record[part][column] for column in columns]
            rows.append([name, *(f"{one['median']:.1f} ({one['min']:.1f} to {one['max']:.1f})" for one in values)])
    note = "Each row was measured in fresh processes; for the last row they had imported torch."
    return [Table("Time to the first batch", ("what", "ms", "CPU ms", "MB"), rows, note)]


def loops(record: Mapping[str, Any]) -> list[Chart]:
    """Return the table of a result of `bench.load.loops`."""
    return [
        Table(
            "The same small job in each library",
            ["program", "lines", "clips/s", "of ClipLoader", "same clips again", "with another number of workers"],
            [loops_row(row) for row in record["rows"]],
            f"Batches of {record['batch']} clips of 8 random frames and a random crop, {record['workers']} workers.",
        )
    ]


def loops_row(row: Mapping[str, Any]) -> list[str]:
    """Return the cells of a program of `bench.load.loops`, in the report and in docs/bench.md."""
    if "refused" in row:
        return [row["program"], str(row["lines"]), "did not run", "", "", ""]
    spread = "" if row["program"] == "ClipLoader" else " ({:.2f} to {:.2f})".format(*row["of_clip_loader_range"])
    same = ["yes" if row[name] else "no" for name in ("repeats", "elastic")]
    return [
        row["program"],
        str(row["lines"]),
        f"{row['clips_per_s']:.0f}",
        f"{row['of_clip_loader']:.2f}{spread}",
        *same,
    ]


def annotations(record: Mapping[str, Any]) -> list[Chart]:
    """Return the table of a result of `bench.load.annotations`."""
    plain, captions = record["plain"], record["captions"]
    rows = [[name.replace("_", " "), f"{plain[name]:,.1f}", f"{captions[name]:,.1f}"] for name in plain]
    note = f"PSS divides a page among the processes that map it. Query: {record['where']}."
    return [Table(f"Opening {record['rows']:,} rows", ("what", "without captions", "with captions"), rows, note)]
