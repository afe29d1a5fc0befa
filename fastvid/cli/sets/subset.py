"""Make a dataset of some of the samples of another one, without encoding.

Options are combined: only samples that meet all of them are taken. Annotations, classes and ledger rows come along, and
the new dataset records which dataset, generation and selection it was made from. After a kill or an interruption, run
the command again with the same arguments to resume it.
"""

from __future__ import annotations

import argparse
import logging

from fastvid.cli.remove import read_lines
from fastvid.runtime.names import add_reason
from fastvid.runtime.values import size, things
from fastvid.sharding.sets.make import Made
from fastvid.sharding.sets.split import Selection, make_subset

_LOG = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``fastvid subset``."""
    parser.add_argument("dataset", metavar="DIR", help="folder of the dataset")
    parser.add_argument("--out", required=True, metavar="OUT", help="folder of the new dataset; also s3:// and gs://")
    parser.add_argument("--share", type=float, metavar="SHARE", help="share of the samples, such as 0.05")
    parser.add_argument(
        "--by",
        default="parent",
        metavar="COLUMN",
        help="--share takes all samples with the same value or none; parent: the file that they were cut from; key:"
        " single samples (default: %(default)s)",
    )
    parser.add_argument("--stratify", metavar="COLUMN", help="--share keeps the proportions of its values")
    parser.add_argument("--per-class", type=int, metavar="N", help="at most N samples of each class")
    parser.add_argument("--seed", type=int, default=0, help="seed of --share and --per-class (default: %(default)s)")
    parser.add_argument("--where", metavar="SQL", help="condition, as for `fastvid.open`")
    parser.add_argument("--split", metavar="NAME", help="split, such as train or split2:test")
    parser.add_argument("--keys-file", metavar="FILE", help="a file with one key per line; - is stdin")
    parser.add_argument("--generation", metavar="N|TAG", help="take them from this generation (default: current)")
    add_reason(parser)


def run(args: argparse.Namespace) -> int:
    """Make the subset and print what it contains."""
    selection = Selection(
        split=args.split,
        where=args.where,
        keys=None if args.keys_file is None else read_lines(args.keys_file, "keys"),
        share=args.share,
        by=args.by,
        stratify=args.stratify,
        per_class=args.per_class,
        seed=args.seed,
    )
    made = make_subset(args.dataset, args.out, selection, generation=args.generation, progress=report_shards)
    print(text(made))
    return 0


def report_shards(number: int, total: int) -> None:
    """Log how many shards are finished."""
    _LOG.info("%d of %d shards", number, total)


def text(made: Made) -> str:
    """Render what a new dataset contains."""
    shards = made.generation.shards
    return (
        f"{made.dataset}: {things(made.generation.num_samples, 'sample')} in {things(len(shards), 'shard')},"
        f" {size(sum(shard.bytes for shard in shards))}; {made.linked} of the shards are linked or copied whole"
    )
