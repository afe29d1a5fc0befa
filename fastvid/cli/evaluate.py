"""Score a checkpoint of a run on the evaluation split, each video once; print one JSON object.

fastvid eval kinetics400_tsm_r50 run.out=runs/mine --protocol 10x3 --size 256 --report eval.html
"""

from __future__ import annotations

import argparse

from fastvid.cli.train import add_recipe


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``fastvid eval``."""
    add_recipe(parser)
    add_views(parser)
    parser.add_argument("--json", metavar="FILE", help="write numbers per class or column, and the confusion matrix")
    parser.add_argument("--report", metavar="FILE", help="write them as one HTML page")


def add_views(parser: argparse.ArgumentParser) -> None:
    """Add the options that select the checkpoint and the views of a video."""
    parser.add_argument(
        "--checkpoint",
        metavar="NAME",
        help="file name in the run's checkpoints, or best (default: the newest complete one)",
    )
    parser.add_argument(
        "--protocol",
        default="1x1",
        metavar="NAME",
        help="CLIPSxCROPS to average: 1x1 (default), 10x3, 1x10, twice, twicex3, ...",
    )
    parser.add_argument(
        "--size", type=int, metavar="PIXELS", help="side of the crops, such as 256 (default: the recipe's)"
    )


def run(args: argparse.Namespace) -> int:
    """Evaluate; return 1 if a sample could not be scored."""
    import os
    from pathlib import Path

    from fastvid.runtime.values import json_text
    from fastvid.train.config import config as recipes
    from fastvid.train.run import scoring

    found = scoring.score(
        recipes.load(args.recipe, args.changes), args.checkpoint, protocol=args.protocol, size=args.size
    )
    if os.environ.get("RANK", "0") == "0":
        print(json_text(found.as_row()))
        if args.json is not None:
            record = {**found.as_row(), "classes": list(found.rows)}
            if found.confusion is not None:
                record["confusion"] = found.confusion.tolist()
            Path(args.json).write_text(json_text(record) + "\n", encoding="utf-8")
        if args.report is not None:
            from fastvid.report import results

            Path(args.report).write_text(results.page(found), encoding="utf-8")
    return 0 if found.score.scored == found.score.total else 1
