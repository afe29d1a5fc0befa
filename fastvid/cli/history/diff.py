"""Show what differs between two generations of a dataset: samples, labels, captions, classes and shards.

A generation is given by its number or its tag; the second is the current one unless told otherwise. Removed samples
count as absent.
"""

from __future__ import annotations

import argparse

from fastvid.errors import visible
from fastvid.runtime.values import json_text, things
from fastvid.sharding.change.history import Difference, compare_generations
from fastvid.storage import open_storage


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``fastvid diff``."""
    parser.add_argument("dataset", metavar="DIR", help="folder of the dataset")
    parser.add_argument("old", metavar="OLD", help="number or tag of a generation")
    parser.add_argument("new", metavar="NEW", nargs="?", help="number or tag of another (default: the current one)")
    parser.add_argument("--keys", action="store_true", help="list every sample with its old and new values")
    parser.add_argument("--json", action="store_true", help="print one JSON object with everything")


def run(args: argparse.Namespace) -> int:
    """Print the differences."""
    found = compare_generations(open_storage(args.dataset), args.old, args.new)
    if args.json:
        print(json_text(found.to_json(), indent=1, default=str))
    else:
        print(_text(found, keys=args.keys))
    return 0


def _text(found: Difference, *, keys: bool) -> str:
    lines = [f"generation {found.old} to {found.new}"]
    for what, names in (("added", found.added), ("removed", found.removed)):
        if names:
            lines.append(f"{what:8}{things(len(names), 'sample')}")
            lines += [f"        {visible(key)}" for key in names] if keys else []
    for one in found.changed:
        lines.append(f"changed {things(len(one.values), 'sample')} in {visible(one.column)}")
        if keys:
            lines += [f"        {visible(f'{key}: {old!r} -> {new!r}')}" for key, old, new in one.values]
    for what, (new, old) in (("classes", found.classes), ("shards", found.shards)):
        parts = [f"{sign}{visible(name)}" for sign, names in (("+", new), ("-", old)) for name in names]
        lines += [f"{what:8}{', '.join(parts)}"] if parts else []
    if not found.differs:
        lines.append("nothing differs")
    return "\n".join(lines)
