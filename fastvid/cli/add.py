"""Add new videos to a dataset, encoded with its profile.

Sources that are already in the dataset are skipped, including those that were rejected (unless --retry-rejected) or
removed. New samples go into new shards; old shards are not changed. After a kill or an interruption, run the command
again with the same arguments to resume it. To share the work among machines, run it with --part 0/N to N-1/N; after all
have finished, the command without --part adds the samples.

Exit codes: 0 all new sources were packed, 1 the job failed, 2 wrong usage, 3 the samples were added, but some sources
were rejected (0 with --allow-rejected).
"""

from __future__ import annotations

import argparse

from fastvid.cli.shard import EXIT_REJECTED, add_columns, add_machines_options, add_packing_options, summary
from fastvid.runtime.names import add_reason
from fastvid.sharding.change.add import add_sources


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``fastvid add``."""
    parser.add_argument("dataset", metavar="DIR", help="folder of the dataset")
    parser.add_argument("sources", nargs="+", metavar="SOURCE", help="folder of videos, or a video")
    parser.add_argument(
        "--annotations", action="append", default=[], metavar="FORMAT:PATH", help="as for `fastvid shard`"
    )
    add_columns(parser)
    parser.add_argument("--prefix", metavar="NAME", help="prepend NAME/ to the names of all these sources")
    parser.add_argument("--retry-rejected", action="store_true", help="retry sources that were rejected before")
    add_machines_options(parser)
    add_packing_options(parser)
    parser.add_argument(
        "--allow-encoder-change", action="store_true", help="encode with another ffmpeg than the dataset's"
    )
    add_reason(parser)


def run(args: argparse.Namespace) -> int:
    """Add the sources and print a summary."""
    done = add_sources(
        args.dataset,
        args.sources,
        annotations=args.annotations,
        columns=args.columns,
        prefix=args.prefix,
        retry_rejected=args.retry_rejected,
        engine=args.engine,
        ray_address=args.ray_address,
        workers=args.workers,
        part=args.part,
        samples_per_shard=args.samples_per_shard,
        max_seconds=args.max_seconds,
        max_bad_frames=args.max_bad_frames,
        seed=args.seed,
        follow_links=args.follow_links,
        allow_encoder_change=args.allow_encoder_change,
        reject_unreadable=args.reject_unreadable,
        drop_duplicates=args.drop_duplicates,
    )
    print(f"{done.known:8} already known")
    if done.report.ledger.num_rows or done.report.part is not None:
        print(summary(done.report))
    if done.report.part is None:
        print(f"generation {done.generation}")
    return EXIT_REJECTED if done.report.rejected and not args.allow_rejected else 0
