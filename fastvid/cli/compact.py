"""Rewrite the shards that contain removed samples, without those samples.

The other samples keep their streams and order; labels and other annotations in rewritten tars are the current ones.
With --annotations, the tars that contain others, as after `fastvid relabel` or `split`, are rewritten too. The new
shards have new names, and a new generation refers to them; the old ones stay, for jobs that use an older generation,
until `fastvid gc` deletes them.
"""

from __future__ import annotations

import argparse
import logging

from fastvid.runtime.names import add_reason
from fastvid.runtime.values import size, things
from fastvid.sharding.change.compact import compact_shards
from fastvid.storage import open_storage

_LOG = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``fastvid compact``."""
    parser.add_argument("dataset", metavar="DIR", help="folder of the dataset")
    parser.add_argument(
        "--annotations",
        action="store_true",
        help="rewrite also tars whose labels, captions or other annotations changed",
    )
    add_reason(parser)


def run(args: argparse.Namespace) -> int:
    """Compact the dataset and print the changes."""
    done = compact_shards(
        open_storage(args.dataset),
        annotations=args.annotations,
        progress=lambda n, total: _LOG.info("%d of %d shards", n, total),
    )
    if not done.rewritten:
        other = " or outdated annotations" if args.annotations else ""
        print(f"generation {done.generation}: no shard contains removed samples{other}")
        return 0
    for old, new in done.rewritten.items():
        print(f"{old} -> {new or 'no shard: it has no samples left'}")
    print(
        f"generation {done.generation}: dropped {things(done.samples, 'removed sample')},"
        f" {size(abs(done.bytes))} {'less' if done.bytes >= 0 else 'more'};"
        " the old shards stay until `fastvid gc`"
    )
    return 0
