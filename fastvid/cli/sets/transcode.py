"""Encode a dataset again, such as in another size or profile, with its keys, labels, captions, splits and sound.

Removed samples are left out; all classes are kept. After a kill or an interruption, run the command again with the same
arguments to resume it. To share the work among machines, run it with --part 0/N to N-1/N and the same folder; after all
have finished, the command without --part writes the dataset.

Videos lose quality each time they are encoded: if the originals still exist, `fastvid shard` of them looks better.

Exit codes: as for `fastvid shard`.
"""

from __future__ import annotations

import argparse
import logging

from fastvid.cli.shard import (
    EXIT_REJECTED,
    add_allow_rejected,
    add_encoding_options,
    add_engine_options,
    chosen_profile,
    summary,
)
from fastvid.errors import UsageError
from fastvid.sharding.job.job import transcode_dataset

_LOG = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``fastvid transcode``."""
    parser.add_argument("dataset", metavar="DIR", help="folder of the dataset; also s3:// and gs://")
    parser.add_argument("--out", required=True, metavar="OUT", help="folder of the new dataset; also s3:// and gs://")
    add_encoding_options(parser)
    parser.add_argument(
        "--audio", choices=["drop", "copy"], help="sound as it is, or none (default: copy if the dataset has sound)"
    )
    add_engine_options(parser)
    parser.add_argument(
        "--samples-per-shard", type=int, metavar="N", help="most samples of a new shard (default: as in the old one)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the order in the new shards (default: %(default)s)"
    )
    add_allow_rejected(parser)


def run(args: argparse.Namespace) -> int:
    """Encode the dataset and print a summary."""
    if args.profile == "copy":
        raise UsageError("profile 'copy' encodes nothing", hint="use `fastvid subset` or `fastvid merge` to copy")
    _LOG.warning("videos lose quality each time they are encoded; if the originals still exist, shard them instead")
    report = transcode_dataset(
        args.dataset,
        args.out,
        profile=chosen_profile(args),
        streams=args.streams,
        audio=args.audio,
        flow=args.flow,
        flow_bound=args.flow_bound,
        engine=args.engine,
        ray_address=args.ray_address,
        workers=args.workers,
        samples_per_shard=args.samples_per_shard,
        seed=args.seed,
        allow_encoder_change=args.allow_encoder_change,
        part=args.part,
        scratch=args.scratch,
    )
    print(summary(report))
    return EXIT_REJECTED if report.rejected and not args.allow_rejected else 0
