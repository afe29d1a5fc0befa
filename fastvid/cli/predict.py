"""Classify videos that are not in a dataset with a trained model.

Prints the top classes, one JSON line per video.

  fastvid predict kinetics400_tsm_r50 my.mp4 other.mp4 run.out=runs/mine --picture strip.png

Videos are encoded like the recipe's dataset, so the model sees the same kind of input as in training.
"""

from __future__ import annotations

import argparse

from fastvid.cli.evaluate import add_views


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``fastvid predict``."""
    parser.add_argument("recipe", metavar="RECIPE", help="name of a recipe that comes with fastvid, or a file's path")
    parser.add_argument("words", nargs="+", metavar="VIDEO | key=value", help="files, and settings of the recipe")
    parser.add_argument("--top", type=int, default=5, metavar="N", help="classes to print (default %(default)s)")
    parser.add_argument(
        "--picture", metavar="FILE", help="write the model's input frames: .png, or .html with the classes"
    )
    add_views(parser)


def run(args: argparse.Namespace) -> int:
    """Predict and print the classes."""
    from pathlib import Path

    from fastvid.errors import UsageError
    from fastvid.runtime.values import json_text
    from fastvid.train.config import config as recipes
    from fastvid.train.run import scoring

    if args.picture is not None and not args.picture.endswith((".png", ".html")):
        raise UsageError("--picture must end in .png or .html", file=args.picture)
    # A file name may contain "=".
    changes = [word for word in args.words if "=" in word and not Path(word).exists()]
    videos = [word for word in args.words if word not in changes]
    config = recipes.load(args.recipe, changes)
    found = scoring.predict(
        config, videos, args.checkpoint, protocol=args.protocol, size=args.size, top=max(1, args.top)
    )
    for prediction in found:
        print(json_text(prediction.as_row()))
    if args.picture is not None:
        from fastvid.report import results

        results.write(Path(args.picture), found)
    return 0
