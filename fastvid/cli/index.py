"""Make a dataset of videos where they are, or of tars that other tools wrote, without re-encoding.

Videos (MP4, MOV, MKV, WebM, ...; folders, s3://, gs://, http(s)://): the dataset lists the files, with the version of
each, and indexes their packets; nothing of a video is copied. The tables of an MP4 are read by ranges. --prove says how
much of each video is compared with an independent decode: none, sample (some frames) or all (every frame; the file is
read once). A video that cannot be planned in parts is decoded from its key frames or from its start; the ledger says
so. Reading a file that changed since is an error.

lerobot:ROOT, a folder or URL of a LeRobot dataset (version 3.0 or 2.1): each episode is a sample, its cameras are
streams, its numbers are signals. Its videos stay where they are.

Tars in webdataset style (video2dataset, webdataset): one video per sample, with optional caption (txt), label (cls) and
fields (json). Every packet is indexed and verified by decoding. The tars are not changed.

ledger.parquet records the outcome of every video. After a kill or an interruption, run the command again with the same
arguments to resume it: finished shards are not indexed again. To share the work among machines, run it with --part 0/N
to N-1/N; after all have finished, the command without --part writes the dataset.

If the folder is already a dataset, rebuild all its sidecars from the tars; of videos in place, index those that changed
again, or all of them at --root if they were moved.

Tars that fastvid wrote say which dataset they are of: of them alone, without any other file, the dataset is restored
with its classes, annotations and profiles as they were when the tars were written. Later relabels are lost, and removed
samples come back unless `fastvid compact` deleted them.

Exit codes: 0 everything was indexed, 1 the job failed, 2 wrong usage, 3 the dataset is complete, but some samples could
not be indexed (0 with --allow-rejected).
"""

from __future__ import annotations

import argparse

from fastvid.cli.shard import (
    EXIT_REJECTED,
    add_allow_rejected,
    add_annotation_options,
    add_machines_options,
    add_source_options,
    check_lerobot_options,
    class_names,
    summary,
)
from fastvid.errors import UsageError
from fastvid.format.schema import DATASET_JSON
from fastvid.media.index_video import Proof
from fastvid.runtime.names import add_reason
from fastvid.runtime.values import things
from fastvid.sharding.in_place import index_videos, reindex
from fastvid.sharding.job.index import index_tars, rebuild
from fastvid.sharding.job.job import JobReport
from fastvid.sharding.job.lock import Staging
from fastvid.sharding.job.restore import are_own, restore_dataset
from fastvid.sharding.lerobot.jobs import index_lerobot
from fastvid.sharding.lerobot.read import is_lerobot
from fastvid.sharding.sources.tars import is_tar
from fastvid.storage import open_storage


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``fastvid index``."""
    parser.add_argument(
        "sources",
        nargs="*",
        metavar="SOURCE",
        help="folders of videos or single files, paths or URLs; lerobot:ROOT; tars or folders of tars; or the folder "
        "of a dataset",
    )
    parser.add_argument(
        "--out", metavar="DIR", help="folder of the dataset; tars are linked into it (default: the tars' folder)"
    )
    add_annotation_options(parser)
    parser.add_argument(
        "--prove",
        choices=list(Proof),
        help="how much of each video in place is compared with an independent decode (default: sample)",
    )
    parser.add_argument(
        "--root",
        metavar="DIR",
        help="where the videos of a dataset of videos in place are now; they are indexed there again",
    )
    add_allow_rejected(parser)
    add_source_options(parser)
    add_machines_options(parser)
    add_reason(parser)


def run(args: argparse.Namespace) -> int:
    """Index tars, or rebuild a dataset's sidecars, and print a summary."""
    if args.workers is not None and args.workers < 1:
        raise UsageError(f"--workers is {args.workers}, expected at least 1")
    is_job = args.out is not None or args.part is not None or len(args.sources) > 1
    if not is_job and args.sources and _is_dataset(args.sources[0]):
        return _rebuild(args)
    if any(map(is_lerobot, args.sources)):
        return _report(args, _index_lerobot(args))
    if not args.sources or not all(map(is_tar, args.sources)):
        return _report(args, _index_videos(args))
    if args.annotations or args.columns or args.prove:
        raise UsageError("tars contain their labels and columns, and are proven whole", hint="omit the option")
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
    return _report(args, report)


def _rebuild(args: argparse.Namespace) -> int:
    """Rebuild the sidecars of shards with tars; index videos in place again if they changed or were moved."""
    if shards := rebuild(args.sources[0], workers=args.workers):
        print(f"rebuilt the sidecars of {things(len(shards), 'shard')}")
    found = reindex(args.sources[0], root=args.root, workers=args.workers)
    if found.shards or not shards:
        again = things(len(found.shards), "shard")
        print(f"{things(found.changed, 'file')} changed; indexed {again} again: generation {found.generation}")
    return 0


def _index_videos(args: argparse.Namespace) -> JobReport:
    if args.out is None:
        raise UsageError("videos are listed in a new folder", hint="name it with --out DIR")
    return index_videos(
        args.sources,
        args.out,
        annotations=args.annotations,
        columns=args.columns,
        class_names=class_names(args.classes),
        proof=args.prove or Proof.SAMPLE,
        engine=args.engine,
        ray_address=args.ray_address,
        workers=args.workers,
        follow_links=args.follow_links,
        part=args.part,
        reject_unreadable=args.reject_unreadable,
    )


def _index_lerobot(args: argparse.Namespace) -> JobReport:
    if args.out is None:
        raise UsageError("a dataset of episodes is made in a new folder", hint="name it with --out DIR")
    check_lerobot_options(args, annotations=[], columns=None, classes=None, follow_links=False)
    return index_lerobot(
        args.sources[0],
        args.out,
        proof=args.prove or Proof.SAMPLE,
        engine=args.engine,
        ray_address=args.ray_address,
        workers=args.workers,
        part=args.part,
        reject_unreadable=args.reject_unreadable,
    )


def _report(args: argparse.Namespace, report: JobReport) -> int:
    print(summary(report))
    return EXIT_REJECTED if report.rejected and not args.allow_rejected else 0


def _is_dataset(folder: str) -> bool:
    """Return whether it is a dataset, and not one whose job was killed just after its commit."""
    if folder.endswith(".tar"):
        return False
    storage = open_storage(folder)
    return storage.exists(DATASET_JSON) and Staging(storage).job() is None
