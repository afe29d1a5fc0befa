"""Make a dataset from video tars that other tools wrote, without re-encoding.

Accepts webdataset-style tars (video2dataset, webdataset): one video per sample, with optional caption (txt), label
(cls) and fields (json). Every packet is indexed and verified by decoding; videos that cannot be decoded in parts are
marked to be decoded whole. The tars are not changed. ledger.parquet records the outcome of every sample.

After a kill or an interruption, run the command again with the same arguments to resume it: finished tars are not
indexed again. To share the work among machines, run it with --part 0/N to N-1/N; after all have finished, the command
without --part writes the dataset.

If the folder is already a dataset, rebuild all its sidecars from the tars.

Tars that fastvid wrote say which dataset they are of: of them alone, without any other file, the dataset is restored
with its classes, annotations and profiles as they were when the tars were written. Later relabels are lost, and removed
samples come back unless `fastvid compact` deleted them.

Exit codes: 0 everything was indexed, 1 the job failed, 2 wrong usage, 3 the dataset is complete, but some samples could
not be indexed (0 with --allow-rejected).
"""

from __future__ import annotations

import argparse

from fastvid.cli.shard import EXIT_REJECTED, add_allow_rejected, add_machines_options, class_names, summary
from fastvid.errors import UsageError
from fastvid.format.schema import DATASET_JSON
from fastvid.runtime.command_line import add_reason
from fastvid.runtime.units import things
from fastvid.sharding.change.restore import are_own, restore_dataset
from fastvid.sharding.job.index import index_tars, rebuild
from fastvid.sharding.job.staging import Staging
from fastvid.storage import open_storage


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``fastvid index``."""
    parser.add_argument("sources", nargs="+", metavar="TAR", help="tars, folders of tars, or the folder of a dataset")
    parser.add_argument(
        "--out", metavar="DIR", help="folder of the dataset; tars are linked into it (default: the tars' folder)"
    )
    parser.add_argument("--classes", metavar="FILE", help="class names for integer labels, one per line")
    add_allow_rejected(parser)
    add_machines_options(parser)
    add_reason(parser)


def run(args: argparse.Namespace) -> int:
    """Index tars, or rebuild a dataset's sidecars, and print a summary."""
    if args.workers is not None and args.workers < 1:
        raise UsageError(f"--workers is {args.workers}, expected at least 1")
    is_job = args.out is not None or args.part is not None or len(args.sources) > 1
    if not is_job and _is_dataset(args.sources[0]):
        print(f"rebuilt the sidecars of {things(len(rebuild(args.sources[0], workers=args.workers)), 'shard')}")
        return 0
    if are_own(args.sources):
        if args.classes is not None or args.part is not None:
            raise UsageError("tars of fastvid name their classes and are indexed in one run", hint="omit the option")
        made = restore_dataset(args.sources, args.out)
        shards = things(len(made.generation.shards), "shard")
        print(f"restored {things(made.generation.num_samples, 'sample')} in {shards} from fastvid's own tars")
        if made.replaced:
            print(f"left out, because later tars contain their samples: {', '.join(made.replaced)}")
        return 0
    report = index_tars(
        args.sources,
        args.out,
        class_names=class_names(args.classes),
        engine=args.engine,
        ray_address=args.ray_address,
        workers=args.workers,
        part=args.part,
    )
    print(summary(report))
    return EXIT_REJECTED if report.rejected and not args.allow_rejected else 0


def _is_dataset(folder: str) -> bool:
    """Return whether it is a dataset, and not one whose job was killed just after its commit."""
    if folder.endswith(".tar"):
        return False
    storage = open_storage(folder)
    return storage.exists(DATASET_JSON) and Staging(storage).job() is None
