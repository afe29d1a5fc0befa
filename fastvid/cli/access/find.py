"""Show where samples are: shard, row, bytes in the tar, source, class, and whether they were removed.

KEY is a key or a part of keys or source names. --source lists all samples of a source file; --where prints the keys of
the samples that a condition selects.
"""

from __future__ import annotations

import argparse

from fastvid.decode.video_dataset import find_samples
from fastvid.errors import visible
from fastvid.runtime.values import json_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``fastvid find``."""
    parser.add_argument("dataset", metavar="DIR", help="folder or URL of the dataset")
    parser.add_argument("text", nargs="?", metavar="KEY", help="a key, or a part of keys or source names")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--source", metavar="NAME", help="all samples of a source")
    what.add_argument("--where", metavar="SQL", help="keys of samples, such as \"class = 'archery'\"")
    parser.add_argument("--generation", type=int, metavar="N", help="number of the generation (default: the current)")
    parser.add_argument("--json", action="store_true", help="one JSON object per sample and line")


def run(args: argparse.Namespace) -> int:
    """Print the samples."""
    found = find_samples(args.dataset, args.text, source=args.source, where=args.where, generation=args.generation)
    for number, sample in enumerate(found):
        if args.json:
            print(json_text(sample, default=str))
        elif args.where is not None:
            print(sample["key"])
        else:
            lines = [visible(f"{name:14} {value}") for name, value in sample.items() if value is not None]
            print("\n" * (number > 0) + "\n".join(lines))
    return 0
