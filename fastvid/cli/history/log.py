"""List the generations of a dataset, newest first: when each was made, what was done and why.

A change of a dataset never alters what readers opened: it makes a new generation, and `fastvid gc` deletes old ones.
"""

from __future__ import annotations

import argparse
import json

from fastvid.errors import visible
from fastvid.runtime.values import count, size, things
from fastvid.sharding.change.history import Entry, list_generations
from fastvid.storage import open_storage


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``fastvid log``."""
    parser.add_argument("dataset", metavar="DIR", help="folder of the dataset")
    parser.add_argument("--json", action="store_true", help="print a JSON list")


def run(args: argparse.Namespace) -> int:
    """Print the generations."""
    entries = list_generations(open_storage(args.dataset))
    if args.json:
        print(json.dumps([entry.to_json() for entry in entries], indent=1))
    else:
        print("\n".join(_text(entry) for entry in entries))
    return 0


def _text(entry: Entry) -> str:
    tags = f" [{', '.join(entry.tags)}]" if entry.tags else ""
    lines = [f"generation {entry.number}{tags}  {entry.time or 'time not recorded'}  {visible(entry.note)}"]
    if entry.reason:
        lines.append(f"    {visible(entry.reason)}")
    samples = "" if entry.samples is None else things(entry.samples, "sample")
    hidden = f", {count(entry.removed)} removed and hidden" if entry.removed else ""
    kept = f"{things(entry.shards, 'shard')}, {size(entry.bytes)}"
    lines.append(f"    {samples}{hidden}{' in ' if samples else ''}{kept}")
    return "\n".join(lines)
