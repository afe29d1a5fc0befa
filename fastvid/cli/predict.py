"""What a trained model says of videos that are in no dataset: the likeliest classes, as one JSON line a video.

  fastvid predict kinetics400_tsm_r50 my.mp4 other.mp4 run.out=runs/mine --picture strip.png

A video is encoded as the recipe's dataset was, so the model sees what it was trained on.
"""

from __future__ import annotations

import argparse

from fastvid.cli.evaluate import add_views


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """RECIPE, videos, key=value and how to look at them."""
    parser.add_argument("recipe", metavar="RECIPE", help="name of a recipe that comes with fastvid, or a file's path")
    parser.add_argument("words", nargs="+", metavar="VIDEO | key=value", help="files, and settings of the recipe")
    parser.add_argument("--top", type=int, default=5, metavar="N", help="classes to tell (default %(default)s)")
    parser.add_argument("--picture", metavar="FILE", help="write the frames it saw: .png, or .html with the classes")
    add_views(parser)


def run(args: argparse.Namespace) -> int:
    """Predicts."""
    import json
    from pathlib import Path

    from fastvid.errors import UsageError
    from fastvid.train.config import recipes
    from fastvid.train.run import predict

    if args.picture is not None and not args.picture.endswith((".png", ".html")):
        raise UsageError("--picture must end in .png or .html", file=args.picture)
    # A file may have "=" in its name.
    changes = [word for word in args.words if "=" in word and not Path(word).exists()]
    videos = [word for word in args.words if word not in changes]
    config = recipes.load(args.recipe, changes)
    found = predict.predict(
        config, videos, args.checkpoint, protocol=args.protocol, size=args.size, top=max(1, args.top)
    )
    for prediction in found:
        print(json.dumps(prediction.as_row()))
    if args.picture is not None:
        from fastvid.report import predictions

        predictions.write(Path(args.picture), found)
    return 0
