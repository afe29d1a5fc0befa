"""Render result files of one or several machines as one HTML page, and update the README's table.

python -m bench report                                  all of bench/results, to runs/bench/report.html
python -m bench report a/decode.json b/decode.json      compare two machines or commits
python -m bench report --readme README.md               rewrite the table between the README's markers
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from bench.common.charts import Bars, Chart, Lines, Table
from bench.common.harness import RESULTS
from bench.decode.goals import best_rival
from fastvid.errors import UsageError

# The function that returns the charts of each schema. A result with an unknown schema is shown as a table.
READERS: Final = {
    "fastvid-bench-annotations/1": "bench.load.charts:annotations",
    "fastvid-bench-audio/1": "bench.load.audio:charts",
    "fastvid-bench-batches/1": "bench.batches.charts:charts",
    "fastvid-bench-averaging/1": "bench.strategies.charts:contest",
    "fastvid-bench-clients/1": "bench.strategies.charts:contest",
    "fastvid-bench-cold/1": "bench.load.charts:cold",
    "fastvid-bench-decode/1": "bench.decode.charts:charts",
    "fastvid-bench-elastic/1": "bench.train.charts:elastic",
    "fastvid-bench-gpu/2": "bench.gpu.charts:charts",
    "fastvid-bench-index/1": "bench.shard.in_place:charts",
    "fastvid-bench-launch/1": "bench.train.charts:launch",
    "fastvid-bench-load/1": "bench.load.charts:load",
    "fastvid-bench-loops/1": "bench.load.charts:loops",
    "fastvid-bench-migration/1": "bench.strategies.charts:migration",
    "fastvid-bench-model-speed/1": "bench.train.model_speed:charts",
    "fastvid-bench-moments/2": "bench.strategies.charts:moments",
    "fastvid-bench-motion-sync/2": "bench.strategies.charts:motion",
    "fastvid-bench-motion-wire/1": "bench.strategies.charts:contest",
    "fastvid-bench-motion/1": "bench.train.charts:motion",
    "fastvid-bench-quality/1": "bench.shard.quality:charts",
    "fastvid-bench-reads/1": "bench.load.reads:charts",
    "fastvid-bench-scale/1": "bench.scaling.scale:charts",
    "fastvid-bench-segments/1": "bench.shard.segments:charts",
    "fastvid-bench-server/1": "bench.strategies.charts:server",
    "fastvid-bench-shard/1": "bench.shard.charts:throughput",
    "fastvid-bench-lerobot/1": "bench.load.lerobot:charts",
    "fastvid-bench-stores/1": "bench.load.stores:charts",
    "fastvid-bench-train/1": "bench.train.charts:train",
    "fastvid-bench-two-stream/1": "bench.train.charts:two_stream",
    "fastvid-decode-soak/1": "bench.common.soak_charts:decoding",
    "fastvid-scaling-prediction/1": "bench.scaling.predict:charts",
    "fastvid-shard-corpus/1": "bench.shard.charts:corpus",
    "fastvid-shard-kills/1": "bench.common.soak_charts:shard_kills",
    "fastvid-shard-mutations/1": "bench.shard.charts:mutations",
    "fastvid-shard-ray-kills/1": "bench.shard.charts:ray_kills",
    "fastvid-soak-audio/1": "bench.common.soak_charts:audio",
    "fastvid-soak-load-kills/1": "bench.common.soak_charts:rank_kills",
    "fastvid-soak-load-memory/1": "bench.common.soak_charts:loading",
    "fastvid-soak-tampering/1": "bench.common.soak_charts:tampering",
    "fastvid-tune/1": "bench.shard.charts:tune",
}
# Sections of the page by the folder that draws them; "" is for results of no known schema.
_SUBJECTS: Final = {
    "decode": "Decoding", "load": "Loading", "shard": "Sharding", "train": "Training", "strategies": "Strategies",
    "scaling": "Scaling", "gpu": "Devices", "batches": "Batches", "common": "Long runs", "": "Other results",
}  # fmt: skip
BEGIN: Final = "<!-- measured: written by `python -m bench report --readme README.md` -->"
END: Final = "<!-- end of measured -->"
_MOST_ROWS: Final = 60
_log = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``python -m bench report``."""
    parser.add_argument("files", nargs="*", type=Path, help="result files (bench/results/*.json)")
    parser.add_argument("--html", type=Path, default=Path("runs/bench/report.html"), help="output file (%(default)s)")
    parser.add_argument(
        "--docs", type=Path, metavar="DIR", help="update the tables of the pages in this folder instead"
    )
    parser.add_argument("--readme", type=Path, metavar="FILE", help="update the table in this file instead")


