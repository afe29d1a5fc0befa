"""Scores a checkpoint of a run on the evaluation split, every video once; prints one JSON object."""

from __future__ import annotations

import argparse

from fastvid.cli.train import add_recipe


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """RECIPE, key=value and which checkpoint."""
    add_recipe(parser)
    parser.add_argument(
        "--checkpoint", metavar="NAME", help="file name in the run's checkpoints; the newest that is whole by default"
    )


def run(args: argparse.Namespace) -> int:
    """Evaluates; exit code 1 when a sample could not be scored."""
    import json
    import os

    from fastvid.train import launch, recipes

    found = launch.score(recipes.load(args.recipe, args.changes), args.checkpoint)
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(found.as_row()))
    return 0 if found.scored == found.total else 1
