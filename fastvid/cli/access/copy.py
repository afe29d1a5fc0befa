"""Copy a dataset between folders and object stores, and check every file by its SHA-256.

Tars and annotations are compared with the hashes in the generation, all files are read back after the copy. The commit
record is written last, so that half a copy is no dataset; run the same command again to resume.
"""

from __future__ import annotations

import argparse

from fastvid.runtime.values import size, things
from fastvid.sharding.change.edit import copy_dataset
from fastvid.storage import open_storage


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``fastvid copy``."""
    parser.add_argument("dataset", metavar="DIR", help="folder or URL of the dataset")
    parser.add_argument("out", metavar="OUT", help="folder or URL of the copy")
    parser.add_argument("--all", action="store_true", help="copy every generation, not only the current one")


def run(args: argparse.Namespace) -> int:
    """Copy and print what was copied."""
    done = copy_dataset(open_storage(args.dataset), open_storage(args.out), every=args.all)
    kept = f", {things(done.present, 'file')} already there" if done.present else ""
    numbers = ", ".join(map(str, done.generations))
    print(f"{things(done.copied, 'file')}, {size(done.bytes)} copied and checked{kept}; generations {numbers}")
    return 0
