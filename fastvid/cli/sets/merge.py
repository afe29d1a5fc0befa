"""Make one dataset of several, without encoding.

Classes are united by name, columns by name, and shards may have different profiles; streams must be the same. Shards
are hard-linked on a local disk and copied otherwise; tars whose keys (--prefix) or label numbers change are packed
again with the same videos. After a kill or an interruption, run the command again with the same arguments to resume it.
"""

from __future__ import annotations

import argparse

from fastvid.cli.sets.subset import report_shards, text
from fastvid.errors import visible
from fastvid.runtime.names import add_reason
from fastvid.sharding.sets.merge import merge_datasets


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``fastvid merge``."""
    parser.add_argument("datasets", nargs="+", metavar="DIR", help="folders of the datasets")
    parser.add_argument("--out", required=True, metavar="OUT", help="folder of the new dataset; also s3:// and gs://")
    parser.add_argument(
        "--prefix",
        metavar="NAMES",
        help="one name for each dataset, prepended to its keys and sources with a slash, such as a,b; empty for none",
    )
    add_reason(parser)


def run(args: argparse.Namespace) -> int:
    """Merge the datasets and print what the new one contains."""
    prefixes = [] if args.prefix is None else args.prefix.split(",")
    made = merge_datasets(args.datasets, args.out, prefixes=prefixes, progress=report_shards)
    print(text(made))
    if made.generation.classes:
        print(visible(f"classes: {', '.join(made.generation.classes)}"))
    return 0
