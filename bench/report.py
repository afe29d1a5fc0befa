"""Render result files of one or several machines as one HTML page.

python -m bench report                                  all of bench/results, to runs/bench/report.html
python -m bench report a/decode.json b/decode.json      compare two machines or commits
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from bench.common.harness import RESULTS, is_rows, names_of, rows_of, scalars, text_of
from fastvid.errors import UsageError

# What may follow the name of a number: its range over rounds.
_RANGE: Final = ("_min", "_max")
_UNITS: Final = {"rate": "clips/s", "clips_a_second": "clips/s", "cpu_ms": "ms"}
_MOST_ROWS: Final = 60
_log = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``python -m bench report``."""
    parser.add_argument("files", nargs="*", type=Path, help="result files (bench/results/*.json)")
    parser.add_argument("--html", type=Path, default=Path("runs/bench/report.html"), help="output file (%(default)s)")


def run(args: argparse.Namespace) -> int:
    """Write the page; return 0."""
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
    names = "" if [name.replace("_", " ") for name in found] == [words] else f": {', '.join(found)}"
    return words[:1].upper() + words[1:] + names


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
    from fastvid.report.page import card, definitions, table

    plain = {key: value for key, value in record.items() if not is_rows(value) and key not in ("machine", "schema")}
    if values := dict(scalars(plain)):
        yield card("", f"<details><summary>{len(values)} settings and totals</summary>{definitions(values)}</details>")
    for title, rows in rows_of(record):
        yield from _table(title, rows, table, card)
        names = names_of(rows)
        ranged = dict.fromkeys(key for row in rows for key in row if {f"{key}{end}" for end in _RANGE} <= row.keys())
        for key in ranged:
            drawn = {name: row for name, row in zip(names, rows, strict=True) if row.keys() >= {key, f"{key}_min"}}
            spread = {name: (row[f"{key}_min"], row[f"{key}_max"]) for name, row in drawn.items()}
            values = {name: row[key] for name, row in drawn.items()}
            yield card(f"{title}: {key}", bars(values, unit=_UNITS.get(key, ""), spread=spread))


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
