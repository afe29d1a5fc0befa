"""Options, machine facts and JSON records, shared by all benchmarks."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from bench.common import newest
from fastvid.errors import JobError
from fastvid.runtime.processes import available_cores

_HERE: Final = Path(__file__).parents[1]
# In a checkout, the repository's bench/results; in an installation, below the working directory.
RESULTS: Final = _HERE / "results" if _HERE.parent.joinpath("pyproject.toml").exists() else Path("bench/results")

_PACKAGES: Final = ("decord", "numpy", "nvidia-dali-cuda120", "torch")  # besides those of `newest`


FOLDER: Final = {"metavar": "FOLDER"}
NEEDED: Final = {"metavar": "FOLDER", "required": True}
DATASET: Final = {"metavar": "DIR"}
_SHARED: Final[Mapping[str, tuple[Any, ...]]] = {
    "footage": (Path, "real videos of which the datasets are made", FOLDER),
    "data": (str, "a dataset, can be repeated; instead of --footage", {"action": "append", "default": [], **DATASET}),
    "profiles": (["compact", "intra"], "profiles of the datasets that are made of --footage"),
    "cache": (Path("runs/bench"), "folder for datasets"),
    "installed": (False, "rivals as installed here, not the newest"),
    "by": ("wall", "time that decides; cpu on a busy machine", {"choices": ("wall", "cpu")}),
    "workers": (available_cores(), "cores to use"),
    "batch": (16, "clips per batch"),
    "rounds": (5, "measured rounds"),
    "sweep_rounds": (3, "rounds per setting of a sweep"),
    "seeds": (5, "runs, each with another seed"),
    "epochs": (40, "epochs per run"),
    "latency": (20.0, "milliseconds before a response of the server"),
}
"""Options that several benchmarks have: default or type, help, and what else argparse takes."""


def options(shared: str = "", *, json: str | None = None, **own: Any) -> Callable[[argparse.ArgumentParser], None]:
    """Return the ``add_arguments`` of a benchmark.

    `shared`: names of options that several have, as words. `json`: name of the result file. `own`: its own options, of
    the form of `_SHARED`, and other defaults of shared ones.
    """
    table = {name: _SHARED[name] for name in shared.split()}
    table |= {name: one if isinstance(one, tuple) else (one, *_SHARED[name][1:]) for name, one in own.items()}
    if json is not None:
        table["json"] = (RESULTS / json, "result file")

    def add_arguments(parser: argparse.ArgumentParser) -> None:
        for name, (default, text, *more) in table.items():
            parser.add_argument(f"--{name.replace('_', '-')}", **_argument(default, text) | dict(*more))

    return add_arguments


def _argument(default: Any, text: str) -> dict[str, Any]:
    """Return what argparse needs for an option with this default, or of this type."""
    if isinstance(default, type):
        return {"type": default, "help": text}
    if default is False:
        return {"action": "store_true", "help": text}
    if isinstance(default, list):
        kind = type(default[0]) if default else str
        return {"nargs": "+", "type": kind, "default": default, "help": f"{text} ({_words(default)})"}
    return {"type": type(default), "default": default, "help": f"{text} (default: %(default)s)"}


def _words(values: Sequence[object]) -> str:
    return ("default: " + " ".join(map(str, values)) if len(values) < 6 else "default: all") if values else "none"


class Record(dict[str, Any]):
    """A result: its schema, the machine, options as they were given, and what is measured."""

    def __init__(self, schema: str, args: argparse.Namespace, *settings: str, **facts: Any) -> None:
        given = {name: getattr(args, name) for name in settings}
        super().__init__({"schema": schema, "machine": machine_facts(), **given, **facts})
        self._path: Path | None = args.json

    def save(self) -> None:
        """Write the result to --json, if that is given."""
        if self._path is not None:
            write_json(self._path, self)

    def finish(self) -> int:
        """Print the result and write it; return 0."""
        print(shown(self))
        self.save()
        return 0


def shown(record: Mapping[str, Any]) -> str:
    """Format a result as text: its values, and its rows as tables."""
    values, tables = [], {}
    for key, value in record.items():
        # Values of several names are a table, too.
        named = [{"": name, **row} for name, row in _items(value) if isinstance(row, Mapping)]
        if is_rows(value) or len(named) > 1:
            tables[key] = named or value
            value = {name: one for name, one in _items(value) if not isinstance(one, Mapping)}
        values += [f"{name}: {text}" for name, text in scalars({key: value}) if key != "machine"]
    lines = values
    for title, rows in rows_of(tables):
        flat = [dict(scalars({key: value for key, value in row.items() if not is_rows(value)})) for row in rows]
        heads = list(dict.fromkeys(head for row in flat for head in row))
        cells = [heads, *([row.get(head, "") for head in heads] for row in flat)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        table = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]
        lines += ["", title, *table]
    return "\n".join(lines)


def _items(value: object) -> list[tuple[str, Any]]:
    return list(value.items()) if isinstance(value, Mapping) else []


def rows_of(record: Mapping[str, Any], within: str = "") -> Iterator[tuple[str, list[Mapping[str, Any]]]]:
    """Yield the lists of rows of a result with their titles; lists inside a row follow it."""
    for key, rows in record.items():
        if is_rows(rows):
            yield f"{within}{key}", rows
            for name, row in zip(names_of(rows), rows, strict=True):
                yield from rows_of(row, f"{name}: ")


def is_rows(value: object) -> bool:
    """Return whether a value is a list of rows."""
    return isinstance(value, list) and bool(value) and all(isinstance(row, dict) for row in value)


def names_of(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a distinct name for each row, of its words."""
    words = [", ".join(value for value in row.values() if isinstance(value, str)) for row in rows]
    return [word if word and words.count(word) == 1 else f"{word} {n}".strip() for n, word in enumerate(words, 1)]


