"""Add new videos to a dataset, encoded with its profile.

Sources that are already in the dataset are skipped, including those that were rejected (unless --retry-rejected) or
removed. New samples go into new shards; old shards are not changed. After a kill or an interruption, run the command
again with the same arguments to resume it.

Exit codes: 0 all new sources were packed, 1 the job failed, 2 wrong usage, 3 the samples were added, but some sources
were rejected (0 with --allow-rejected).
"""

from __future__ import annotations

import argparse

from fastvid.cli.shard import EXIT_REJECTED, add_packing_options, summary
from fastvid.sharding.change.add import add_sources


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``fastvid add``."""
    parser.add_argument("dataset", metavar="DIR", help="folder of the dataset")
    parser.add_argument("sources", nargs="+", metavar="SOURCE", help="folder of videos, or a video")
    parser.add_argument(
        "--annotations", action="append", default=[], metavar="FORMAT:PATH", help="as for `fastvid shard`"
    )
    parser.add_argument("--prefix", metavar="NAME", help="prepend NAME/ to the names of all these sources")
    parser.add_argument("--retry-rejected", action="store_true", help="retry sources that were rejected before")
    parser.add_argument("--workers", type=int, metavar="N", help="processes (default: one per core)")
    add_packing_options(parser)
    parser.add_argument(
        "--allow-encoder-change", action="store_true", help="encode with another ffmpeg than the dataset's"
    )


def run(args: argparse.Namespace) -> int:
    """Add the sources and print a summary."""
    done = add_sources(
        args.dataset,
        args.sources,
        annotations=args.annotations,
        prefix=args.prefix,
        retry_rejected=args.retry_rejected,
        workers=args.workers,
        samples_per_shard=args.samples_per_shard,
        max_seconds=args.max_seconds,
        seed=args.seed,
        follow_links=args.follow_links,
        allow_encoder_change=args.allow_encoder_change,
        reject_unreadable=args.reject_unreadable,
    )
    print(f"{done.known:8} already known")
    if done.report.ledger.num_rows:
        print(summary(done.report))
    print(f"generation {done.generation}")
    return EXIT_REJECTED if done.report.rejected and not args.allow_rejected else 0
