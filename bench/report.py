"""Render result files of one or several machines as one HTML page, and update the README's table.

python -m bench report                                  all of bench/results, to runs/bench/report.html
python -m bench report a/decode.json b/decode.json      compare two machines or commits
python -m bench report --readme README.md               rewrite the table between the README's markers
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from bench.common.harness import RESULTS, is_rows, names_of, rows_of, scalars, text_of
from bench.decode.goals import best_rival
from fastvid.errors import UsageError

# What may follow the name of a number: its range over rounds.
_RANGE: Final = ("_min", "_max")
BEGIN: Final = "<!-- measured: written by `python -m bench report --readme README.md` -->"
END: Final = "<!-- end of measured -->"
_MOST_ROWS: Final = 60
_log = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``python -m bench report``."""
    parser.add_argument("files", nargs="*", type=Path, help="result files (bench/results/*.json)")
    parser.add_argument("--html", type=Path, default=Path("runs/bench/report.html"), help="output file (%(default)s)")
    parser.add_argument("--readme", type=Path, metavar="FILE", help="update the table in this file instead")


def run(args: argparse.Namespace) -> int:
    """Write the page or the README's table; return 0."""
    if args.readme:
        args.readme.write_text(with_table(args.readme.read_text(), measured()))
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
    """Render the page: a section for each kind of result, in which results of several files are rows of one table."""
    from fastvid.report.page import Section, card, document, table

    kinds: dict[str, dict[str, Mapping[str, Any]]] = {}
    for label, record in records.items():
        kinds.setdefault(str(record.get("schema", label)), {})[label] = record
    sections = [Section(_title(kind, found), "".join(_cards(merged(found)))) for kind, found in kinds.items()]
    return document(
        "Benchmarks",
        [*sections, Section("Machines", card("Where it was measured", table(*_machines(records))))],
        command="bench",
        lead="Bars are medians; thin lines span the slowest to the fastest round. Ratios compare contenders of one run;"
        " absolute numbers depend on the machine.",
    )


def _title(kind: str, found: Mapping[str, object]) -> str:
    words = kind.partition("/")[0].removeprefix("fastvid-").removeprefix("bench-").replace("-", " ")
    return f"{words[:1].upper()}{words[1:]}: {', '.join(found)}"


def merged(records: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the record of one result, or of several with each file's label in the rows."""
    if len(records) == 1:
        return dict(next(iter(records.values())))
    keys = dict.fromkeys(key for record in records.values() for key in record)
    return {
        key: [
            {"result": label, **row} if isinstance(row, Mapping) else {"result": label, key: row}
            for label, record in records.items()
            if key in record
            for row in (record[key] if isinstance(record[key], list) else [record[key]])
        ]
        for key in keys
    }


def _cards(record: Mapping[str, Any]) -> Iterator[str]:
    """Yield the values of a result as a table, its lists of rows as tables, and numbers that have a range as bars."""
    from fastvid.report.charts import bars
    from fastvid.report.page import card, table

    plain = {key: value for key, value in record.items() if not is_rows(value) and key != "machine"}
    yield from _table("Values", [{"value": key, "": text} for key, text in scalars(plain)], table, card)
    for title, rows in rows_of(record):
        yield from _table(title, rows, table, card)
        names = names_of(rows)
        ranged = dict.fromkeys(key for row in rows for key in row if {f"{key}{end}" for end in _RANGE} <= row.keys())
        for key in ranged:
            drawn = {name: row for name, row in zip(names, rows, strict=True) if row.keys() >= {key, f"{key}_min"}}
            spread = {name: (row[f"{key}_min"], row[f"{key}_max"]) for name, row in drawn.items()}
            yield card(f"{title}: {key}", bars({name: row[key] for name, row in drawn.items()}, spread=spread))


def _table(title: str, rows: Sequence[Mapping[str, Any]], table: Any, card: Any) -> Iterator[str]:
    heads = list(
        dict.fromkeys(key for row in rows for key, value in row.items() if not isinstance(value, (dict, list)))
    )
    if heads:
        cells = [[text_of(row.get(head, "")) for head in heads] for row in rows[:_MOST_ROWS]]
        yield card(title, table(heads, cells), "" if len(rows) <= _MOST_ROWS else f"The first {_MOST_ROWS} rows.")


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


def measured() -> str:
    """Return the README's table of the committed results."""
    others = [row for path in sorted(RESULTS.glob("decode_*.json")) for row in load(path).get("rows", ())]
    local = [row for row in others if row.get("encoding_of_kind") == "as it is"]
    return readme_table(load(RESULTS / "decode.json"), local, load(RESULTS / "reads.json"))


def readme_table(
    record: Mapping[str, Any], local: Sequence[Mapping[str, Any]] = (), network: Mapping[str, Any] | None = None
) -> str:
    """Return the decode benchmark as a Markdown table, with ratios to the best rival of the same run.

    `local`: rows of other records, of videos as they are. `network`: the record of `bench.load.reads`.
    """
    machine, by = record["machine"], record.get("by", "wall")
    unit = "CPU ms a clip" if by == "cpu" else "clips/s"
    lines = [
        f"| encoding, clips | packets decoded | fastvid RGB, {unit} | best rival, {unit} | ratio | YUV for a GPU |",
        "|---|---|---|---|---|---|",
    ]
    for row in (*record["rows"], *local):
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
        name = f"{row['kind']} as it is" if "kind" in row else f"`{name}`"
        spread = f" ({rgb[f'{by}_min']:.1f} to {rgb[f'{by}_max']:.1f})" if f"{by}_min" in rgb else ""
        lines.append(
            f"| {name}, {row['sampling']} | {packets['planned']:.0f} of {packets['from_keys']:.0f}"
            f" | {_speed(ours['rgb', 'memory'], by)} | {best['name']} {_speed(best, by)}"
            f" | **{rgb[by]:.1f}x**{spread} | {planes[by]:.1f}x |"
        )
    lines += () if network is None else _over_network(network)
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


def _over_network(record: Mapping[str, Any]) -> Iterator[str]:
    """Yield table rows of videos that nobody encoded for access, read in place over a network by windows."""
    for kind, ways in record["kinds"].items():
        rivals = {name: way for name, way in ways.items() if not name.startswith("fastvid")}
        best, ours = min(rivals, key=lambda name: float(rivals[name]["cpu_ms"])), ways["fastvid"]
        factor = rivals[best]["cpu_ms"] / ours["cpu_ms"]
        yield (
            f"| {kind} as it is, {record['latency_ms']:.0f} ms away, {ours['bytes'] / rivals[best]['bytes']:.0%} of the"
            f" bytes | | {ours['cpu_ms']:.0f} | {best} {rivals[best]['cpu_ms']:.0f} | **{factor:.1f}x** | |"
        )


def with_table(readme: str, table: str) -> str:
    """Return the README with the text between its markers replaced."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise UsageError("the README lacks the markers of the table", hint=f"add the lines {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{table}\n\n{END}{after}"