def run(args: argparse.Namespace) -> int:
    """Write the page or the README's table; return 0."""
    if args.readme:
        args.readme.write_text(with_table(args.readme.read_text(), readme_table(load(RESULTS / "decode.json"))))
        return 0
    files = args.files or sorted(RESULTS.glob("*.json"))
    if not files:
        raise UsageError(f"no results in {RESULTS}", hint="run `python -m bench decode`, or name result files")
    text = render({label: load(file) for label, file in _labels(files).items()})
    args.html.parent.mkdir(parents=True, exist_ok=True)
    args.html.write_text(text, encoding="utf-8")
    _log.info("wrote %d results to %s", len(files), args.html)
    return 0


def load(file: Path) -> dict[str, Any]:
    """Read a result."""
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read the result: {error}", file=file) from error
    if not isinstance(record, dict):
        raise UsageError("not a result: expected a JSON object", file=file)
    return record


def _labels(files: Sequence[Path]) -> dict[str, Path]:
    """Return the files by their shortest distinct path suffix."""
    for parts in range(1, 1 + max(len(file.resolve().parts) for file in files)):
        named = {"/".join(file.resolve().with_suffix("").parts[-parts:]): file for file in files}
        if len(named) == len(files):
            return named
    raise UsageError("duplicate result file", hint="name each file once")


def render(records: Mapping[str, Mapping[str, Any]]) -> str:
    """Render the page."""
    from fastvid.report.charts import bars, lines
    from fastvid.report.page import Section, card, document, table

    def drawn(chart: Chart) -> str:
        if isinstance(chart, Bars):
            return bars(chart.values, unit=chart.unit, spread=chart.spread, quiet=chart.rivals)
        if isinstance(chart, Lines):
            return lines(
                chart.series, chart.up, across=chart.across, log_x=chart.log_x, log_y=chart.log_y, dashed=chart.expected
            )
        return table(chart.heads, chart.rows)

    subjects: dict[str, dict[str, Mapping[str, Any]]] = {title: {} for title in _SUBJECTS.values()}
    for label, record in records.items():
        part = READERS.get(str(record.get("schema")), ".").split(".")[1]
        subjects[_SUBJECTS[part]][label] = record
    sections = [
        Section(title, "".join(card(chart.title, drawn(chart), chart.note) for chart in merged(found)))
        for title, found in subjects.items()
        if found
    ]
    return document(
        "Benchmarks",
        [*sections, Section("Machines", card("Where it was measured", table(*_machines(records))))],
        command="bench",
        lead="Bars are medians; thin lines span the slowest to the fastest round. Grey bars are rivals. Ratios compare"
        " contenders of one run; absolute numbers depend on the machine.",
    )


def merged(records: Mapping[str, Mapping[str, Any]]) -> list[Chart]:
    """Return all charts; those of the same title and kind are merged, with each file's label in the names."""
    groups: dict[tuple[str, type], list[tuple[str, Chart]]] = {}
    for label, record in records.items():
        for chart in charts(record, label):
            groups.setdefault((chart.title, type(chart)), []).append((label, chart))
    return [_merge(group) for group in groups.values()]


def _merge(group: Sequence[tuple[str, Chart]]) -> Chart:
    first = group[0][1]
    if len(group) == 1:
        return first
    if isinstance(first, Table):
        rows = [[f"{label}: {row[0]}", *row[1:]] for label, chart in group for row in chart.rows]  # type: ignore[union-attr]
        return replace(first, rows=rows)
    if isinstance(first, Lines):
        series = {f"{label}: {name}": at for label, chart in group for name, at in chart.series.items()}  # type: ignore[union-attr]
        expected = [f"{label}: {name}" for label, chart in group for name in chart.expected]  # type: ignore[union-attr]
        return replace(first, series=series, expected=expected)
    # Group the files' bars by contender.
    names = dict.fromkeys(name for _, chart in group for name in chart.values)  # type: ignore[union-attr]
    values, spread, rivals = {}, {}, []
    for name in names:
        for label, chart in group:
            assert isinstance(chart, Bars)
            if name not in chart.values:
                continue
            values[f"{name} ({label})"] = chart.values[name]
            if name in chart.spread:
                spread[f"{name} ({label})"] = chart.spread[name]
            if name in chart.rivals:
                rivals.append(f"{name} ({label})")
    return replace(first, values=values, spread=spread, rivals=rivals)


def charts(record: Mapping[str, Any], label: str) -> list[Chart]:
    """Return the charts of a result."""
    schema = str(record.get("schema"))
    if schema not in READERS:
        rows = [(key, value) for key, value in _scalars(record) if not key.startswith("machine.")]
        note = "" if len(rows) <= _MOST_ROWS else f"The first {_MOST_ROWS} of {len(rows)} values."
        return [Table(label, ("value", ""), rows[:_MOST_ROWS], note)]
    found: list[Chart] = reader(schema)(record)
    return found


