"""Rewrites the shards that hold removed samples, without them.

Kept samples keep their bytes and their order. The new shards stand beside the old ones under new names, and a new
generation refers to them; the old ones stay for jobs that have pinned an older generation, until `fastvid gc`.
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
    """Compacts and prints what changed."""
    done = compact_shards(open_storage(args.dataset), progress=lambda n, total: _LOG.info("%d of %d shards", n, total))
    if not done.rewritten:
        print(f"generation {done.generation}: no shard holds removed samples")
        return 0
    for old, new in done.rewritten.items():
        print(f"{old} -> {new or 'nothing: no sample is left'}")
    print(
        f"generation {done.generation}: without {things(done.samples, 'removed sample')}, {size(done.bytes)} less;"
        " the old shards stay until `fastvid gc`"
    )
    return 0
