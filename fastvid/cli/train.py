"""Trains a recipe in this process, or on every rank when torchrun starts it:

  torchrun --nproc-per-node 8 -m fastvid.train RECIPE [key=value ...]

A run goes on from the newest checkpoint in its folder. On SIGTERM it writes one and ends.
"""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """RECIPE and key=value."""
    add_recipe(parser)
    parser.add_argument("--show", action="store_true", help="print the configuration as JSON and train nothing")


def run(args: argparse.Namespace) -> int:
    """Trains."""
    import json

    from fastvid.train import config, launch, recipes

    chosen = recipes.load(args.recipe, args.changes)
    if args.show:
        print(json.dumps(config.to_json(chosen), indent=1))
        return 0
    return launch.train(chosen)


def add_recipe(parser: argparse.ArgumentParser) -> None:
    """The arguments that name a configuration."""
    parser.add_argument("recipe", metavar="RECIPE", help="name of a recipe that comes with fastvid, or a file's path")
    parser.add_argument("changes", nargs="*", metavar="key=value", help="such as optim.base_lr=0.02 or sync=ddp")