def reader(schema: str) -> Callable[[Mapping[str, Any]], list[Chart]]:
    """Return the function that makes the charts of a schema."""
    module, _, name = READERS[schema].partition(":")
    found: Callable[[Mapping[str, Any]], list[Chart]] = getattr(importlib.import_module(module), name)
    return found


def _scalars(value: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _scalars(inner, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(value, list) and any(isinstance(item, (dict, list)) for item in value):
        for number, inner in enumerate(value):
            yield from _scalars(inner, f"{prefix}[{number}]")
    elif isinstance(value, list):
        yield prefix, ", ".join(map(str, value))
    else:
        yield prefix, f"{value:.6g}" if isinstance(value, float) else str(value)


def _machines(records: Mapping[str, Mapping[str, Any]]) -> tuple[Sequence[str], list[list[str]]]:
    keys = ("cpu", "cores", "gpu", "commit", "load_average", "time")
    rows = []
    for label, record in records.items():
        # A result of several runs records the machine of each; show the first.
        parts = [record, *(record.get("worlds") or ()), *record.values()]
        machine = next((part["machine"] for part in parts if isinstance(part, dict) and part.get("machine")), {})
        facts = [str(machine.get(key) or "-") for key in keys]
        facts[keys.index("commit")] = facts[keys.index("commit")][:10]
        rows.append([label, *facts])
    return ("result", "CPU", "cores", "GPU", "commit", "load average", "time"), rows


def readme_table(record: Mapping[str, Any]) -> str:
    """Return the decode benchmark as a Markdown table, with ratios to the best rival of the same run."""
    machine, by = record["machine"], record.get("by", "wall")
    unit = "CPU ms a clip" if by == "cpu" else "clips/s"
    lines = [
        f"| encoding, clips | packets decoded | fastvid RGB, {unit} | best rival, {unit} | ratio | YUV for a GPU |",
        "|---|---|---|---|---|---|",
    ]
    for row in record["rows"]:
        ours = {
            (entry["settings"]["product"], entry["settings"]["source"]): entry
            for entry in row["contenders"]
            if entry["name"] == "fastvid"
        }
        best = best_rival(row, by)
        if best is None:
            continue
        times = best["fastvid_is_faster_by"]
        rgb, planes = times["rgb from memory"], times["planes from memory"]
        packets, name = row["packets_a_clip"], row.get("encoding", row["profile"])["name"]
        spread = f" ({rgb[f'{by}_min']:.1f} to {rgb[f'{by}_max']:.1f})" if f"{by}_min" in rgb else ""
        lines.append(
            f"| `{name}`, {row['sampling']} | {packets['planned']:.0f} of {packets['from_keys']:.0f}"
            f" | {_speed(ours['rgb', 'memory'], by)} | {best['name']} {_speed(best, by)}"
            f" | **{rgb[by]:.1f}x**{spread} | {planes[by]:.1f}x |"
        )
    for row in record.get("today", ()):
        lines += _today(row)
    versions = ", ".join(f"{name} {version}" for name, version in sorted(machine["packages"].items()))
    clips, workers = record["rows"][0]["clips"], record["workers"]
    by_cpu = f" CPU time, at a load of {machine['load_average']:.1f} when the run began;" if by == "cpu" else ""
    lines += [
        "",
        f"{workers} of {machine['cores']} cores of {machine['cpu']};{by_cpu} {clips} clips of real videos with a short"
        " side of 256 pixels, every contender with its best settings, rivals that keep their decoders open among them,"
        f" medians of alternating rounds ({versions}).",
        "Measure your machine and your videos with `python -m bench decode`.",
    ]
    return "\n".join(lines)


def _speed(entry: Mapping[str, Any], by: str) -> str:
    return f"{entry['cpu_ms']:.1f}" if by == "cpu" else f"{entry['rate']:.0f}"


def _today(row: Mapping[str, Any]) -> list[str]:
    """Return table rows of fastvid on its profiles against the best rival on x264's defaults."""
    from bench.decode.encodings import DEFAULT

    best = best_rival(row)
    if best is None:
        return []
    rates = {
        f"{one['settings']['product']} of {one['settings']['encoding']}": one["rate"]
        for one in row["contenders"]
        if one["name"] == "fastvid"
    }
    times = best["fastvid_is_faster_by"]
    return [
        f"| `{name}` against rivals on `{DEFAULT}`, {row['sampling']} | | {rates[f'rgb of {name}']:.0f}"
        f" | {best['name']} {best['rate']:.0f} | **{times[f'rgb of {name}']['wall']:.1f}x**"
        f" | {times[f'planes of {name}']['wall']:.1f}x |"
        for name in row["megabytes"]
        if name != DEFAULT
    ]


def with_table(readme: str, table: str) -> str:
    """Return the README with the text between its markers replaced."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise UsageError("the README lacks the markers of the table", hint=f"add the lines {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{table}\n\n{END}{after}"
