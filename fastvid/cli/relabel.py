"""Change labels, splits or captions of samples, without rewriting a shard.

--from reads a table, CSV, JSON Lines, JSON or Parquet, with a column key, and label (a class name or index), labels (a
list of them) or any other columns; --annotations reads the
same formats as `fastvid shard` and finds samples by the names of their sources. Other samples keep their values. If a
key or class is unknown, nothing is changed and the command fails.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Mapping
from typing import Any

from fastvid.cli.shard import add_columns
from fastvid.errors import UsageError, visible
from fastvid.format.generations import read_annotations as read_table
from fastvid.format.generations import read_generation
from fastvid.runtime.names import add_reason
from fastvid.runtime.values import things
from fastvid.sharding.change.edit import match_annotations, read_labels, relabel_samples
from fastvid.sharding.sources.annotations import read_annotations
from fastvid.storage import open_storage

_LOG = logging.getLogger(__name__)
_SHOWN = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``fastvid relabel``."""
    parser.add_argument("dataset", metavar="DIR", help="folder of the dataset")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--from", dest="table", metavar="TABLE", help="a table: key, and label or other columns")
    source.add_argument(
        "--annotations",
        action="append",
        metavar="FORMAT:FILE",
        help="as for `fastvid shard`; may be repeated",
    )
    add_columns(parser)
    parser.add_argument("--new-classes", action="store_true", help="add class names that are not in the dataset")
    add_reason(parser)


def run(args: argparse.Namespace) -> int:
    """Relabel and print the changes."""
    storage = open_storage(args.dataset)
    rows: Mapping[str, Mapping[str, Any]]
    if args.table is not None:
        rows, note = read_labels(args.table, args.columns), "relabel from a table"
    else:
        matched = match_annotations(
            read_table(storage, read_generation(storage)[1]), read_annotations(args.annotations, columns=args.columns)
        )
        for names, why in (
            (matched.unmatched, "match no sample"),
            (matched.ambiguous, "match samples of several sources"),
        ):
            if names:
                shown = ", ".join(map(repr, names[:_SHOWN])) + (", ..." if len(names) > _SHOWN else "")
                _LOG.warning("%s that %s: %s", things(len(names), "row"), why, shown)
        if not matched.rows:
            raise UsageError("no row of the annotations matches a sample", file=storage.url)
        rows, note = matched.rows, f"relabel from {', '.join(args.annotations)}"
    done = relabel_samples(storage, rows, new_classes=args.new_classes, note=note)
    if not done.columns:
        print(
            f"generation {done.generation}: nothing to change, {things(len(rows), 'sample')} already have these values"
        )
        return 0
    columns = visible(", ".join(done.columns))
    print(f"generation {done.generation}: {things(done.samples, 'sample')} changed in {columns}")
    if done.new_classes:
        print(visible(f"new classes: {', '.join(done.new_classes)}"))
    return 0