def scalars(value: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the numbers and words of a value, named by their places in it."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from scalars(inner, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(value, list) and any(isinstance(item, (dict, list)) for item in value):
        for number, inner in enumerate(value):
            yield from scalars(inner, f"{prefix}[{number}]")
    elif isinstance(value, list):
        yield prefix, ", ".join(map(str, value))
    else:
        yield prefix, text_of(value)


def text_of(value: object) -> str:
    """Return a number or word as text; "-" for None."""
    return f"{value:.6g}" if isinstance(value, float) else "-" if value is None else str(value)


def machine_facts() -> dict[str, Any]:
    """Return hardware, versions and load of this machine, as far as they can be read."""
    versions = newest.versions()
    versions |= {package: found for package in _PACKAGES if (found := newest.installed(package)) is not None}
    return {
        "cpu": _first("/proc/cpuinfo", "model name"),
        "cores": available_cores(ranks=1),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "packages": versions,
        "commit": _commit(),
        "load_average": round(os.getloadavg()[0], 2),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _commit() -> str | None:
    # An installation may be inside another project's checkout, whose commit would be wrong.
    git = shutil.which("git")
    if git is None or not _HERE.parent.joinpath(".git").exists():
        return None
    command = [git, "-C", str(_HERE), "rev-parse", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or None


def _first(file: str, field_name: str) -> str | None:
    try:
        lines = Path(file).read_text().splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(field_name)), None)


def run_json(command: Sequence[str], **variables: str | None) -> dict[str, Any]:
    """Run a command and return the JSON object of its last line.

    `variables`: of its environment; None removes one. Its processes compute in one thread each: several commands share
    the cores, and the sums stay the same.
    """
    wanted = os.environ | {"OMP_NUM_THREADS": "1", "FASTVID_LOG": "WARNING"} | variables
    environment = {name: value for name, value in wanted.items() if value is not None}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=False)
    if done.returncode:
        raise JobError(f"`{' '.join(command)}` ended with exit code {done.returncode}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def write_json(path: Path, record: Mapping[str, Any]) -> None:
    """Write a result as JSON with sorted keys and a trailing newline."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
