"""Name a generation of a dataset, so that it can be opened by the name and `fastvid gc` keeps it.

fastvid tag DIR paper              the current generation
fastvid tag DIR paper 3            generation 3
fastvid tag DIR paper 7 --move     take the name from the generation that has it
fastvid tag DIR paper --delete
"""

from __future__ import annotations

import argparse

from fastvid.errors import UsageError
from fastvid.sharding.change.history import delete_tag, tag_generation
from fastvid.storage import open_storage


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``fastvid tag``."""
    parser.add_argument("dataset", metavar="DIR", help="folder of the dataset")
    parser.add_argument("tag", metavar="TAG", help="up to 64 letters, digits, dots, dashes and underscores")
    parser.add_argument("generation", metavar="N|TAG", nargs="?", help="generation (default: the current one)")
    parser.add_argument("--move", action="store_true", help="take the name from another generation")
    parser.add_argument("--delete", action="store_true", help="delete the name, not the generation")


def run(args: argparse.Namespace) -> int:
    """Set or delete the tag."""
    storage = open_storage(args.dataset)
    if args.delete:
        if args.generation is not None or args.move:
            raise UsageError("--delete takes a tag alone", hint="leave out the generation and --move")
        print(f"generation {delete_tag(storage, args.tag)} is no longer called {args.tag}")
    else:
        number = tag_generation(storage, args.tag, args.generation, move=args.move)
        print(f"generation {number} is called {args.tag}")
    return 0
