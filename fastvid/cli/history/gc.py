"""Delete old generations and the shards that only they refer to.

Without --yes, only list what would be deleted. --keep names generations that must stay, as `fastvid log` numbers
them. Jobs that use a deleted generation can no longer read it. Files whose names are not fastvid's are never deleted.
"""

from __future__ import annotations

import argparse

from fastvid.runtime.values import size, things
from fastvid.sharding.change.history import Garbage, collect_garbage, find_garbage
from fastvid.storage import open_storage


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``fastvid gc``."""
    parser.add_argument("dataset", metavar="DIR", help="folder of the dataset")
    parser.add_argument(
        "--keep-generations", type=int, default=1, metavar="N", help="newest generations to keep (default 1)"
    )
    parser.add_argument("--keep", type=int, nargs="+", default=[], metavar="N", help="numbers of others to keep")
    parser.add_argument("--yes", action="store_true", help="delete; without it, only show what would be deleted")


def run(args: argparse.Namespace) -> int:
    """Delete, or list what would be deleted."""
    storage = open_storage(args.dataset)
    act = collect_garbage if args.yes else find_garbage
    print(_text(act(storage, keep_generations=args.keep_generations, keep=args.keep), deleted=args.yes))
    return 0


def _text(garbage: Garbage, *, deleted: bool) -> str:
    kept = f"generations kept: {', '.join(map(str, garbage.kept))}"
    if not garbage.files:
        return f"{kept}\nnothing to delete"
    lines = [f"{size(number):>8}  {name}" for name, number in garbage.files.items()]
    lines.append(kept)
    if garbage.dropped:
        lines.append(f"generations {'deleted' if deleted else 'to delete'}: {', '.join(map(str, garbage.dropped))}")
    verb = "deleted" if deleted else "to delete; --yes deletes them"
    lines.append(f"{things(len(garbage.files), 'file')}, {size(garbage.bytes)} {verb}")
    return "\n".join(lines)
