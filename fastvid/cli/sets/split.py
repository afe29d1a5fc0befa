"""Divide the samples of a dataset into splits, as a new column; no shard is rewritten.

All samples of a group are in one split: by default the segments of one file. With --stratify each class keeps its
proportion in every split, as far as the sizes of groups allow. The result depends on the names of groups and the seed.
Samples that have a split keep it, so run it again after `fastvid add` to assign the new ones. Open a split by
`fastvid.open(DIR, split="train")`, or "split2:train" for another column.
"""

from __future__ import annotations

import argparse

from fastvid.errors import UsageError, visible
from fastvid.runtime.names import add_reason
from fastvid.runtime.values import padded, text_width, things
from fastvid.sharding.sets.split import SplitReport, split_samples
from fastvid.storage import open_storage


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``fastvid split``."""
    parser.add_argument("dataset", metavar="DIR", help="folder of the dataset")
    parser.add_argument("shares", metavar="SHARES", help="share of each split, such as 0.9,0.1")
    parser.add_argument("--names", metavar="NAMES", help="names of the splits (default: train,val or train,val,test)")
    parser.add_argument(
        "--by",
        default="parent",
        metavar="COLUMN",
        help="keep samples with the same value together; parent: the file that they were cut from; key: divide single"
        " samples (default: %(default)s)",
    )
    parser.add_argument("--stratify", metavar="COLUMN", help="keep the proportions of its values, such as label")
    parser.add_argument("--seed", type=int, default=0, help="seed of the division (default: %(default)s)")
    parser.add_argument("--column", default="split", metavar="NAME", help="column to write (default: %(default)s)")
    parser.add_argument("--replace", action="store_true", help="assign all samples anew, also those that have a split")
    add_reason(parser)


def run(args: argparse.Namespace) -> int:
    """Split the dataset and print what is in each split."""
    try:
        shares = [float(share) for share in args.shares.split(",")]
    except ValueError as error:
        raise UsageError(f"shares {args.shares!r} are no numbers", hint="give shares such as 0.9,0.1") from error
    report = split_samples(
        open_storage(args.dataset),
        shares,
        names=args.names.split(",") if args.names else (),
        by=args.by,
        stratify=args.stratify,
        seed=args.seed,
        column=args.column,
        replace=args.replace,
    )
    print(_text(report))
    return 0


def _text(report: SplitReport) -> str:
    splits = report.splits
    kinds = sorted({kind for split in splits.values() for kind in split.samples}, key=lambda kind: (kind is None, kind))
    width = max(len("class"), *(text_width(kind or "no label") for kind in kinds))
    lines = ["class".ljust(width) + "".join(f"{name:>12}{'hours':>9}" for name in splits)]
    for kind in kinds:
        cells = "".join(
            f"{split.samples.get(kind, 0):12}{split.seconds.get(kind, 0.0) / 3600:9.3f}" for split in splits.values()
        )
        lines.append(padded("no label" if kind is None else kind, width) + cells)
    cells = "".join(
        f"{sum(split.samples.values()):12}{sum(split.seconds.values()) / 3600:9.3f}" for split in splits.values()
    )
    lines.append("all".ljust(width) + cells)
    lines.append("groups".ljust(width) + "".join(f"{split.groups:12}{'':9}" for split in splits.values()).rstrip())
    kept = f", {report.kept} had one" if report.kept else ""
    lines.append(f"generation {report.generation}: {things(report.placed, 'sample')} got a {report.column}{kept}")
    return "\n".join(map(visible, lines))
