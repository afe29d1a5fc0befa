"""Train a recipe in this process, or on every rank under torchrun:

  torchrun --nproc-per-node 8 -m fastvid.train RECIPE [key=value ...]

A run resumes from the newest checkpoint in its folder. On SIGTERM it writes a checkpoint and exits.
"""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``fastvid train``."""
    add_recipe(parser)
    parser.add_argument("--show", action="store_true", help="print the configuration as JSON and do not train")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="check files, labels, weights, steps and memory; print them as JSON and do not train",
    )
    parser.add_argument(
        "--world", type=int, default=1, metavar="N", help="world size that a dry run assumes (default 1)"
    )


def run(args: argparse.Namespace) -> int:
    """Train, or print the configuration or the results of a dry run."""
    import json

    from fastvid.train.config import config
    from fastvid.train.config import config as recipes
    from fastvid.train.run import launch

    chosen = recipes.load_all(args.recipe, args.changes)
    if args.show:
        for one in chosen:
            print(json.dumps(config.to_json(one), indent=1))
        return 0
    if args.dry_run:
        from fastvid.train.run import dry_run

        for found in dry_run.check(chosen, max(1, args.world)):
            print(json.dumps(found, indent=1))
        return 0
    return launch.start(chosen)


def add_recipe(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that select a configuration."""
    parser.add_argument("recipe", metavar="RECIPE", help="name of a recipe that comes with fastvid, or a file's path")
    parser.add_argument("changes", nargs="*", metavar="key=value", help="such as optim.base_lr=0.02 or run.epochs=10")
