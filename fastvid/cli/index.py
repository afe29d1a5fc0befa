"""Make a dataset from video tars that other tools wrote, without re-encoding.

Accepts webdataset-style tars (video2dataset, webdataset): one video per sample, with optional caption (txt), label
(cls) and fields (json). Every packet is indexed and verified by decoding; videos that cannot be decoded in parts are
marked to be decoded whole. The tars are not changed. ledger.parquet records the outcome of every sample.

If the folder is already a dataset, rebuild all its sidecars from the tars.

Exit codes: 0 everything was indexed, 1 the job failed, 2 wrong usage, 3 the dataset is complete, but some samples could
not be indexed (0 with --allow-rejected).
"""

from __future__ import annotations

import argparse

from fastvid.cli.shard import EXIT_REJECTED, add_allow_rejected, class_names, summary
from fastvid.errors import UsageError
from fastvid.format.schema import DATASET_JSON
from fastvid.runtime.units import things
from fastvid.sharding.job.index import index_tars, rebuild
from fastvid.storage import open_storage


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``fastvid index``."""
    parser.add_argument("sources", nargs="+", metavar="TAR", help="tars, folders of tars, or the folder of a dataset")
    parser.add_argument(
        "--out", metavar="DIR", help="folder of the dataset; tars are linked into it (default: the tars' folder)"
    )
    parser.add_argument("--classes", metavar="FILE", help="class names for integer labels, one per line")
    add_allow_rejected(parser)
    parser.add_argument("--workers", type=int, metavar="N", help="processes (default: one per core)")


def run(args: argparse.Namespace) -> int:
    """Index tars, or rebuild a dataset's sidecars, and print a summary."""
    if args.workers is not None and args.workers < 1:
        raise UsageError(f"--workers is {args.workers}, expected at least 1")
    if args.out is None and len(args.sources) == 1 and _is_dataset(args.sources[0]):
        print(f"rebuilt the sidecars of {things(len(rebuild(args.sources[0], workers=args.workers)), 'shard')}")
        return 0
    report = index_tars(args.sources, args.out, class_names=class_names(args.classes), workers=args.workers)
    print(summary(report))
    return EXIT_REJECTED if report.rejected and not args.allow_rejected else 0


def _is_dataset(folder: str) -> bool:
    return not folder.endswith(".tar") and open_storage(folder).exists(DATASET_JSON)
