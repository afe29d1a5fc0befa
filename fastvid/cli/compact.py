"""Rewrite the shards that contain removed samples, without those samples.

The other samples keep their bytes and order. The new shards have new names, and a new generation refers to them; the
old ones stay, for jobs that use an older generation, until `fastvid gc` deletes them.
"""

from __future__ import annotations

import argparse
import logging

from fastvid.runtime.units import size, things
from fastvid.sharding.change.compact import compact_shards
from fastvid.storage import open_storage

_LOG = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``fastvid compact``."""
    parser.add_argument("dataset", metavar="DIR", help="folder of the dataset")


def run(args: argparse.Namespace) -> int:
    """Compact the dataset and print the changes."""
    done = compact_shards(open_storage(args.dataset), progress=lambda n, total: _LOG.info("%d of %d shards", n, total))
    if not done.rewritten:
        print(f"generation {done.generation}: no shard contains removed samples")
        return 0
    for old, new in done.rewritten.items():
        print(f"{old} -> {new or 'no shard: it has no samples left'}")
    print(
        f"generation {done.generation}: dropped {things(done.samples, 'removed sample')}, {size(done.bytes)} less;"
        " the old shards stay until `fastvid gc`"
    )
    return 0
